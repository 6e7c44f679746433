"""Tests that docs/metrics.md lists exactly the metrics that a router exports."""

import re
from pathlib import Path

from dualmap.pools.pool import MemberState
from dualmap_extproc.engines.metrics import KvEventMetrics
from dualmap_extproc.kv_stores.metrics import KvStoreMetrics
from dualmap_extproc.pools.metrics import KubeMetrics
from dualmap_extproc.recording.metrics import RecordingMetrics
from dualmap_extproc.store.metrics import StoreMetrics
from dualmap_extproc.telemetry.transport import TransportMetrics
from extproc.metrics_pages import everything, families, metrics, status

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


class TestReference:
    def exported(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        made = metrics()
        StoreMetrics(made.metrics.registry)
        watches = KubeMetrics(made.metrics.registry, made.metrics.pools_refused)
        watches.show_ages(lambda: {"pods": 1.0})
        watches.kube_listed("pods")
        watches.kube_failed("pods", "refused")
        TransportMetrics(made.metrics.registry)
        KvEventMetrics(made.metrics.registry).set_pools(["llm/qwen"])
        KvStoreMetrics(made.metrics.registry).set_pools(["llm/qwen"])
        RecordingMetrics(made.metrics.registry)
        everything(made)
        found = {}
        for family in families(made, status(MemberState.ACTIVE, MemberState.DRAINING)):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, tuple(sorted(labels)))
        return found

    def documented(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        of_routers, _, _ = DOCUMENT.read_text().partition("## Metrics of the operator")
        rows = re.findall(r"^\| `(dualmap_\w+)` \| (\w+) \| ([^|]*)\|", of_routers, re.MULTILINE)
        assert len(rows) == len({name for name, _, _ in rows})
        return {name: (kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in rows}

    def test_metrics_reference_lists_exactly_the_exported_metrics(self) -> None:
        assert self.documented() == self.exported()

    def test_metrics_reference_has_all_guaranteed_metric_names(self) -> None:
        assert self.exported().keys() >= {
            "dualmap_endpoint_pending_prefill_tokens",
            "dualmap_endpoint_in_flight_requests",
            "dualmap_pool_held_requests",
            "dualmap_requests_total",
            "dualmap_predicted_cached_tokens_total",
            "dualmap_measured_cached_tokens_total",
        }
