"""Prometheus metrics of one operator, all named ``dualmap_operator_*``; ``health`` serves them.

``Metrics`` implements what the other modules tell (``api.ApiObserver`` and ``keeper.KeeperObserver``), and reads what
can be read at each scrape: how old the watches are. A pool that is gone takes its series along.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import PoolStatus

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
# A pass takes milliseconds, or as long as routers and the API server take to answer: 10 s at most each.
_RECONCILE_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
# A drain ends within seconds when a pool is idle, and at drain.timeout (10 min unless set) at the latest.
_DRAIN_BUCKETS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)


class Metrics:
    """Every metric of one operator, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._rings: dict[str, PoolStatus] = {}
        registry = self._registry
        self._reconciles = Counter(
            "dualmap_operator_reconciles", "Passes over a pool, by how they ended.", ["result"], registry=registry
        )
        self._reconcile_seconds = Histogram(
            "dualmap_operator_reconcile_seconds",
            "How long a pass took.",
            buckets=_RECONCILE_BUCKETS_S,
            registry=registry,
        )
        self._queue = Gauge(
            "dualmap_operator_reconcile_queue", "Pools that were woken and wait for their pass.", registry=registry
        )
        self._members = Gauge(
            "dualmap_operator_ring_members", "Members published, by state.", ["pool", "state"], registry=registry
        )
        self._version = Gauge(
            "dualmap_operator_ring_version", "Version of the ring published.", ["pool"], registry=registry
        )
        self._drains = Histogram(
            "dualmap_operator_drain_seconds",
            "From a member's draining to its leave.",
            buckets=_DRAIN_BUCKETS_S,
            registry=registry,
        )
        self._leader = Gauge("dualmap_operator_leader", "Whether this operator acts.", registry=registry)
        self._requests = Counter(
            "dualmap_operator_api_requests",
            "Requests to the API server, by verb and HTTP status (0: not answered).",
            ["verb", "code"],
            registry=registry,
        )

    def watch(self, ages: Callable[[], Mapping[str, float]]) -> None:
        """Have every scrape show how many seconds ago each kind's watch last gave word."""
        self._registry.register(_WatchAges(ages))

    def leading(self, leads: bool) -> None:
        """Note whether this operator acts."""
        self._leader.set(leads)

    def api_request(self, verb: str, code: int) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb, str(code)).inc()

    def waiting(self, change: int) -> None:
        """Note that a pool began (1) or ended (-1) waiting for its pass."""
        self._queue.inc(change)

    def reconciled(self, result: str, seconds: float) -> None:
        """Note a pass, how it ended and how long it took."""
        self._reconciles.labels(result).inc()
        self._reconcile_seconds.observe(seconds)

    def published(self, pool: str, status: PoolStatus, now_s: float) -> None:
        """Note what the watch shows as a pool's ring; members that left it since the last time have drained."""
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
        """Drop the series of a pool that is gone."""
        if self._rings.pop(pool, None) is not None:
            for state in MemberState:
                self._members.remove(pool, state.value)
            self._version.remove(pool)

    def render(self) -> bytes:
        """Return the page for Prometheus."""
        return generate_latest(self._registry)


class _WatchAges(Collector):
    """Makes the ages of the watches at each scrape."""

    def __init__(self, ages: Callable[[], Mapping[str, float]]) -> None:
        self._ages = ages

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "dualmap_operator_watch_age_seconds", "Since the API server last gave word of a kind.", labels=["kind"]
        )
        for kind, age_s in self._ages().items():
            family.add_metric([kind], age_s)
        yield family
