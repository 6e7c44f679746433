"""Hash rings over the members that a request may use: all members or a subset, without suspended or asleep members.

Rings are immutable; each ring is created at its first use. A suspended or asleep member leaves the rings like a
draining member: only its own keys map to other members. When the member resumes, it gets the same keys. If no other
member is left, suspended members stay in the rings, and then asleep members, so that requests still have a destination.
If no other member may get new keys, or all of these fail or sleep, the members that leave at a known time get them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dualmap.keys.rings import DualRing
from dualmap.pools.pool import Member, MemberState, Pool

_RINGS_MAX = 256
_FULL_WEIGHT = 100


class Membership:
    """The members of one version of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.members: dict[str, Member] = {member.id: member for member in pool.members}
        self.suspended: frozenset[str] = frozenset()
        self.asleep: frozenset[str] = frozenset()
        self.departed: frozenset[str] = frozenset()
        self._pool = pool
        # Every response needs the member that served it. If two members have the same endpoint, the first member is
        # returned.
        self._at = {member.endpoint: member for member in reversed(pool.members)}
        self._rings: dict[tuple[frozenset[str] | None, frozenset[str]], DualRing] = {}
        self._ring = self._build(None, frozenset())
        self.size = len(self._ring.members)
        """The number of members that new keys may map to, also those left out; hotness thresholds use it."""

    def ring(self, subset: frozenset[str] | None, without: frozenset[str] = frozenset()) -> DualRing:
        """Return the rings over the members that a request may use; an ``ip`` in ``subset`` allows all its ports.

        The members in ``without`` are left out unless they are the only ones that may get new keys.
        """
        if subset is None and not without:
            return self._ring
        ring = self._rings.get((subset, without))
        if ring is None:
            ring = self._build(subset, without)
            if len(self._rings) >= _RINGS_MAX:
                self._rings.clear()
            self._rings[subset, without] = ring
        return ring

    def ring_of(self, subset: frozenset[str] | None, without: frozenset[str]) -> DualRing | None:
        """Return the rings without ``without`` and without members that are left out; None if no member remains."""
        ring = self.ring(subset, without)
        unwanted = (without, self.suspended, self.asleep)
        return ring if ring.members and all(ring.ids.isdisjoint(each) for each in unwanted) else None

    def at(self, endpoint: str) -> Member | None:
        """Return the member at ``ip:port``, or None."""
        return self._at.get(endpoint)

    def leave_out(self, *, suspended: Iterable[str], asleep: Iterable[str], departed: Iterable[str] = ()) -> None:
        """Set the suspended and the asleep members, and remove exactly these members from the rings.

        ``departed`` are the members whose time to leave has passed.
        """
        self.suspended, self.asleep, self.departed = frozenset(suspended), frozenset(asleep), frozenset(departed)
        self._rings.clear()
        self._ring = self._build(None, frozenset())

    def _build(self, subset: frozenset[str] | None, without: frozenset[str]) -> DualRing:
        allowed = [
            each for each in self._pool.members if subset is None or each.endpoint in subset or each.address in subset
        ]
        new = [each for each in allowed if each.takes_new_keys]
        left_out = self.suspended | self.asleep
        if all(each.id in left_out for each in new):
            # A member that answers until it leaves is better than one that fails or sleeps.
            last = self._last(allowed)
            new = [each for each in last if each.id not in left_out] or new or last
        new = [each for each in new if each.id not in without] or new
        for unwanted in (left_out, self.asleep, self.suspended):
            ring = DualRing([each for each in new if each.id not in unwanted], self._pool.routing.ring)
            if ring.members or not unwanted:
                return ring
        return DualRing(new, self._pool.routing.ring)

    def _last(self, allowed: Sequence[Member]) -> list[Member]:
        """Return the members that get new keys if no other member can: those that leave, first those with time left."""
        leaving = [each for each in allowed if each.leave_at_s is not None]
        staying = [each for each in leaving if each.id not in self.departed and each.weight > 0] or leaving
        return [replace(each, state=MemberState.ACTIVE, weight=_FULL_WEIGHT) for each in staying]
