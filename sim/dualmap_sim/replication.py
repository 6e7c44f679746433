"""The replication between the routers of a simulated cluster, with delays as in production.

``cluster`` owns the routers and the timeline. This module sends updates between the routers. The module also replaces
the store that decides which replica's session binding is valid. In production, ``dualmap_extproc.store.exchange`` makes
this decision.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dualmap.replicas.update import ReplicaUpdate, SharedBinding
from dualmap.requests import Outcome
from dualmap.shared_router import Router
from dualmap_sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One router, which starts at ``at_s`` with an empty state.

    A router that starts later receives the updates of the preceding ``replay_s`` seconds.
    """

    at_s: float = 0.0
    replay_s: float = 0.0


def everything(update: ReplicaUpdate) -> ReplicaUpdate:
    """Return the unchanged update. This is the default filter of a replication."""
    return update


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """Replication settings: updates are sent every ``period_s`` and arrive ``delay_s`` later.

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
        self._told: deque[tuple[float, int, ReplicaUpdate]] = deque()
        self._remembered_s = max(replica.replay_s for replica in replicas)
        self._bindings: dict[int, tuple[float, SharedBinding]] = {}

    def begin(self) -> None:
        """Schedule every router's updates, starting when the router joins."""
        for router, replica in enumerate(self._replicas):
            # Routers send at different times. A joining router first receives its replay.
            phase_s = self._exchange.period_s * router / len(self._routers)
            self._timeline.at(replica.at_s, self._replay, router, ticks=True)
            self._timeline.at(replica.at_s + phase_s, self._tick, router, ticks=True)

    def _tick(self, router: int) -> None:
        exchange, timeline = self._exchange, self._timeline
        now = timeline.now_s
        timeline.at(now + exchange.period_s, self._tick, router, ticks=True)
        update = exchange.carries(self._routers[router].take_update(now))
        if self._remembered_s:
            self._told.append((now, router, update))
            while self._told[0][0] < now - self._remembered_s:
                self._told.popleft()
        for peer, replica in enumerate(self._replicas):
            if peer != router and replica.at_s <= now:
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
        for told_s, peer, update in self._told:
            if told_s > since_s:
                outcomes += self._routers[router].on_update(now, f"router-{peer}", update, now - told_s).outcomes
        self._after(router, outcomes)
