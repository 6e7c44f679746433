"""Tests of the operator's metrics: their names, and the events that change them."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from controlplane.operator_objects import member
from dualmap.objects.times import read_time
from dualmap_operator.decide.observed import PoolStatus
from dualmap_operator.decide.pod_reading import read_status
from dualmap_operator.run.metrics import Metrics

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def ring(*states: str, version: int = 1) -> PoolStatus:
    members = [member(f"qwen-{number}", state) for number, state in enumerate(states)]
    return read_status({"ring": {"version": version, "members": members}})


def page(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_count_reconciles_by_result() -> None:
    metrics = Metrics()
    metrics.reconciled("done", 0.1)
    metrics.reconciled("conflict", 0.1)
    metrics.waiting(1)

    shown = page(metrics)
    assert shown['dualmap_operator_reconciles_total{result="done"}'] == 1
    assert shown["dualmap_operator_reconcile_seconds_count"] == 2
    assert shown["dualmap_operator_reconcile_queue"] == 1


def test_ring_metrics_show_version_and_members_until_deletion() -> None:
    metrics = Metrics()
    metrics.published("llm/qwen", ring("Active", "Active", "Joining", version=4), 0.0)

    shown = page(metrics)
    assert shown['dualmap_operator_ring_members{pool="llm/qwen",state="Active"}'] == 2
    assert shown['dualmap_operator_ring_members{pool="llm/qwen",state="Draining"}'] == 0
    assert shown['dualmap_operator_ring_version{pool="llm/qwen"}'] == 4

    metrics.forget("llm/qwen")
    assert not any("llm/qwen" in name for name in page(metrics))


def test_drain_duration_metric_lasts_from_draining_to_removal() -> None:
    metrics = Metrics()
    began_s = read_time("2026-11-20T08:00:00Z")
    assert began_s is not None
    metrics.published("llm/qwen", ring("Active", "Draining"), began_s)
    metrics.published("llm/qwen", ring("Active", "Draining"), began_s + 20)
    assert page(metrics)["dualmap_operator_drain_seconds_count"] == 0

    metrics.published("llm/qwen", ring("Active"), began_s + 42)
    metrics.published("llm/qwen", ring(), began_s + 99)

    shown = page(metrics)
    assert shown["dualmap_operator_drain_seconds_count"] == 1
    assert shown["dualmap_operator_drain_seconds_sum"] == 42


def test_watch_age_metrics_are_read_at_each_scrape() -> None:
    metrics = Metrics()
    ages = {"Pod": 3.0}
    metrics.watch(lambda: ages)
    assert page(metrics)['dualmap_operator_watch_age_seconds{kind="Pod"}'] == 3

    ages["Pod"] = 4.0
    assert page(metrics)['dualmap_operator_watch_age_seconds{kind="Pod"}'] == 4


def test_metrics_include_leadership_and_api_requests() -> None:
    metrics = Metrics()
    metrics.leading(True)
    metrics.api_request("PATCH", 409)

    shown = page(metrics)
    assert shown["dualmap_operator_leader"] == 1
    assert shown['dualmap_operator_api_requests_total{code="409",verb="PATCH"}'] == 1


def exported() -> dict[str, tuple[str, set[str]]]:
    metrics = Metrics()
    metrics.watch(lambda: {"Pod": 3.0})
    metrics.reconciled("done", 0.1)
    metrics.published("llm/qwen", ring("Active"), 0.0)
    metrics.api_request("PATCH", 200)
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        # The library also exports each counter's start time.
        if not name.endswith("_created"):
            found[name] = (family.type, labels)
    return found


def test_metrics_page_lists_exactly_the_exported_metrics() -> None:
    _, _, after = DOCUMENT.read_text().partition("## Metrics of the operator")
    of_operator, _, _ = after.partition("## Metrics of pd-proxy")
    rows = re.findall(r"^\| `(dualmap_\w+)` \| (\w+) \| ([^|]*)\|", of_operator, re.MULTILINE)
    assert len(rows) == len({name for name, _, _ in rows})
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert documented == exported()
