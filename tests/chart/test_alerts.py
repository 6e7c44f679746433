"""Tests of the chart's alerts: promtool evaluates the rules with recorded series of routers, an operator and an Envoy.

A healthy day extends the recorded minute to two hours. Each fault changes some series of the healthy day.
e2e/controlplane/record_metrics.py creates the recording.
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
"""Prometheus' default evaluation interval, which applies to files under rule_files."""
HOURS = 2
STEPS = HOURS * 3600 // INTERVAL_S


@dataclass(frozen=True, slots=True)
class Series:
    """The values of a series, which begins with ``start`` and grows by ``per_s`` each second, or is absent."""

    start: float
    per_s: float = 0.0
    absent: bool = False

    def values(self) -> str:
        if self.absent:
            return f"_x{STEPS}"
        return f"{self.start:g}{self.per_s * INTERVAL_S:+g}x{STEPS}"


@dataclass(frozen=True, slots=True)
class Burst(Series):
    """Return a counter that rises only for ``lasts_s``, from ``ago_s`` before the end of the day."""

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
    """Return the recorded series of a metric with these labels; fail if no series matches."""
    found = [
        series
        for series in RECORDED["series"]
        if series.startswith(f"{name}{{") and all(f'{label}="{value}"' in series for label, value in labels.items())
    ]
    assert found, f"no series of {name} {labels} was recorded"
    return found


def assert_fire(promtool: Path, day: dict[str, Series], expected: set[str], directory: Path) -> None:
    """Check with promtool that exactly these alerts fire at the end of the day."""
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
        pytest.skip("promtool is not installed: run e2e/debian.sh, or apt-get install prometheus")
    return found


def test_rules_file_is_valid_for_promtool(promtool: Path) -> None:
    checked = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alert_rules_and_runbook_sections_have_the_same_names() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names)
    assert re.findall(r"^## (DualMap\w+)$", DOCUMENT, re.MULTILINE) == names
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_alert_has_a_summary_and_a_first_check() -> None:
    for rule in ALERTS:
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["annotations"]["description"].endswith(".")


def test_alert_metrics_exist_in_the_recorded_metrics() -> None:
    asked = {name for rule in ALERTS for name in re.findall(r"\b(?:dualmap|envoy)_\w+", rule["expr"])}
    recorded = {series.partition("{")[0] for series in RECORDED["series"]}
    # A counter with a label has no series before its first increment. Another test compares the names with
    # docs/metrics.md.
    unseen = {"dualmap_kube_errors_total", "dualmap_refused_requests_total", "dualmap_http2_goaways_total"}
    # The recorded pools have no KV store and no prefill pool, and the recorded routers record no requests.
    unseen |= {"dualmap_kv_store_up", "dualmap_prefills_total", "dualmap_recording_up"}
    assert asked - recorded - unseen == set()


def test_alert_rules_fire_no_alert_on_a_healthy_day(promtool: Path, tmp_path: Path) -> None:
    assert_fire(promtool, healthy_day(), set(), tmp_path)


ROUTER = 'namespace="dualmap-system",pod="router-0"'
OPERATOR = 'namespace="dualmap-system",pod="operator-0"'


def changed(name: str, series: Series, **labels: str) -> dict[str, Series]:
    return dict.fromkeys(of(name, **labels), series)


FAULTS: dict[str, tuple[dict[str, Series], set[str]]] = {
    "40 % of first tokens are late": (
        {
            **changed("dualmap_first_tokens_total", Series(0, 0.4), slo="missed"),
            **changed("dualmap_first_tokens_total", Series(0, 0.6), slo="met"),
        },
        {"DualMapSLOViolation", "DualMapSLOErrorBudgetBurn"},
    ),
    "20 % of first tokens are late": (
        {
            **changed("dualmap_first_tokens_total", Series(0, 0.2), slo="missed"),
            **changed("dualmap_first_tokens_total", Series(0, 0.8), slo="met"),
        },
        {"DualMapSLOErrorBudgetBurn"},
    ),
    "5 % of first tokens are late": (
        {
            **changed("dualmap_first_tokens_total", Series(0, 0.05), slo="missed"),
            **changed("dualmap_first_tokens_total", Series(0, 0.95), slo="met"),
        },
        set(),
    ),
    "all first tokens are late at a very low rate": (
        {
            **changed("dualmap_first_tokens_total", Series(0, 0.001), slo="missed"),
            **changed("dualmap_first_tokens_total", Series(0, 0.0), slo="met"),
        },
        set(),
    ),
    "a full queue rejects requests": (
        {f'dualmap_refused_requests_total{{code="queue_full",{ROUTER},pool="llm/qwen"}}': Series(0, 0.5)},
        {"DualMapRequestsRejected"},
    ),
    "one request in 150 s is rejected": (
        {f'dualmap_refused_requests_total{{code="waited_too_long",{ROUTER},pool="llm/qwen"}}': Series(0, 1 / 150)},
        set(),
    ),
    "a pool without forwarded requests rejects one a minute": (
        {f'dualmap_refused_requests_total{{code="no_endpoint",{ROUTER},pool="llm/idle"}}': Series(0, 1 / 60)},
        {"DualMapRequestsRejected"},
    ),
    "clients ask for an unknown model": (
        {f'dualmap_refused_requests_total{{code="model_not_found",{ROUTER},pool="llm/qwen"}}': Series(0, 0.5)},
        set(),
    ),
    "Envoy fails open": (
        changed("envoy_http_ext_proc_failure_mode_allowed", Series(0, 2), envoy_http_conn_manager_prefix="requests"),
        {"DualMapFailOpen"},
    ),
    "Envoy fails open for a minute after a router is killed": (
        changed(
            "envoy_http_ext_proc_failure_mode_allowed",
            Burst(0, 2, ago_s=210, lasts_s=60),
            envoy_http_conn_manager_prefix="requests",
        ),
        set(),
    ),
    "a pool activates from zero within a few minutes": (
        {
            f'dualmap_refused_requests_total{{code="waited_too_long",{ROUTER},pool="llm/qwen"}}': Burst(
                0, 0.5, ago_s=330, lasts_s=210
            )
        },
        set(),
    ),
    "no router is scraped": (
        {name: GONE for name in RECORDED["series"] if 'pod="router-' in name},
        {"DualMapRoutersDown"},
    ),
    "one router is not scraped": (
        {name: GONE for name in RECORDED["series"] if 'pod="router-1"' in name},
        set(),
    ),
    "one router does not reach Redis": (
        changed("dualmap_store_up", Series(0), pod="router-1"),
        {"DualMapRedisUnreachable"},
    ),
    "one router leaves the KV store alone": (
        {
            f'dualmap_kv_store_up{{{ROUTER},pool="llm/qwen"}}': Series(0),
            f'dualmap_kv_store_up{{{ROUTER.replace("router-0", "router-1")},pool="llm/qwen"}}': Series(1),
        },
        {"DualMapKvStoreLeftAlone"},
    ),
    "one router cannot record": (
        {
            f"dualmap_recording_up{{{ROUTER}}}": Series(0),
            f"dualmap_recording_up{{{ROUTER.replace('router-0', 'router-1')}}}": Series(1),
        },
        {"DualMapRecordingStopped"},
    ),
    "the prefill pool is full for a tenth of the prompts": (
        {
            f'dualmap_prefills_total{{where="remote",{ROUTER},pool="llm/qwen"}}': Series(0, 9),
            f'dualmap_prefills_total{{where="full",{ROUTER},pool="llm/qwen"}}': Series(0, 1),
        },
        {"DualMapPrefillsLocal"},
    ),
    "most prompts are short": (
        {
            f'dualmap_prefills_total{{where="remote",{ROUTER},pool="llm/qwen"}}': Series(0, 1),
            f'dualmap_prefills_total{{where="short",{ROUTER},pool="llm/qwen"}}': Series(0, 9),
        },
        set(),
    ),
    "a router ends connections that reset too many streams": (
        {f'dualmap_http2_goaways_total{{reason="resets",{ROUTER}}}': Series(0, 0.01)},
        {"DualMapConnectionsEnded"},
    ),
    "routers drain": (
        {f'dualmap_http2_goaways_total{{reason="drain",{ROUTER}}}': Series(0, 0.01)},
        set(),
    ),
    "Envoy does not follow the picks": (
        changed("dualmap_served_elsewhere_total", Series(0, 1)),
        {"DualMapServedEndpointMismatch"},
    ),
    "engines have evicted predicted blocks": (
        {
            **changed("dualmap_checked_cached_tokens_total", Series(0, 1000)),
            **changed("dualmap_measured_cached_tokens_total", Series(0, 500)),
        },
        {"DualMapCacheHitsBelowPrediction"},
    ),
    "an endpoint is suspended repeatedly": (
        changed("dualmap_endpoint_suspended", Series(1), pod="router-0", endpoint="qwen-1"),
        {"DualMapEndpointSuspended"},
    ),
    "the access log does not arrive": (
        changed("dualmap_completions_total", Series(0, 0.1), outcome="expired"),
        {"DualMapCompletionReportsMissing"},
    ),
    "a router's watch is silent": (
        changed("dualmap_kube_watch_age_seconds", Series(0, 1), pod="router-0", resource="pods"),
        {"DualMapMembershipStale"},
    ),
    "the operator's watch is silent": (
        changed("dualmap_operator_watch_age_seconds", Series(500), kind="Pod"),
        {"DualMapMembershipStale"},
    ),
    "a router has an older ring": (
        changed("dualmap_ring_version", Series(0), pod="router-0"),
        {"DualMapRingVersionMismatch"},
    ),
    "the ring changes constantly and routers are scraped one after the other": (
        {
            **changed("dualmap_ring_version", Series(1, 0.2), pod="router-0"),
            **changed("dualmap_ring_version", Series(3, 0.2), pod="router-1"),
            **changed("dualmap_operator_ring_version", Series(4, 0.2)),
        },
        set(),
    ),
    "the ring changes constantly and the operator is scraped first": (
        {
            **changed("dualmap_ring_version", Series(3, 0.2), pod="router-0"),
            **changed("dualmap_ring_version", Series(4, 0.2), pod="router-1"),
            **changed("dualmap_operator_ring_version", Series(1, 0.2)),
        },
        set(),
    ),
    "the operator has an older ring than both routers": (
        changed("dualmap_operator_ring_version", Series(0)),
        {"DualMapRingVersionMismatch"},
    ),
    "both routers have an older ring": (
        changed("dualmap_ring_version", Series(0)),
        {"DualMapRingVersionMismatch"},
    ),
    "a pool is invalid": (
        changed("dualmap_kube_pools_refused", Series(1), pod="router-0"),
        {"DualMapPoolInvalid"},
    ),
    "an Envoy rejects endpoints": (
        changed("dualmap_discovery_rejections_total", Series(0, 0.1), pod="router-0"),
        {"DualMapEndpointUpdatesRejected"},
    ),
    "the owner of a pool does not answer the other router": (
        {
            f'dualmap_remote_decisions_total{{{ROUTER},pool="llm/qwen",result="local"}}': Series(0, 1),
            f'dualmap_remote_decisions_total{{{ROUTER},pool="llm/qwen",result="answered"}}': Series(0, 0.1),
            f"dualmap_peers{{{ROUTER}}}": Series(1),
        },
        {"DualMapOwnerNotAnswering"},
    ),
    "the owner of a pool answers the other router": (
        {
            f'dualmap_remote_decisions_total{{{ROUTER},pool="llm/qwen",result="timeout"}}': Series(0, 0.1),
            f'dualmap_remote_decisions_total{{{ROUTER},pool="llm/qwen",result="answered"}}': Series(0, 1),
            f"dualmap_peers{{{ROUTER}}}": Series(1),
        },
        set(),
    ),
    "a member drains without end": (
        changed("dualmap_operator_ring_members", Series(1), state="Draining"),
        {"DualMapDrainSlow"},
    ),
    "no operator leads": (
        changed("dualmap_operator_leader", Series(0)),
        {"DualMapOperatorNoSingleLeader"},
    ),
    "no operator is scraped": (
        {name: GONE for name in RECORDED["series"] if "dualmap_operator_" in name},
        {"DualMapOperatorNoSingleLeader"},
    ),
    "pools come from files and no operator runs": (
        {name: GONE for name in RECORDED["series"] if re.match("dualmap_(operator|kube)_", name)},
        set(),
    ),
    "reconciles fail": (
        {f'dualmap_operator_reconciles_total{{{OPERATOR},result="failed"}}': Series(0, 0.1)},
        {"DualMapReconcileErrors"},
    ),
    "the API server denies a request": (
        {f'dualmap_operator_api_requests_total{{code="403",{OPERATOR},verb="LIST"}}': Series(0, 1)},
        {"DualMapRBACDenied"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_alert_rules_fire_only_the_alert_of_each_fault(fault: str, promtool: Path, tmp_path: Path) -> None:
    different, expected = FAULTS[fault]
    assert_fire(promtool, {**healthy_day(), **different}, expected, tmp_path)


def test_alert_windows_have_two_scrapes_a_minute_apart() -> None:
    windows = [
        int(number) * {"m": 60, "h": 3600}[unit] for number, unit in re.findall(r"\[(\d+)(\w)\]", RULES.read_text())
    ]
    assert len(windows) > 10
    assert min(windows) > 2 * SLOW_INTERVAL_S


def test_every_alert_is_fired_by_a_tested_fault() -> None:
    assert {name for _, expected in FAULTS.values() for name in expected} == {rule["alert"] for rule in ALERTS}
