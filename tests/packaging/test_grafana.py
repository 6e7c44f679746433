"""Tests of the chart's Grafana dashboard: Prometheus accepts its queries, and their metrics and labels exist."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from tools import find_promtool

ROOT = Path(__file__).parents[2]
MADE = ROOT / "helm" / "grafana.py"
PANELS = json.loads((ROOT / "helm" / "dualmap" / "files" / "dashboard.json").read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
# Type and labels by metric name from docs/metrics.md; other tests compare that page with the exported metrics.
EXPORTED = {
    name: (kind, set(re.findall(r"`(\w+)`", labels)))
    for name, kind, labels in re.findall(
        r"^\| `(dualmap_\w+)` \| (\w+) \| ([^|]*)\|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
    )
}
RECORDED = json.loads((ROOT / "tests" / "chart" / "recorded" / "series.json").read_text())["series"]
# Labels that Prometheus adds to every series it scrapes.
SCRAPED = {"namespace", "pod"}
# Each router exports only its own share of these metrics.
SHARES = (
    "dualmap_endpoint_pending_prefill_tokens",
    "dualmap_endpoint_in_flight_requests",
    "dualmap_endpoint_held_requests",
    "dualmap_endpoint_held_prefill_tokens",
    "dualmap_endpoint_active_kv_tokens",
    "dualmap_pool_held_requests",
    "dualmap_pool_desired_replicas",
)


def asked(query: str) -> set[str]:
    return {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"(?:dualmap|envoy)_\w+", query)}


def test_grafana_dashboard_file_matches_the_panel_definitions() -> None:
    spec = importlib.util.spec_from_file_location(MADE.stem, MADE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.FILE.read_text() == made.text(), "run: python helm/grafana.py"


def test_grafana_queries_use_only_exported_metrics() -> None:
    assert len(QUERIES) > 20
    exported = EXPORTED.keys() | {series.partition("{")[0] for series in RECORDED if series.startswith("envoy_")}
    assert set().union(*map(asked, QUERIES)) - exported == set()


def test_grafana_shows_stores_moves_and_prefills() -> None:
    shown = set().union(*map(asked, QUERIES))
    moved = {name for name in EXPORTED if re.match("dualmap_(kv_store|session_move|prefills|pd_prefill)", name)}
    assert moved - shown == {"dualmap_pd_prefill_seconds"}


@pytest.mark.parametrize("query", QUERIES)
def test_grafana_queries_use_only_labels_of_the_metric(query: str) -> None:
    names = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    names |= set(re.findall(r"(\w+)=~?\"", query))
    for metric in asked(query) & EXPORTED.keys():
        kind, labels = EXPORTED[metric]
        assert names <= labels | SCRAPED | ({"le"} if kind == "histogram" else set()), metric


@pytest.mark.parametrize("query", QUERIES)
def test_grafana_queries_sum_metrics_split_over_routers(query: str) -> None:
    if asked(query) & set(SHARES):
        assert "sum" in query
        assert "max" not in query


@pytest.mark.parametrize("query", QUERIES)
def test_grafana_queries_never_group_by_endpoint_alone(query: str) -> None:
    assert "by (endpoint)" not in query


def test_prometheus_accepts_every_grafana_query(tmp_path: Path) -> None:
    promtool = find_promtool()
    if promtool is None:
        pytest.skip("promtool is not there: e2e/debian.sh gets it, as does apt-get install prometheus")
    written = [query.replace("$__rate_interval", "5m").replace("$pool", ".*") for query in QUERIES]
    assert not [query for query in written if "$" in query]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(written)]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=100)
    assert checked.returncode == 0, checked.stdout + checked.stderr
