"""The load that others put on a pool's members: the other routers, and requests that came through no router."""

from collections.abc import Mapping
from functools import partial

from dualmap.engines.profile import EngineProfile
from dualmap.fleet.estimate import PrefillModel
from dualmap.fleet.foreign import ForeignWork
from dualmap.fleet.ledger import Ledger
from dualmap.pools.pool import Pool
from dualmap.replicas.peers import PEER_TTL_S, OthersLoad, Peers
from dualmap.replicas.plausible import LoadLimits
from dualmap.replicas.update import SharedLoad


class Others:
    """The reports of other routers and of engines. A report changes the loads of ``ledger``."""

    def __init__(self, pool: Pool, ledger: Ledger) -> None:
        self._ledger = ledger
        self._peers = Peers()
        self._foreign = ForeignWork()
        self._members = frozenset(member.id for member in pool.members)
        self._limits = _load_limits(pool)

    @property
    def replicas(self) -> int:
        """The number of other routers with a recent report."""
        return len(self._peers)

    def adopt(self, pool: Pool, profiled: set[str]) -> None:
        """Apply a new version of the pool; only members in ``profiled`` keep the requests that their engine reported.

        This also outdates the summary of every member, because the new version may have other settings.
        """
        self._members = frozenset(member.id for member in pool.members)
        self._limits = _load_limits(pool)
        self._foreign.retain(profiled)
        for member in pool.members:
            self._ledger.loads[member.id].others_changed(partial(self._load, member.id))

    def on_loads(self, said_s: float, peer: str, loads: Mapping[str, SharedLoad], *, age_s: float) -> None:
        """Store another router's load per member, reported at ``said_s``; ignore a report that is too old.

        A load above the limits is reduced to the limits. The pool may know a member later than the other router.
        """
        if age_s >= PEER_TTL_S:
            return
        clamp = self._limits.clamp
        loads = {member: clamp(load) for member, load in loads.items()}
        for member in self._members & loads.keys():
            # Only requests in flight delay other prefills at the member; queued requests do not.
            if loads[member].backlog_s:
                self._ledger.loads[member].others.busy(said_s)
        self._update(self._peers.hear(said_s, peer, loads))

    def on_profile(self, now: float, member: str, profile: EngineProfile) -> None:
        """Update the load of the requests at a member that came through no router."""
        load = self._ledger.loads[member]
        load.end_overdue(now)
        foreign = self._foreign.count(member, profile, load, self._peers.load(member))
        if foreign is not None:
            foreign = self._limits.clamp(foreign)
            if foreign.backlog_s:
                load.others.busy(now)
        if self._foreign.put(now, member, foreign):
            self._update({member})

    def on_dispatched(self, prompt_tokens: int) -> None:
        """Count a prompt that this router sent to a member. Requests of no router count with the mean of these."""
        self._foreign.on_dispatched(prompt_tokens)

    def forget_restarted(self, member: str) -> None:
        """Forget what a member's engine reported before its restart."""
        if self._foreign.forget(member):
            self._update({member})

    def forget_peer(self, peer: str) -> None:
        """Remove the load that another router reported."""
        self._update(self._peers.forget(peer))

    def expire(self, now: float) -> None:
        """Remove the load of routers and of engines without a recent report."""
        self._update(self._peers.expire(now) | self._foreign.expire(now))

    def next_expiry(self) -> float | None:
        """Return the time at which the oldest report expires, or None without reports."""
        times_s = (self._peers.next_expiry(), self._foreign.next_expiry())
        return min((each for each in times_s if each is not None), default=None)

    def _update(self, members: set[str]) -> None:
        for member in members & self._members:
            self._ledger.loads[member].others_changed(partial(self._load, member))

    def _load(self, member: str) -> OthersLoad:
        return self._peers.load(member).plus(self._foreign.load(member))


def _load_limits(pool: Pool) -> LoadLimits:
    queue, tokens = pool.routing.queue, pool.engine.max_model_len
    longest_s = PrefillModel(pool.engine.prefill_tokens_per_second).speed.compute_s(tokens, 0)
    return LoadLimits(
        backlog_s=queue.dispatch_window_s + longest_s,
        held_s=queue.max_wait_s,
        max_held=queue.max_held,
        prompt_tokens=tokens,
    )
