"""The task that exchanges replication updates with the other routers through the store, ten times a second.

The task publishes the picker's updates to the store, and passes the other routers' updates to the picker. No request
waits for the task. A starting router reads the updates of the last minutes page by page, oldest first, while it routes.
While the store is unreachable, routing continues, and the task retries at least once a second. The task keeps unsent
updates within bounds (``unsent``). The task logs once when the store becomes unreachable and once when the store
recovers.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from dualmap.pools.pool import Pool
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedBinding
from dualmap.scaling.reports import Report
from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_extproc.store.contract import Answer, Claim, Failure, Post, Question, Store, StoreError
from dualmap_extproc.store.peers import PEERS_MAX, KnownPeers
from dualmap_extproc.store.unsent import Unsent

INTERVAL_S: Final = 0.1
SHORTEST_HISTORY_S: Final = 300.0
"""The shortest history that a starting router reads. A conversation's turns are minutes apart."""
LONGEST_PAUSE_S: Final = 1.0
"""The longest pause between two attempts while the store does not answer."""
LEAVE_S: Final = 1.0
# The store keeps entries for this time after the end of the history, for replicas that read with a delay.
_KEEP_LONGER_S: Final = 5.0
# The most updates that the task applies without a pause. An update takes up to a millisecond, during which requests
# wait.
_ENTRIES_AT_ONCE: Final = 4
_NOTHING_COUNTED: Final = HotnessCounts(requests=0, nodes={})
_log = get_logger(__name__)


class SharingPicker(Protocol):
    """The methods of ``picker.Picker`` that the exchange uses."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools that this router currently serves."""

    def take_update(self, now: float) -> Sequence[tuple[str, ReplicaUpdate]]:
        """Return new updates, each with its pool's id."""

    def on_update(self, now: float, pool: str, peer: str, update: ReplicaUpdate, age_s: float) -> None:
        """Apply another replica's update."""

    def on_bindings(self, now: float, pool: str, bindings: Sequence[SharedBinding]) -> None:
        """Apply bindings of sessions from the store."""


class Reporter(Protocol):
    """The methods of ``pool_demand.PoolDemand`` that the exchange uses."""

    def reports(self, pools: Collection[str]) -> Mapping[str, Report]:
        """Return the reports that are due. ``pools`` must contain all served pools."""

    def reported(self, reports: Mapping[str, Report]) -> None:
        """Mark these reports as published."""

    def on_peer(self, pool: str, peer: str, age_s: float) -> None:
        """Record that another replica was running ``age_s`` seconds ago."""

    def on_report(self, pool: str, peer: str, report: Report, age_s: float) -> None:
        """Apply another replica's report."""

    def exchanged(self) -> None:
        """Record that an exchange succeeded."""


class StoreObserver(Protocol):
    """The counters of exchanges and failures; ``store.metrics`` implements this interface."""

    def exchanged(self, seconds: float) -> None:
        """Count a successful exchange, and record its duration."""

    def failed(self, failure: Failure) -> None:
        """Count an exchange that failed."""

    def unreadable(self, count: int) -> None:
        """Count entries and bindings in the store that no router wrote."""

    def dropped(self, count: int) -> None:
        """Count items of updates that were dropped because too many were unsent."""


class Exchange:
    """The exchange of updates and reports with ``store``; ``peer`` identifies this router and its incarnation.

    ``clock`` returns the time for the picker's argument ``now``. ``shown`` is the store's name in log lines.
    """

    def __init__(
        self,
        picker: SharingPicker,
        store: Store,
        observer: StoreObserver,
        *,
        reporter: Reporter,
        peer: str,
        clock: Callable[[], float],
        shown: str,
    ) -> None:
        self._picker = picker
        self._reporter = reporter
        self._store = store
        self._observer = observer
        self._peer = peer
        self._clock = clock
        self._shown = shown
        self._unsent: dict[str, Unsent] = {}
        self._cursors: dict[str, str] = {}
        self._known: dict[str, KnownPeers] = {}
        self._refused = OncePerMinute(_log, "Ignoring updates of further routers", clock)
        self._oversized = OncePerMinute(_log, "Removed oversized data from shared state", clock)
        self._deliveries: dict[str, AnswerDelivery] = {}
        # The time since which the store is unreachable; None while it is reachable, and before the first attempt.
        self._lost_s: float | None = None
        self._has_read_history = False

    @property
    def has_read_history(self) -> bool:
        """Whether this router has read the updates of the last minutes for the pools that it served first."""
        return self._has_read_history

    @property
    def lost_for_s(self) -> float | None:
        """The time since the store became unreachable; None while it is reachable, and before the first attempt."""
        return None if self._lost_s is None else self._clock() - self._lost_s

    async def run(self) -> None:
        """Exchange updates regularly until cancelled."""
        pause_s = INTERVAL_S
        while True:
            began_s = self._clock()
            pause_s = INTERVAL_S if await self.exchange() else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(max(0.0, began_s + pause_s - self._clock()))

    async def exchange(self) -> bool:
        """Exchange updates once; return whether it succeeded. Never raises StoreError."""
        began_s = self._clock()
        pools = {pool.id: pool for pool in self._picker.pools}
        self._collect(pools)
        try:
            await self._read(pools)
            await self._resolve(pools)
            await self._publish(pools)
        except StoreError as error:
            self._observer.failed(error.failure)
            if self._lost_s is None:
                self._lost_s = began_s
                _log.warning(
                    "Lost shared state, routing without the other routers' updates",
                    store=self._shown,
                    failure=error.failure.value,
                    reason=str(error),
                )
            return False
        self._reporter.exchanged()
        self._observer.exchanged(self._clock() - began_s)
        if self._lost_s is not None:
            _log.info("Shared state recovered", store=self._shown, after_s=round(self._clock() - self._lost_s, 1))
            self._lost_s = None
        return True

    async def leave(self) -> None:
        """Publish empty loads of this router if the store is reachable, and close the store."""
        pools = self._picker.pools if self._lost_s is None else ()
        try:
            async with asyncio.timeout(LEAVE_S):
                if pools:
                    nothing = [Post(pool=pool.id, keep_s=_keep_s(pool), loads={}) for pool in pools]
                    await self._store.publish(self._peer, nothing)
                await self._store.close()
        except (StoreError, TimeoutError):
            # The other routers detect the end of this router by a timeout.
            _log.info("Announcing shutdown to the other routers failed", store=self._shown)

    def _collect(self, pools: dict[str, Pool]) -> None:
        now = self._clock()
        for gone in self._unsent.keys() - pools.keys():
            del self._unsent[gone]
            del self._deliveries[gone]
            del self._known[gone]
            self._cursors.pop(gone, None)
        for pool in pools.keys() - self._unsent.keys():
            self._unsent[pool] = Unsent()
            self._known[pool] = KnownPeers()
            self._deliveries[pool] = AnswerDelivery(self._picker, self._clock, pool)
        for pool, update in self._picker.take_update(now):
            self._unsent[pool].add(now, update)
        self._observer.dropped(sum(unsent.take_dropped() for unsent in self._unsent.values()))

    async def _read(self, pools: dict[str, Pool]) -> None:
        """Read new entries; stop between pages when the next exchange is due."""
        until_s = self._clock() + INTERVAL_S
        while await self._read_page(pools):
            if self._clock() >= until_s:
                return
        self._has_read_history = self._has_read_history or bool(pools)

    async def _read_page(self, pools: dict[str, Pool]) -> bool:
        """Read one page of new entries, and the bindings of the wanted sessions.

        Returns whether there are more pages.
        """
        questions = [
            Question(pool=id_, window_s=history_s(pool), cursor=self._cursors.get(id_), wanted=self._unsent[id_].wanted)
            for id_, pool in pools.items()
        ]
        answers = await self._store.read(self._peer, questions)
        for question, answer in zip(questions, answers, strict=True):
            self._cursors[question.pool] = answer.cursor
            self._unsent[question.pool].answered()
            self._observer.unreadable(answer.unreadable)
            if answer.oversized:
                self._oversized.warn(answer.oversized, pool=question.pool, store=self._shown)
            known = self._known_only(question.pool, answer)
            self._report_peers(question.pool, known)
            await self._deliveries[question.pool].deliver(known)
        return any(answer.more for answer in answers)

    def _known_only(self, pool: str, answer: Answer) -> Answer:
        """Return an answer without the updates of routers beyond the most that this router uses."""
        # A router that sends loads or reports is running. It therefore goes before the routers of older updates.
        told = [each.peer for each in answer.loads] + [each.peer for each in answer.reports]
        told += [each.peer for each in answer.entries]
        refused = self._known[pool].refused(self._clock(), told)
        if not refused:
            return answer
        self._refused.warn(len(refused), pool=pool, most=PEERS_MAX)
        return replace(
            answer,
            loads=tuple(each for each in answer.loads if each.peer not in refused),
            reports=tuple(each for each in answer.reports if each.peer not in refused),
            entries=tuple(each for each in answer.entries if each.peer not in refused),
        )

    def _report_peers(self, pool: str, answer: Answer) -> None:
        for said in answer.loads:
            self._reporter.on_peer(pool, said.peer, said.age_s)
        for entry in answer.reports:
            self._reporter.on_report(pool, entry.peer, entry.report, entry.age_s)

    async def _resolve(self, pools: dict[str, Pool]) -> None:
        """Claim this router's new bindings in the store; replace each rejected binding by the store's binding."""
        claims = [
            Claim(pool=id_, ttl_s=pools[id_].routing.session.ttl_s, bindings=bindings)
            for id_, unsent in self._unsent.items()
            if (bindings := unsent.claims(self._clock()))
        ]
        if not claims:
            return
        for claim, holding in zip(claims, await self._store.resolve(claims), strict=True):
            now = self._clock()
            lost = self._unsent[claim.pool].resolved(now, holding)
            if lost:
                self._picker.on_bindings(now, claim.pool, lost)

    async def _publish(self, pools: dict[str, Pool]) -> None:
        now = self._clock()
        reports = self._reporter.reports(pools)
        posts = [
            Post(
                pool=id_,
                keep_s=_keep_s(pools[id_]),
                update=unsent.update(now),
                loads=unsent.loads(now),
                report=reports.get(id_),
            )
            for id_, unsent in self._unsent.items()
        ]
        posts = [post for post in posts if (post.update, post.loads, post.report) != (None, None, None)]
        if not posts:
            return
        await self._store.publish(self._peer, posts)
        self._reporter.reported(reports)
        for post in posts:
            if post.update is not None:
                self._unsent[post.pool].sent_update()
            if post.loads is not None:
                self._unsent[post.pool].sent_loads(now, post.loads)


class AnswerDelivery:
    """The object that passes a store's answers about one pool to the picker."""

    def __init__(self, picker: SharingPicker, clock: Callable[[], float], pool: str) -> None:
        self._picker = picker
        self._clock = clock
        self._pool = pool

    async def deliver(self, answer: Answer) -> None:
        """Apply an answer; pause regularly, so that the event loop can serve requests."""
        # An entry's age grows while the picker applies earlier entries.
        read_s = self._clock()
        for said in answer.loads:
            update = ReplicaUpdate(hotness=_NOTHING_COUNTED, loads=said.loads)
            self._picker.on_update(read_s, self._pool, said.peer, update, said.age_s)
        for number, entry in enumerate(answer.entries, start=1):
            now = self._clock()
            self._picker.on_update(now, self._pool, entry.peer, entry.update, entry.age_s + now - read_s)
            if number % _ENTRIES_AT_ONCE == 0:
                await asyncio.sleep(0)
        if answer.bindings:
            self._picker.on_bindings(self._clock(), self._pool, answer.bindings)


def history_s(pool: Pool) -> float:
    """Return the length of a pool's history that a starting router reads, in seconds."""
    return max(pool.routing.prefix.window_s, SHORTEST_HISTORY_S)


def _keep_s(pool: Pool) -> float:
    return history_s(pool) + _KEEP_LONGER_S
