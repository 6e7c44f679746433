"""Generates the chart's Grafana dashboard, ``helm/dualmap/files/dashboard.json``: ``python helm/grafana.py``.

Grafana's JSON is too long to maintain by hand. ``ROWS`` defines each panel and its queries.
``tests/packaging/test_grafana.py`` checks that the file is up to date and queries exported metrics only.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "dualmap" / "files" / "dashboard.json"
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_MEASURED = "dualmap_measured_cached_tokens_total"
_CHECKED = "dualmap_checked_cached_tokens_total"
_MET = 'slo="met"'
_FAILED = 'outcome="failed"'
_INCOMPLETE = 'result="incomplete"'
_AGREED = 'agreed="true"'
_SHADOW_TTFT = "dualmap_shadow_predicted_ttft_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of the dashboard: title, description, unit, and queries by legend."""

    title: str
    about: str
    unit: str
    queries: dict[str, str]


def _of(metric: str, *matchers: str) -> str:
    inner = ", ".join(('pool=~"$pool"', *matchers))
    return f"{metric}{{{inner}}}"


def _rate(metric: str, *matchers: str) -> str:
    return f"rate({_of(metric, *matchers)}[$__rate_interval])"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le, pool) ({_rate(metric)}))"


def _quantile_of_all(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({metric}[$__rate_interval])))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Time to first token and SLO": (
        Panel(
            title="SLO attainment",
            about="Share of first tokens within the TTFT objective, and the target share (spec.slo.attainment).",
            unit="percentunit",
            queries={
                "{{pool}}": f"sum by (pool) ({_rate('dualmap_first_tokens_total', _MET)})"
                f" / sum by (pool) ({_rate('dualmap_first_tokens_total')})",
                "{{pool}} goal": f"max by (pool) ({_of('dualmap_pool_slo_goal')})",
            },
        ),
        Panel(
            title="Time to first token",
            about="Time from a request's arrival to its first token, including the time in the router's queue.",
            unit="s",
            queries={
                "{{pool}} p50": _quantile(0.5, "dualmap_ttft_seconds_bucket"),
                "{{pool}} p90": _quantile(0.9, "dualmap_ttft_seconds_bucket"),
                "{{pool}} p99": _quantile(0.99, "dualmap_ttft_seconds_bucket"),
                "{{pool}} objective": f"max by (pool) ({_of('dualmap_pool_slo_ttft_seconds')})",
            },
        ),
        Panel(
            title="Predicted time to first token",
            about="TTFT that the router predicted. If the prediction is far below the measured TTFT, engines are "
            "slower than expected.",
            unit="s",
            queries={
                "{{pool}} p50": _quantile(0.5, "dualmap_predicted_ttft_seconds_bucket"),
                "{{pool}} p90": _quantile(0.9, "dualmap_predicted_ttft_seconds_bucket"),
            },
        ),
    ),
    "Traffic": (
        Panel(
            title="Requests by endpoint",
            about="Requests per second sent to each endpoint.",
            unit="reqps",
            queries={"{{pool}} {{endpoint}}": f"sum by (pool, endpoint) ({_rate('dualmap_requests_total')})"},
        ),
        Panel(
            title="Decisions by rule",
            about="Decisions by rule of the routing policy. With the policy dualmap, the rules spill and pair-cold "
            "pick a member outside the pair. The other rules pair-* pick a member of the pair.",
            unit="reqps",
            queries={"{{rule}}": f"sum by (rule) ({_rate('dualmap_decisions_total')})"},
        ),
        Panel(
            title="Rejected and failed requests",
            about="Requests that a router rejected, that an engine failed, or that reached another endpoint than the "
            "router picked.",
            unit="reqps",
            queries={
                "rejected: {{code}}": f"sum by (code) ({_rate('dualmap_refused_requests_total')})",
                "failed by engines": f"sum({_rate('dualmap_completions_total', _FAILED)})",
                "served elsewhere": f"sum({_rate('dualmap_served_elsewhere_total')})",
            },
        ),
    ),
    "Shadow policies": (
        Panel(
            title="Agreement with the pool's choice",
            about="Share of the sampled requests for which a policy of spec.routing.shadow chooses the same endpoint "
            "as the pool's own policy.",
            unit="percentunit",
            queries={
                "{{pool}} {{policy}}": f"sum by (pool, policy) ({_rate('dualmap_shadow_decisions_total', _AGREED)})"
                f" / sum by (pool, policy) ({_rate('dualmap_shadow_decisions_total')})"
            },
        ),
        Panel(
            title="Predicted time to first token by policy",
            about="Mean TTFT that routers predict for the choices of each policy, about the same requests. The caches "
            "and loads are those that the pool's own policy has caused.",
            unit="s",
            queries={
                "{{pool}} {{policy}}": f"sum by (pool, policy) ({_rate(f'{_SHADOW_TTFT}_sum')})"
                f" / sum by (pool, policy) ({_rate(f'{_SHADOW_TTFT}_count')})"
            },
        ),
        Panel(
            title="Predicted cached tokens by policy",
            about="Mean number of prompt tokens per request that routers expect in the cache of each policy's choice.",
            unit="short",
            queries={
                "{{pool}} {{policy}}": "sum by (pool, policy) "
                f"({_rate('dualmap_shadow_predicted_cached_tokens_total')})"
                f" / sum by (pool, policy) ({_rate(f'{_SHADOW_TTFT}_count')})"
            },
        ),
    ),
    "Caches": (
        Panel(
            title="Cache hit rate",
            about="Share of prompt tokens that routers predict as cached. The series measured / predicted is the share "
            "of predicted tokens that engines confirm. Stale hits are requests with a predicted hit and no "
            "cached token.",
            unit="percentunit",
            queries={
                "{{pool}} predicted": f"sum by (pool) ({_rate('dualmap_predicted_cached_tokens_total')})"
                f" / sum by (pool) ({_rate('dualmap_prompt_tokens_total')})",
                "{{pool}} measured / predicted": f"sum by (pool) ({_rate(_MEASURED)})"
                f" / sum by (pool) ({_rate(_CHECKED)})",
                "{{pool}} stale hits": f"sum by (pool) ({_rate('dualmap_stale_hit_requests_total')})"
                f" / sum by (pool) ({_rate('dualmap_predicted_hit_requests_total')})",
            },
        ),
        Panel(
            title="Indexed blocks",
            about="Blocks that routers expect in each endpoint's cache. The value falls to 0 when an endpoint loses "
            "its cache.",
            unit="short",
            queries={"{{pool}} {{endpoint}}": f"max by (pool, endpoint) ({_of('dualmap_endpoint_indexed_blocks')})"},
        ),
        Panel(
            title="Hot prefixes",
            about="Hot prefixes that use a longer key. A longer key spreads a prefix's requests over more pairs.",
            unit="short",
            queries={"{{pool}}": f"max by (pool) ({_of('dualmap_split_prefixes')})"},
        ),
        Panel(
            title="States of KV events",
            about="Endpoints of pools with KV events, by state, as a sum over all routers. A router knows what "
            "an endpoint in the state Live caches.",
            unit="short",
            queries={"{{pool}} {{state}}": f"sum by (pool, state) ({_of('dualmap_kv_event_state')})"},
        ),
        Panel(
            title="Gaps in KV events",
            about="Gaps in the numbers of engines' messages, and replays after which messages are still missing.",
            unit="short",
            queries={
                "{{pool}} gaps": f"sum by (pool) ({_rate('dualmap_kv_event_gaps_total')})",
                "{{pool}} incomplete replays": f"sum by (pool) ({_rate('dualmap_kv_resyncs_total', _INCOMPLETE)})",
            },
        ),
    ),
    "KV stores, session moves and remote prefills": (
        Panel(
            title="KV store lookups",
            about="Prompts that routers looked up in the pool's KV store (spec.kvStore), by result. Only misses: the "
            "hash, the seed or the chunk size is not the engines'.",
            unit="reqps",
            queries={"{{pool}} {{result}}": f"sum by (pool, result) ({_rate('dualmap_kv_store_lookups_total')})"},
        ),
        Panel(
            title="KV store wait",
            about="Time that requests waited for the KV store's answer before their pick.",
            unit="s",
            queries={
                "{{pool}} p50": _quantile(0.5, "dualmap_kv_store_lookup_seconds_bucket"),
                "{{pool}} p99": _quantile(0.99, "dualmap_kv_store_lookup_seconds_bucket"),
            },
        ),
        Panel(
            title="KV store in use",
            about="1 while a router asks the KV store, 0 while it leaves the store alone after failures.",
            unit="short",
            queries={"{{pool}} {{pod}}": f"min by (pool, pod) ({_of('dualmap_kv_store_up')})"},
        ),
        Panel(
            title="Session moves",
            about="Requests of sessions that went to another endpoint than the session's last one. The routers predict "
            "whether the KV is fetched or computed again.",
            unit="reqps",
            queries={"{{pool}} {{kv}}": f"sum by (pool, kv) ({_rate('dualmap_session_moves_total')})"},
        ),
        Panel(
            title="Tokens of moved sessions",
            about="Prompt tokens of moved sessions that the new endpoint did not cache, by whether the routers predict "
            "that they are fetched or computed again.",
            unit="short",
            queries={"{{pool}} {{kv}}": f"sum by (pool, kv) ({_rate('dualmap_session_move_tokens_total')})"},
        ),
        Panel(
            title="Time until members leave",
            about="Seconds until an endpoint with notice must stop (leaveAt). Endpoints without notice are absent.",
            unit="s",
            queries={
                "{{pool}} {{endpoint}}": "clamp_min(min by (pool, endpoint) "
                f"({_of('dualmap_endpoint_leave_timestamp_seconds')}) - time(), 0)"
            },
        ),
        Panel(
            title="Remote prefills",
            about="Requests of pools with a prefill pool, by where the prompt is computed: remote, or at the decode "
            "member, because the prompt is short, or the prefill pool has no member, is full or is unusable.",
            unit="reqps",
            queries={"{{pool}} {{where}}": f"sum by (pool, where) ({_rate('dualmap_prefills_total')})"},
        ),
        Panel(
            title="Prefills of pd-proxy",
            about="Requests of all pd-proxy sidecars by where their prompt was prefilled. With local, all prefillers "
            "failed. With none, the router named no prefiller.",
            unit="reqps",
            queries={"{{where}}": "sum by (where) (rate(dualmap_pd_prefills_total[$__rate_interval]))"},
        ),
        Panel(
            title="Failed prefillers of pd-proxy",
            about="Prefillers that did not prefill a prompt, by reason (docs/metrics.md).",
            unit="reqps",
            queries={"{{reason}}": "sum by (reason) (rate(dualmap_pd_prefill_failures_total[$__rate_interval]))"},
        ),
    ),
    "Load": (
        Panel(
            title="Pending prefill tokens",
            about="Uncached prompt tokens that each endpoint has not computed yet, as a sum over all routers.",
            unit="short",
            queries={
                "{{pool}} {{endpoint}}": f"sum by (pool, endpoint) ({_of('dualmap_endpoint_pending_prefill_tokens')})"
            },
        ),
        Panel(
            title="In flight and queued",
            about="Requests in flight at endpoints, and requests queued in the routers.",
            unit="short",
            queries={
                "in flight": f"sum({_of('dualmap_endpoint_in_flight_requests')})",
                "queued": f"sum({_of('dualmap_pool_held_requests')})",
            },
        ),
        Panel(
            title="Desired replicas and ring members",
            about="Rounded-up sum of all routers' desired replicas, and the number of ring members by state.",
            unit="short",
            queries={
                "{{pool}} desired": f"ceil(sum by (pool) ({_of('dualmap_pool_desired_replicas')}))",
                "{{pool}} {{state}}": f"max by (pool, state) ({_of('dualmap_ring_members')})",
            },
        ),
    ),
    "Health of DualMap": (
        Panel(
            title="Requests that bypass the routers",
            about="Requests per second that Envoy forwards without a router's decision (fail open). The expected "
            "value is 0.",
            unit="reqps",
            queries={"{{pod}}": "sum by (pod) (rate(envoy_http_ext_proc_failure_mode_allowed[$__rate_interval]))"},
        ),
        Panel(
            title="Shared state and leader",
            about="The series redis is 1 if the router reaches Redis. The series leaders is the number of leading "
            "operators, and should be 1.",
            unit="short",
            queries={"redis {{pod}}": "min by (pod) (dualmap_store_up)", "leaders": "sum(dualmap_operator_leader)"},
        ),
        Panel(
            title="Age of cluster data",
            about="Seconds since the last message from the API server. In an idle cluster, the value rises to 45 s "
            "and returns to 0.",
            unit="s",
            queries={
                "{{pod}} {{resource}}": "max by (pod, resource) (dualmap_kube_watch_age_seconds)",
                "{{pod}} {{kind}}": "max by (pod, kind) (dualmap_operator_watch_age_seconds)",
            },
        ),
        Panel(
            title="Decision time",
            about="Time from the complete request body to the router's answer.",
            unit="s",
            queries={
                "p50": _quantile_of_all(0.5, "dualmap_decision_seconds_bucket"),
                "p99": _quantile_of_all(0.99, "dualmap_decision_seconds_bucket"),
            },
        ),
        Panel(
            title="Decisions of the pools' owners",
            about="Decisions per second of pools that another router owns, by how they were made. The expected result "
            "is answered.",
            unit="reqps",
            queries={"{{pool}} {{result}}": f"sum by (pool, result) ({_rate('dualmap_remote_decisions_total')})"},
        ),
        Panel(
            title="Drain time",
            about="Time from the start of a member's drain to the member's removal.",
            unit="s",
            queries={"p90": _quantile_of_all(0.9, "dualmap_operator_drain_seconds_bucket")},
        ),
        Panel(
            title="Reconciles",
            about="Reconciles of the operator, by result. The operator retries failed reconciles.",
            unit="ops",
            queries={"{{result}}": "sum by (result) (rate(dualmap_operator_reconciles_total[$__rate_interval]))"},
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's import format."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, charts in ROWS.items():
        place = {"x": 0, "y": y, "w": _WIDTH * _PER_ROW, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        y += 1
        for number, panel in enumerate(charts):
            line, column = divmod(number, _PER_ROW)
            place = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        y += -(-len(charts) // _PER_ROW) * _HEIGHT
    return {
        "uid": "dualmap",
        "title": "DualMap",
        "tags": ["dualmap", "llm"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasources(), _pools()]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _datasources() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _pools() -> dict[str, Any]:
    return {
        "name": "pool",
        "label": "Pool",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(dualmap_ring_version, pool)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
