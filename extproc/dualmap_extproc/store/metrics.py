"""Prometheus metrics of the shared state. The router's other metrics are in ``dualmap_extproc.telemetry.metrics``."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dualmap_extproc.store.contract import Failure

# A round trip takes a millisecond. If the server hangs, a call times out after 0.5 s (store.redis).
_EXCHANGE_BUCKETS_S: Final = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 2)


class StoreMetrics:
    """Implements ``exchange.StoreObserver``. The router exports these metrics only if it has a store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._up = Gauge("dualmap_store_up", "1 if the last exchange with Redis succeeded, else 0.", registry=registry)
        errors = Counter(
            "dualmap_store_errors",
            "Failed exchanges of replication updates with Redis, by kind of failure.",
            ("kind",),
            registry=registry,
        )
        self._errors = {failure: errors.labels(failure.value) for failure in Failure}
        self._exchange = Histogram(
            "dualmap_store_exchange_seconds",
            "Duration of successful exchanges with Redis, in seconds.",
            buckets=_EXCHANGE_BUCKETS_S,
            registry=registry,
        )
        self._unreadable = Counter(
            "dualmap_store_unreadable_entries",
            "Replication updates and session bindings in Redis that this version cannot read.",
            registry=registry,
        )
        self._dropped = Counter(
            "dualmap_store_dropped_news",
            "Replication updates that this router dropped before the exchange.",
            registry=registry,
        )

    def exchanged(self, seconds: float) -> None:
        """Count an exchange that succeeded (StoreObserver)."""
        self._up.set(1)
        self._exchange.observe(seconds)

    def failed(self, failure: Failure) -> None:
        """Count an exchange that failed (StoreObserver)."""
        self._up.set(0)
        self._errors[failure].inc()

    def unreadable(self, count: int) -> None:
        """Count invalid entries and bindings in the store (StoreObserver)."""
        self._unreadable.inc(count)

    def dropped(self, count: int) -> None:
        """Count dropped items of updates (StoreObserver)."""
        self._dropped.inc(count)
