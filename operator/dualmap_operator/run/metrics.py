"""Prometheus metrics of one operator (``dualmap_operator_*``); ``health`` serves them.

``Metrics`` implements ``api.ApiObserver`` and ``reconciler.ReconcileMetrics``. Each scrape reads the ages of the
watches. The series of a deleted pool are removed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import PoolStatus

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
# A reconcile takes milliseconds, or up to 10 s for each router and each request to the API server.
_RECONCILE_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
# A drain of an idle pool takes seconds; the longest drain takes drain.timeout (default 10 min).
_DRAIN_BUCKETS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)


class Metrics:
    """Every metric of one operator, in its own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._rings: dict[str, PoolStatus] = {}
        registry = self._registry
        self._reconciles = Counter(
            "dualmap_operator_reconciles", "Reconciles of a pool, by result.", ["result"], registry=registry
        )
        self._reconcile_seconds = Histogram(
            "dualmap_operator_reconcile_seconds",
            "Duration of a reconcile, in seconds.",
            buckets=_RECONCILE_BUCKETS_S,
            registry=registry,
        )
        self._queue = Gauge("dualmap_operator_reconcile_queue", "Pools that wait for a reconcile.", registry=registry)
        self._members = Gauge(
            "dualmap_operator_ring_members", "Published ring members, by state.", ["pool", "state"], registry=registry
        )
        self._version = Gauge("dualmap_operator_ring_version", "Published ring version.", ["pool"], registry=registry)
        self._drains = Histogram(
            "dualmap_operator_drain_seconds",
            "Time from the start of a member's drain to the member's removal from the ring, in seconds.",
            buckets=_DRAIN_BUCKETS_S,
            registry=registry,
        )
        self._leader = Gauge("dualmap_operator_leader", "1 if this operator is the leader, else 0.", registry=registry)
        self._requests = Counter(
            "dualmap_operator_api_requests",
            "Requests to the API server, by verb and HTTP status (0: no answer).",
            ["verb", "code"],
            registry=registry,
        )

    def watch(self, ages: Callable[[], Mapping[str, float]]) -> None:
        """Export the age of each kind's watch; every scrape calls ``ages``."""
        self._registry.register(_WatchAges(ages))

    def leading(self, leads: bool) -> None:
        """Record whether this operator is the leader."""
        self._leader.set(leads)

    def api_request(self, verb: str, code: int) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb, str(code)).inc()

    def waiting(self, change: int) -> None:
        """Record that a pool entered (1) or left (-1) the queue."""
        self._queue.inc(change)

    def reconciled(self, result: str, seconds: float) -> None:
        """Record one reconcile with its result and duration."""
        self._reconciles.labels(result).inc()
        self._reconcile_seconds.observe(seconds)

    def published(self, pool: str, status: PoolStatus, now_s: float) -> None:
        """Record a pool's published ring; a Draining member that is no longer in the ring has drained."""
        before = self._rings.get(pool)
        self._rings[pool] = status
        present = {member.id for member in status.members}
        for member in before.members if before is not None else ():
            if member.state is MemberState.DRAINING and member.id not in present:
                self._drains.observe(max(0.0, now_s - member.since_s))
        for state in MemberState:
            count = sum(member.state is state for member in status.members)
            self._members.labels(pool, state.value).set(count)
        self._version.labels(pool).set(status.ring_version)

    def forget(self, pool: str) -> None:
        """Remove the series of a pool."""
        if self._rings.pop(pool, None) is not None:
            for state in MemberState:
                self._members.remove(pool, state.value)
            self._version.remove(pool)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _WatchAges(Collector):
    """Collects the ages of the watches at each scrape."""

    def __init__(self, ages: Callable[[], Mapping[str, float]]) -> None:
        self._ages = ages

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "dualmap_operator_watch_age_seconds",
            "Time since the last message from the API server about a resource kind, in seconds.",
            labels=["kind"],
        )
        for kind, age_s in self._ages().items():
            family.add_metric([kind], age_s)
        yield family
