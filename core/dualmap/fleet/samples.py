"""Recent prefills of one member, which bound what a further prefill may teach about the member's speed.

A prefill may teach a wrong speed, because the token count of a prompt is an estimate and a client may craft prompts
whose estimate is far off. Three bounds hold. One client provides at most half of the recent prefills (rounded up) while
other clients have some. The median of recent prefills follows no minority of them, and no half that is faster than the
others. A member contradicts the other members of its pool only after many prefills that say so.
"""

from bisect import bisect_left, insort
from collections import deque
from math import inf
from typing import Final, NamedTuple

# The median is taken over this many prefills. The first ones stand for the prior.
WINDOW = 15
_PRIOR_PREFILLS = 4
# Prefills of other clients limit a client's share for this long.
CLIENT_MEMORY_S = 60.0
# A prefill that is faster or slower than the median by more than this factor is clipped.
_FASTEST = 2.0
_SLOWEST = 3.0
# Members whose medians differ by less than this factor agree.
AGREEMENT = 3.0
# A member differs from the other members by more only after this many prefills in a row outside the agreement.
DISSENTING_PREFILLS = 50
# The client of the prefills that stand for the prior.
_NO_CLIENT: Final = -1
# The number of members from which on their common median is meaningful.
_FEWEST_MEMBERS = 3


class Agreement:
    """The common median of a pool's members, by which members check each other."""

    def __init__(self) -> None:
        self._medians: dict[object, float] = {}
        self._median: float | None = None
        self._changes = 0

    def report(self, member: object, median: float) -> None:
        """Record a member's median; ``member`` is any object that identifies the member."""
        self._medians[member] = median
        self._changes += 1
        # One sort for as many changes as there are members.
        if self._changes >= len(self._medians) >= _FEWEST_MEMBERS:
            self._changes = 0
            self._median = sorted(self._medians.values())[len(self._medians) // 2]

    def forget(self, member: object) -> None:
        """Forget a member that left the pool."""
        self._medians.pop(member, None)

    def bound(self, slowness: float) -> float:
        """Return ``slowness``, or the nearest value that agrees with the members' common median."""
        if self._median is None:
            return slowness
        return min(max(slowness, self._median / AGREEMENT), self._median * AGREEMENT)


class _Prefill(NamedTuple):
    slowness: float
    client: int
    at_s: float


class RecentPrefills:
    """The slowness of a member's recent prefills: each one's time as a multiple of what the prior expects."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        prior = [_Prefill(1.0, _NO_CLIENT, -inf)] * _PRIOR_PREFILLS
        self._prefills: deque[_Prefill] = deque(prior, maxlen=WINDOW)
        self._sorted = [each.slowness for each in prior]
        self._of_client: dict[int, int] = {}
        self._dissenting = 0

    def accept(self, now: float, client: int, slowness: float) -> float | None:
        """Record a prefill of a client; return the slowness that it may teach, or None if it may teach nothing."""
        own = self._of_client.get(client, 0)
        # Most prefills need only this comparison.
        if 2 * own >= WINDOW and self._has_rivals(now, client):
            return None
        if len(self._prefills) == WINDOW:
            self._remove(self._prefills[0])
        self._prefills.append(_Prefill(slowness, client, now))
        self._of_client[client] = self._of_client.get(client, 0) + 1
        insort(self._sorted, slowness)
        median = self._median()
        self._agreement.report(self, median)
        bounded = min(max(slowness, median / _FASTEST), median * _SLOWEST)
        agreed = self._agreement.bound(bounded)
        self._dissenting = 0 if agreed == bounded else self._dissenting + 1
        return bounded if self._dissenting > DISSENTING_PREFILLS else agreed

    def withdraw(self, client: int, slowness: float) -> None:
        """Remove a prefill that turned out to be wrong, if it is still among the recent ones."""
        for prefill in self._prefills:
            if prefill.slowness == slowness and prefill.client == client:
                self._prefills.remove(prefill)
                self._remove(prefill)
                self._agreement.report(self, self._median() if self._sorted else 1.0)
                return

    def _median(self) -> float:
        """Return the value after the faster half of the prefills (rounded up), which may be those of one client."""
        number = len(self._sorted)
        return self._sorted[min((number + 1) // 2, number - 1)]

    def _has_rivals(self, now: float, client: int) -> bool:
        """Return whether other clients had prefills lately."""
        # Without names of clients, all requests are one client's, and the search would examine every prefill.
        return len(self._of_client) > 1 and any(
            each.client != client and now - each.at_s < CLIENT_MEMORY_S for each in self._prefills
        )

    def _remove(self, prefill: _Prefill) -> None:
        """Remove a prefill from the sorted list and from its client's number."""
        del self._sorted[bisect_left(self._sorted, prefill.slowness)]
        own = self._of_client.get(prefill.client, 0)
        if own > 1:
            self._of_client[prefill.client] = own - 1
        else:
            self._of_client.pop(prefill.client, None)
