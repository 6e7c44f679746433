"""The load that others put on the members: the sum of the last report of each other router replica.

A report is valid for PEER_TTL_S. After that time, the replica counts as stopped and its load is removed. The work that
came through no router is added to the sum (``dualmap.fleet.foreign``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dualmap.replicas.update import SharedLoad

# Replicas report at least once a second. After three missing reports a replica counts as stopped or disconnected.
PEER_TTL_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OthersLoad(SharedLoad):
    """The sum of the loads that others put on a member; ``replicas`` of them put load on the member.

    Work that came through no router counts as the load of one replica.
    """

    replicas: int = 0

    def plus(self, more: SharedLoad | None) -> "OthersLoad":
        """Return the sum with one more load, which counts as the load of one replica."""
        return self if more is None else replace(_sum((self, more)), replicas=self.replicas + 1)


NO_LOAD = OthersLoad()


class Peers:
    """The other replicas that route requests of this pool."""

    def __init__(self) -> None:
        self._loads: dict[str, Mapping[str, SharedLoad]] = {}
        self._heard_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def hear(self, reported_s: float, peer: str, loads: Mapping[str, SharedLoad]) -> set[str]:
        """Store a replica's loads as of ``reported_s``; return the members whose sum may have changed."""
        if reported_s < self._heard_s.get(peer, reported_s):
            return set()
        changed = set(loads) | set(self._loads.get(peer, ()))
        self._loads[peer], self._heard_s[peer] = loads, reported_s
        return changed

    def forget(self, peer: str) -> set[str]:
        """Remove a replica's report; return the members whose sum may have changed."""
        self._heard_s.pop(peer, None)
        return set(self._loads.pop(peer, ()))

    def expire(self, now: float) -> set[str]:
        """Remove replicas without a recent report; return the members whose sum may have changed."""
        changed: set[str] = set()
        for peer in [peer for peer, heard_s in self._heard_s.items() if heard_s + PEER_TTL_S <= now]:
            changed.update(self._loads.pop(peer))
            del self._heard_s[peer]
        return changed

    def next_expiry(self) -> float | None:
        """Return the time at which the oldest report expires, or None without reports."""
        return min(self._heard_s.values()) + PEER_TTL_S if self._heard_s else None

    def load(self, member: str) -> OthersLoad:
        """Return the sum of the loads that the other replicas put on a member."""
        shares = [loads[member] for loads in self._loads.values() if member in loads]
        return _sum(shares) if shares else NO_LOAD


def _sum(shares: Sequence[SharedLoad]) -> OthersLoad:
    # One loop instead of five sums, for speed: the function runs for each member that is read after a report.
    pending_prefill_tokens, backlog_s, held_s, in_flight, active_kv_tokens = 0, 0.0, 0.0, 0, 0
    for share in shares:
        pending_prefill_tokens += share.pending_prefill_tokens
        backlog_s += share.backlog_s
        held_s += share.held_s
        in_flight += share.in_flight
        active_kv_tokens += share.active_kv_tokens
    return OthersLoad(
        replicas=len(shares),
        pending_prefill_tokens=pending_prefill_tokens,
        backlog_s=backlog_s,
        held_s=held_s,
        in_flight=in_flight,
        active_kv_tokens=active_kv_tokens,
    )
