"""Counters of KV events and of their sources."""

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from dualmap.engines.events import Batch, Removed, Stored
from dualmap.engines.residency import KvChange
from dualmap.engines.source import SourceState, SourceStatus

_KINDS: Final = ("stored", "removed", "cleared")
_COMPLETE: Final = "complete"
_INCOMPLETE: Final = "incomplete"


class KvEventMetrics:
    """The counters of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pools: set[str] = set()
        self._events = Counter(
            "dualmap_kv_events",
            "Blocks that engines reported as stored or removed, and reports of a cleared cache.",
            ("pool", "kind"),
            registry=registry,
        )
        self._gaps = Counter(
            "dualmap_kv_event_gaps", "Gaps in the numbers of messages of KV events.", ("pool",), registry=registry
        )
        self._resyncs = Counter(
            "dualmap_kv_resyncs",
            "Replays of KV events that ended, by whether blocks may be missing after it.",
            ("pool", "result"),
            registry=registry,
        )

    def set_pools(self, pools: Iterable[str]) -> None:
        """Show the counters of these pools (``namespace/name``), and discard those of all others."""
        wanted = set(pools)
        for pool in self._pools - wanted:
            self._gaps.remove(pool)
            for kind in _KINDS:
                self._events.remove(pool, kind)
            for result in (_COMPLETE, _INCOMPLETE):
                self._resyncs.remove(pool, result)
        for pool in wanted - self._pools:
            self._gaps.labels(pool)
            for kind in _KINDS:
                self._events.labels(pool, kind)
            for result in (_COMPLETE, _INCOMPLETE):
                self._resyncs.labels(pool, result)
        self._pools = wanted

    def count(self, pool: str, changes: Sequence[KvChange], before: SourceStatus, after: SourceStatus) -> None:
        """Count the changes of a source, and what became of it."""
        if pool not in self._pools:
            return
        for change in changes:
            if isinstance(change, Batch):
                self._count_batch(pool, change)
        if after.gaps > before.gaps:
            self._gaps.labels(pool).inc(after.gaps - before.gaps)
        if before.state is SourceState.SYNCING and after.state is not SourceState.SYNCING:
            result = _COMPLETE if after.state is SourceState.LIVE else _INCOMPLETE
            self._resyncs.labels(pool, result).inc()

    def _count_batch(self, pool: str, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, Stored):
                self._events.labels(pool, "stored").inc(len(event.hashes))
            elif isinstance(event, Removed):
                self._events.labels(pool, "removed").inc(len(event.hashes))
            else:
                self._events.labels(pool, "cleared").inc()
