"""The members that may take a request, as rings: all of them, or a subset, without the suspended ones.

Rings are immutable; each is built when it is first needed. A suspended member leaves the rings like a draining one, so
only its own keys go elsewhere, and it returns to the same keys. If all members are suspended, all stay in the rings: a
doubtful member is better than none.
"""

from collections.abc import Iterable

from dualmap.keys.rings import DualRing
from dualmap.pools.pool import Member, Pool

_SUBSET_RINGS = 256


class Membership:
    """The members of one version of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.members: dict[str, Member] = {member.id: member for member in pool.members}
        self.suspended: frozenset[str] = frozenset()
        self._pool = pool
        # Every response asks for the member that served it. If two share an endpoint, the first one is returned.
        self._at = {member.endpoint: member for member in reversed(pool.members)}
        self._rings: dict[frozenset[str] | None, DualRing] = {}
        self._ring = self._build(None)
        self.size = len(self._ring.members)
        """How many members take new keys, suspended ones included; hotness thresholds are relative to their share."""

    def ring(self, subset: frozenset[str] | None) -> DualRing:
        """Return the rings over the members a request may use; a bare ip in ``subset`` allows any port of it."""
        if subset is None:
            return self._ring
        ring = self._rings.get(subset)
        if ring is None:
            ring = self._build(subset)
            if len(self._rings) >= _SUBSET_RINGS:
                self._rings.clear()
            self._rings[subset] = ring
        return ring

    def at(self, endpoint: str) -> Member | None:
        """Return the member at ``ip:port``, or None."""
        return self._at.get(endpoint)

    def suspend(self, members: Iterable[str]) -> None:
        """Leave exactly these members out of the rings."""
        self.suspended = frozenset(members)
        self._rings.clear()
        self._ring = self._build(None)

    def _build(self, subset: frozenset[str] | None) -> DualRing:
        allowed = [
            each for each in self._pool.members if subset is None or each.endpoint in subset or each.address in subset
        ]
        ring = DualRing([each for each in allowed if each.id not in self.suspended], self._pool.routing.ring)
        return ring if ring.members or not self.suspended else DualRing(allowed, self._pool.routing.ring)
