"""The chart's alerts, tried by promtool on series recorded from routers, an operator and an Envoy at work.

A healthy day is the recorded minute gone on for two hours; each fault is that day with a few series otherwise. The
recording is made by e2e/controlplane/record_metrics.py.
"""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tools import find_promtool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "helm" / "dualmap" / "files" / "alerts.yaml"
RECORDED = json.loads((ROOT / "tests" / "chart" / "recorded" / "series.json").read_text())
DOCUMENT = (ROOT / "docs" / "alerts.md").read_text()
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
INTERVAL_S = 30
SLOW_INTERVAL_S = 60
"""Prometheus' own default, for those who name the file under rule_files."""
HOURS = 2
STEPS = HOURS * 3600 // INTERVAL_S


@dataclass(frozen=True, slots=True)
class Series:
    """What a series does: ``start`` at first, ``per_s`` more each second; or it is not there at all."""

    start: float
    per_s: float = 0.0
    absent: bool = False

    def values(self) -> str:
        if self.absent:
            return f"_x{STEPS}"
        return f"{self.start:g}{self.per_s * INTERVAL_S:+g}x{STEPS}"


@dataclass(frozen=True, slots=True)
class Burst(Series):
    """A counter that is at rest but for ``lasts_s``, which began ``ago_s`` before the end of the day."""

    ago_s: int = 0
    lasts_s: int = 0

    def values(self) -> str:
        before, during = STEPS - self.ago_s // INTERVAL_S, self.lasts_s // INTERVAL_S
        top = self.start + self.per_s * self.lasts_s
        return (
            f"{self.start:g}x{before} {self.start + self.per_s * INTERVAL_S:g}"
            f"{self.per_s * INTERVAL_S:+g}x{during - 1} {top:g}x{STEPS - before - during - 1}"
        )


GONE = Series(0, absent=True)


def healthy_day() -> dict[str, Series]:
    apart_s = RECORDED["apart_s"]
    day = {}
    for name, (first, last) in RECORDED["series"].items():
        counts = re.match(r"\w+(_total|_bucket|_count|_sum)\{|envoy_http_ext_proc", name)
        day[name] = Series(last, (last - first) / apart_s) if counts else Series(last)
    return day


def of(name: str, **labels: str) -> list[str]:
    """The recorded series of a metric with these labels; there must be some."""
    found = [
        series
        for series in RECORDED["series"]
        if series.startswith(f"{name}{{") and all(f'{label}="{value}"' in series for label, value in labels.items())
    ]
    assert found, f"no series of {name} {labels} was recorded"
    return found


def assert_fire(promtool: Path, day: dict[str, Series], expected: set[str], directory: Path) -> None:
    """Let promtool say whether just these alerts fire at the end of the day."""
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": f"{INTERVAL_S}s",
                "input_series": [{"series": name, "values": series.values()} for name, series in day.items()],
                "promql_expr_test": [
                    {
                        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{HOURS}h",
                        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected],
                    }
                ],
            }
        ],
    }
    file = directory / "test.yaml"
    file.write_text(json.dumps(test))
    said = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=100)
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.fixture(scope="module", name="promtool")
def _promtool() -> Path:
    found = find_promtool()
    if found is None:
        pytest.skip("promtool is not there: e2e/debian.sh gets it, as does apt-get install prometheus")
    return found


def test_promtool_takes_the_rules(promtool: Path) -> None:
    checked = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names)
    assert re.findall(r"^## (DualMap\w+)$", DOCUMENT, re.MULTILINE) == names
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_every_metric_was_recorded() -> None:
    asked = {name for rule in ALERTS for name in re.findall(r"\b(?:dualmap|envoy)_\w+", rule["expr"])}
    recorded = {series.partition("{")[0] for series in RECORDED["series"]}
    # Counters by kind have no series before the first of a kind; docs/metrics.md is held to have their names.
    unseen = {"dualmap_kube_errors_total", "dualmap_refused_requests_total"}
    assert asked - recorded - unseen == set()


def test_a_healthy_day_is_silent(promtool: Path, tmp_path: Path) -> None:
    assert_fire(promtool, healthy_day(), set(), tmp_path)


ROUTER = 'namespace="dualmap-system",pod="router-0"'
OPERATOR = 'namespace="dualmap-system",pod="operator-0"'


def changed(name: str, series: Series, **labels: str) -> dict[str, Series]:
    return dict.fromkeys(of(name, **labels), series)


FAULTS: dict[str, tuple[dict[str, Series], set[str]]] = {
    "four in ten first tokens are late": (
        {
            **changed("dualmap_first_tokens_total", Series(0, 0.4), slo="missed"),
            **changed("dualmap_first_tokens_total", Series(0, 0.6), slo="met"),
        },
        {"DualMapSLOMissed", "DualMapSLOBudgetBurns"},
    ),
    "two in ten are": (
        {
            **changed("dualmap_first_tokens_total", Series(0, 0.2), slo="missed"),
            **changed("dualmap_first_tokens_total", Series(0, 0.8), slo="met"),
        },
        {"DualMapSLOBudgetBurns"},
    ),
    "one in twenty is": (
        {
            **changed("dualmap_first_tokens_total", Series(0, 0.05), slo="missed"),
            **changed("dualmap_first_tokens_total", Series(0, 0.95), slo="met"),
        },
        set(),
    ),
    "all of very few are": (
        {
            **changed("dualmap_first_tokens_total", Series(0, 0.001), slo="missed"),
            **changed("dualmap_first_tokens_total", Series(0, 0.0), slo="met"),
        },
        set(),
    ),
    "requests are refused for want of room": (
        {f'dualmap_refused_requests_total{{code="queue_full",{ROUTER},pool="llm/qwen"}}': Series(0, 0.5)},
        {"DualMapRequestsRefused"},
    ),
    "one request in two and a half minutes is refused": (
        {f'dualmap_refused_requests_total{{code="waited_too_long",{ROUTER},pool="llm/qwen"}}': Series(0, 1 / 150)},
        set(),
    ),
    "a pool that has never sent one on refuses one in a minute": (
        {f'dualmap_refused_requests_total{{code="no_endpoint",{ROUTER},pool="llm/idle"}}': Series(0, 1 / 60)},
        {"DualMapRequestsRefused"},
    ),
    "clients ask for a model that is not there": (
        {f'dualmap_refused_requests_total{{code="model_not_found",{ROUTER},pool="llm/qwen"}}': Series(0, 0.5)},
        set(),
    ),
    "Envoy fails open": (
        changed("envoy_http_ext_proc_failure_mode_allowed", Series(0, 2), envoy_http_conn_manager_prefix="requests"),
        {"DualMapFailOpen"},
    ),
    "a router is killed, and Envoy fails open until it notices": (
        changed(
            "envoy_http_ext_proc_failure_mode_allowed",
            Burst(0, 2, ago_s=210, lasts_s=60),
            envoy_http_conn_manager_prefix="requests",
        ),
        set(),
    ),
    "a pool at zero is woken, which takes its engine a few minutes": (
        {
            f'dualmap_refused_requests_total{{code="waited_too_long",{ROUTER},pool="llm/qwen"}}': Burst(
                0, 0.5, ago_s=330, lasts_s=210
            )
        },
        set(),
    ),
    "no router is scraped": (
        {name: GONE for name in RECORDED["series"] if 'pod="router-' in name},
        {"DualMapRoutersGone"},
    ),
    "one router is not": (
        {name: GONE for name in RECORDED["series"] if 'pod="router-1"' in name},
        set(),
    ),
    "one router does not reach Redis": (
        changed("dualmap_store_up", Series(0), pod="router-1"),
        {"DualMapRedisAway"},
    ),
    "Envoy does not follow the choice": (
        changed("dualmap_served_elsewhere_total", Series(0, 1)),
        {"DualMapServedElsewhere"},
    ),
    "engines have evicted what the routers believe in": (
        {
            **changed("dualmap_checked_cached_tokens_total", Series(0, 1000)),
            **changed("dualmap_measured_cached_tokens_total", Series(0, 500)),
        },
        {"DualMapCacheHitsBelowPrediction"},
    ),
    "an endpoint is suspended again and again": (
        changed("dualmap_endpoint_suspended", Series(1), pod="router-0", endpoint="qwen-1"),
        {"DualMapEndpointSuspended"},
    ),
    "the access log does not arrive": (
        changed("dualmap_completions_total", Series(0, 0.1), outcome="expired"),
        {"DualMapEndsNotHeardOf"},
    ),
    "a router's watch is silent": (
        changed("dualmap_kube_watch_age_seconds", Series(0, 1), pod="router-0", resource="pods"),
        {"DualMapMembershipStale"},
    ),
    "the operator's is": (
        changed("dualmap_operator_watch_age_seconds", Series(500), kind="Pod"),
        {"DualMapMembershipStale"},
    ),
    "a router has an older ring": (
        changed("dualmap_ring_version", Series(0), pod="router-0"),
        {"DualMapRoutersDisagree"},
    ),
    "the ring changes all the time, and each router is asked a moment later than the other": (
        {
            **changed("dualmap_ring_version", Series(1, 0.2), pod="router-0"),
            **changed("dualmap_ring_version", Series(3, 0.2), pod="router-1"),
            **changed("dualmap_operator_ring_version", Series(4, 0.2)),
        },
        set(),
    ),
    "and the operator a moment before both": (
        {
            **changed("dualmap_ring_version", Series(3, 0.2), pod="router-0"),
            **changed("dualmap_ring_version", Series(4, 0.2), pod="router-1"),
            **changed("dualmap_operator_ring_version", Series(1, 0.2)),
        },
        set(),
    ),
    "the operator has an older ring than both routers": (
        changed("dualmap_operator_ring_version", Series(0)),
        {"DualMapRoutersDisagree"},
    ),
    "both routers have": (
        changed("dualmap_ring_version", Series(0)),
        {"DualMapRoutersDisagree"},
    ),
    "a pool is refused": (
        changed("dualmap_kube_pools_refused", Series(1), pod="router-0"),
        {"DualMapPoolRefused"},
    ),
    "an Envoy refuses endpoints": (
        changed("dualmap_discovery_rejections_total", Series(0, 0.1), pod="router-0"),
        {"DualMapEnvoyRefusesEndpoints"},
    ),
    "a member drains for ever": (
        changed("dualmap_operator_ring_members", Series(1), state="Draining"),
        {"DualMapDrainTakesLong"},
    ),
    "no operator leads": (
        changed("dualmap_operator_leader", Series(0)),
        {"DualMapOperatorNotLeading"},
    ),
    "no operator is scraped": (
        {name: GONE for name in RECORDED["series"] if "dualmap_operator_" in name},
        {"DualMapOperatorNotLeading"},
    ),
    "there is none, since the pools come from files": (
        {name: GONE for name in RECORDED["series"] if re.match("dualmap_(operator|kube)_", name)},
        set(),
    ),
    "passes fail": (
        {f'dualmap_operator_reconciles_total{{{OPERATOR},result="failed"}}': Series(0, 0.1)},
        {"DualMapReconcilesFail"},
    ),
    "a right is missing": (
        {f'dualmap_operator_api_requests_total{{code="403",{OPERATOR},verb="LIST"}}': Series(0, 1)},
        {"DualMapRightMissing"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fires_its_alert_and_no_other(fault: str, promtool: Path, tmp_path: Path) -> None:
    different, expected = FAULTS[fault]
    assert_fire(promtool, {**healthy_day(), **different}, expected, tmp_path)


def test_no_window_is_too_short_for_two_looks_a_minute_apart() -> None:
    windows = [
        int(number) * {"m": 60, "h": 3600}[unit] for number, unit in re.findall(r"\[(\d+)(\w)\]", RULES.read_text())
    ]
    assert len(windows) > 10
    assert min(windows) > 2 * SLOW_INTERVAL_S


def test_every_alert_is_fired_by_a_fault() -> None:
    assert {name for _, expected in FAULTS.values() for name in expected} == {rule["alert"] for rule in ALERTS}
