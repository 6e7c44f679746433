"""Prometheus metrics of the Kubernetes watches, exported only with ``--kube`` (docs/metrics.md)."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class KubeMetrics:
    """The metrics of ``pools.kube`` (KubePoolsObserver); ``pools_refused`` counts invalid changes of pools."""

    def __init__(self, registry: CollectorRegistry, pools_refused: Callable[[], None]) -> None:
        self.pools_refused = pools_refused
        self._registry = registry
        self._lists = Counter(
            "dualmap_kube_lists", "Full lists of a resource from the Kubernetes API.", ("resource",), registry=registry
        )
        self._errors = Counter(
            "dualmap_kube_errors",
            "Failed lists and watches of a resource at the Kubernetes API, by kind of failure.",
            ("resource", "kind"),
            registry=registry,
        )
        self._refused = Gauge(
            "dualmap_kube_pools_refused",
            "Pools that this router rejects: they are invalid, or another pool or namespace has their model name.",
            registry=registry,
        )

    def show_ages(self, ages_s: Callable[[], Mapping[str, float]]) -> None:
        """Export the seconds since the last answer, by resource; any thread may call ``ages_s``."""
        self._registry.register(_Ages(ages_s))

    def kube_listed(self, resource: str) -> None:
        """Count a list of a collection (KubePoolsObserver)."""
        self._lists.labels(resource).inc()

    def kube_failed(self, resource: str, kind: str) -> None:
        """Count a list or watch that failed (KubePoolsObserver)."""
        self._errors.labels(resource, kind).inc()

    def kube_pools_refused(self, count: int) -> None:
        """Set the current number of invalid pools (KubePoolsObserver)."""
        self._refused.set(count)


class _Ages(Collector):
    """A collector that reads the age of each watch at a scrape."""

    def __init__(self, ages_s: Callable[[], Mapping[str, float]]) -> None:
        self._ages_s = ages_s

    def collect(self) -> Iterator[Metric]:
        """Yield the metric family (method of prometheus_client's Collector)."""
        family = GaugeMetricFamily(
            "dualmap_kube_watch_age_seconds",
            "Time since the last message from the API server about a resource, in seconds.",
            labels=("resource",),
        )
        for resource, age_s in self._ages_s().items():
            family.add_metric((resource,), age_s)
        yield family
