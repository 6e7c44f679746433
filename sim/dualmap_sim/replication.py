"""The replication between the routers of a simulated cluster, with delays as in production.

``cluster`` owns the routers and the timeline. This module sends updates between the routers. The module also replaces
the store that decides which replica's session binding is valid. In production, ``dualmap_extproc.store.exchange`` makes
this decision.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from dualmap.replicas.load_reports import KEEP_ALIVE_S
from dualmap.replicas.update import ReplicaUpdate, SharedBinding
from dualmap.requests import Outcome
from dualmap.shared_router import Router
from dualmap_sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One router, which starts at ``at_s`` with an empty state, and is lost without notice at ``lost_s``.

    A router that starts later receives the updates of the preceding ``replay_s`` seconds.
    """

    at_s: float = 0.0
    replay_s: float = 0.0
    lost_s: float = inf

    def runs(self, now: float) -> bool:
        """Return whether the router has started and is not lost."""
        return self.at_s <= now < self.lost_s


def everything(update: ReplicaUpdate) -> ReplicaUpdate:
    """Return the unchanged update. This is the default filter of a replication."""
    return update


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """Replication settings: updates are sent at most every ``period_s`` and arrive ``delay_s`` later.

    A router sends an update after an event, or to show that it still runs.
    The default delay is half a period, because routers read updates as often as they write them. ``carries`` may remove
    parts of an update. A store processes session bindings one at a time and answers at once.
    """

    period_s: float = 0.1
    delay_s: float = 0.05
    carries: Callable[[ReplicaUpdate], ReplicaUpdate] = everything


class Replication:
    """The replication between the routers of one run. ``after`` is called with a router and its outcomes."""

    def __init__(
        self,
        exchange: ReplicationConfig,
        *,
        replicas: Sequence[Replica],
        routers: Sequence[Router],
        timeline: Timeline,
        after: Callable[[int, tuple[Outcome, ...]], None],
    ) -> None:
        self._exchange = exchange
        self._replicas = replicas
        self._routers = routers
        self._timeline = timeline
        self._after = after
        # The time of each router's next update. Updates scheduled for other times are not sent.
        self._ticks_s = [inf] * len(routers)
        self._sent: deque[tuple[float, int, ReplicaUpdate]] = deque()
        self._remembered_s = max(replica.replay_s for replica in replicas)
        self._bindings: dict[int, tuple[float, SharedBinding]] = {}

    def begin(self) -> None:
        """Schedule every router's updates, starting when the router joins."""
        for router, replica in enumerate(self._replicas):
            # A joining router first receives its replay.
            self._timeline.at(replica.at_s, self._replay, router, ticks=True)
            self._tick_at(router, replica.at_s)

    def changed(self, router: int) -> None:
        """Schedule a router's next update after an event of the router."""
        if self._ticks_s[router] > self._timeline.now_s + self._exchange.period_s:
            self._tick_at(router, self._timeline.now_s)

    def _tick_at(self, router: int, after_s: float) -> None:
        """Schedule a router's next update at its first turn from ``after_s`` on; routers send at different times."""
        period_s = self._exchange.period_s
        began_s = self._replicas[router].at_s + period_s * router / len(self._routers)
        self._ticks_s[router] = max(began_s, began_s + ceil((after_s - began_s) / period_s) * period_s)
        self._timeline.at(self._ticks_s[router], self._tick, router, ticks=True)

    def _tick(self, router: int) -> None:
        exchange, timeline = self._exchange, self._timeline
        now = timeline.now_s
        if self._ticks_s[router] != now or not self._replicas[router].runs(now):
            return
        self._tick_at(router, now + max(KEEP_ALIVE_S, exchange.period_s))
        update = exchange.carries(self._routers[router].take_update(now))
        if update.is_empty:
            return
        if self._remembered_s:
            self._sent.append((now, router, update))
            while self._sent[0][0] < now - self._remembered_s:
                self._sent.popleft()
        for peer, replica in enumerate(self._replicas):
            if peer != router and replica.runs(now):
                timeline.at(now + exchange.delay_s, self._deliver, (peer, router, update), ticks=True)
        answers = self._store(now, update)
        if answers:
            timeline.at(now + exchange.delay_s, self._hear_bindings, (router, answers), ticks=True)

    def _store(self, now: float, update: ReplicaUpdate) -> tuple[SharedBinding, ...]:
        """Answer lookups, then compare and set bindings. The newer version wins; of equal versions, the first wins.

        Return the stored bindings that the lookups found, and the winners over rejected writes.
        """
        answers = [self._bindings[session] for session in update.wanted if session in self._bindings]
        for binding in update.bindings:
            held = self._bindings.get(binding.session)
            if held is None or held[1].version < binding.version:
                self._bindings[binding.session] = (now, binding)
            elif held[1].host != binding.host:
                answers.append(held)
        return tuple(
            replace(binding, moved_ago_s=binding.moved_ago_s + now - stored_s) for stored_s, binding in answers
        )

    def _deliver(self, heard: tuple[int, int, ReplicaUpdate]) -> None:
        router, peer, update = heard
        if not self._replicas[router].runs(self._timeline.now_s):
            return
        effects = self._routers[router].on_update(
            self._timeline.now_s, f"router-{peer}", update, self._exchange.delay_s
        )
        self._after(router, effects.outcomes)

    def _hear_bindings(self, heard: tuple[int, tuple[SharedBinding, ...]]) -> None:
        router, bindings = heard
        self._routers[router].on_bindings(self._timeline.now_s, bindings)

    def _replay(self, router: int) -> None:
        now = self._timeline.now_s
        since_s = now - self._replicas[router].replay_s
        outcomes: tuple[Outcome, ...] = ()
        for sent_s, peer, update in self._sent:
            if sent_s > since_s:
                outcomes += self._routers[router].on_update(now, f"router-{peer}", update, now - sent_s).outcomes
        self._after(router, outcomes)
