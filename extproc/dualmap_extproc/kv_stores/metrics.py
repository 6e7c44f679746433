"""Metrics of lookups in KV stores."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class LookupResult(StrEnum):
    """How the lookup of a prompt ended."""

    HIT = "hit"
    MISS = "miss"
    TIMEOUT = "timeout"
    ERROR = "error"
    SKIPPED = "skipped"


class KvStoreMetrics:
    """The metrics of one router, for pools with a store."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pools: set[str] = set()
        self._lookups = Counter(
            "dualmap_kv_store_lookups",
            "Prompts that were looked up in the pool's KV store, by result.",
            ("pool", "result"),
            registry=registry,
        )
        self._seconds = Histogram(
            "dualmap_kv_store_lookup_seconds",
            "Seconds that requests waited for the answer of a KV store.",
            ("pool",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._up = Gauge(
            "dualmap_kv_store_up", "1 while the pool's KV store is asked, 0 while it is left alone.", ("pool",),
            registry=registry,
        )  # fmt: skip

    def set_pools(self, pools: Iterable[str]) -> None:
        """Show the metrics of these pools, which have a store, and discard those of all others."""
        wanted = set(pools)
        for pool in self._pools - wanted:
            self._seconds.remove(pool)
            self._up.remove(pool)
            for result in LookupResult:
                self._lookups.remove(pool, result)
        for pool in wanted - self._pools:
            self._seconds.labels(pool)
            self._up.labels(pool).set(1)
            for result in LookupResult:
                self._lookups.labels(pool, result)
        self._pools = wanted

    def count(self, pool: str, result: LookupResult) -> None:
        """Count the result of a lookup."""
        if pool in self._pools:
            self._lookups.labels(pool, result).inc()

    def waited(self, pool: str, seconds: float) -> None:
        """Record how long a request waited for an answer."""
        if pool in self._pools:
            self._seconds.labels(pool).observe(seconds)

    def set_up(self, pool: str, *, is_up: bool) -> None:
        """Show whether a pool's store is asked."""
        if pool in self._pools:
            self._up.labels(pool).set(1 if is_up else 0)
