"""Recent samples of a number, and recent prefills, which bound what a further prefill may teach about a member's speed.

A prefill may teach a wrong speed, because the token count of a prompt is an estimate and a client may craft prompts
whose estimate is far off. Three bounds hold. One client provides at most half of the recent prefills (rounded up) while
other clients have some. The median of recent prefills follows no minority of them, and no half that is faster than the
others. A member contradicts the other members of its pool only after many prefills that say so.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, NamedTuple

from dualmap.fleet.answer_cost import AnswerCost

# The median is taken over this many prefills. The first ones stand for the prior.
WINDOW = 15
MOST_OF_CLIENT = 8
_PRIOR_PREFILLS = 4
# Samples of other clients limit a client's share for this long.
CLIENT_MEMORY_S = 60.0
# The samples of a member are old after this many rounds without a new one.
FRESH_ROUNDS = 12.0
# The weight of old samples falls to 1/e in this many rounds of samples at the pool's members.
FADE_ROUNDS = 4.0
# A prefill that is faster or slower than the median by more than this factor is clipped.
_FASTEST = 2.0
_SLOWEST = 3.0
# Members whose medians differ by less than this factor agree.
AGREEMENT = 3.0
# A member differs from the other members by more only after this many prefills in a row outside the agreement.
DISSENTING_PREFILLS = 50
# The client of the samples that stand for the prior.
_NO_CLIENT: Final = -1
# The number of members from which on their common median is meaningful.
_FEWEST_MEMBERS = 3


class CommonMedian:
    """The median of the members' medians of a number, by which the members of a pool check each other.

    A method's ``member`` is any object that identifies the member.
    """

    def __init__(self) -> None:
        self._medians: dict[object, float] = {}
        self._changes = 0
        self.value = 1.0
        """The common median; of two members the faster one's."""

    def report(self, member: object, median: float) -> None:
        """Record a member's median."""
        self._medians[member] = median
        self._changed()

    def forget(self, member: object) -> None:
        """Forget the median of a member that left the pool, or that has no samples any more."""
        self._medians.pop(member, None)
        self._changed()

    def _changed(self) -> None:
        self._changes += 1
        # One sort for as many changes as there are members.
        if self._changes >= len(self._medians):
            self._changes = 0
            ordered = sorted(self._medians.values())
            self.value = ordered[(len(ordered) - 1) // 2] if ordered else 1.0

    def bound(self, value: float) -> float:
        """Return ``value``, or the nearest value that agrees with the members' common median."""
        if len(self._medians) < _FEWEST_MEMBERS:
            return value
        return min(max(value, self.value / AGREEMENT), self.value * AGREEMENT)


class Agreement:
    """What a pool's members have in common: the medians of their samples, and the age of samples."""

    def __init__(self) -> None:
        # In the order of the last renewal.
        self._renewals: dict[object, Callable[[], None]] = {}
        self.prefills = CommonMedian()
        """The slowness of prefills."""
        self.answers = CommonMedian()
        """The slowness of whole answers."""
        self.answer_cost = AnswerCost()
        self.rounds = 0.0
        """The number of samples that each member would have if the pool's samples were equally many at each."""

    def join(self, member: object, renew: Callable[[], None]) -> None:
        """Add a member. ``renew`` is called once a round, so that its speed follows the pool and its samples' age."""
        self._renewals[member] = renew

    def leave(self, member: object) -> None:
        """Remove a member that left the pool."""
        self._renewals.pop(member, None)

    def count(self) -> None:
        """Count a sample of any member, and renew the member that has not been renewed for the longest time."""
        if self._renewals:
            self.rounds += 1.0 / len(self._renewals)
            member = next(iter(self._renewals))
            renew = self._renewals[member] = self._renewals.pop(member)
            renew()


class _Sample(NamedTuple):
    value: float
    client: int
    at_s: float


class RecentSamples:
    """The last ``window`` samples of a number. One client provides at most ``most`` while others have some.

    The first ``priors`` samples have the value ``prior``.
    """

    def __init__(self, *, window: int, most: int, prior: float, priors: int) -> None:
        self._window = window
        self._most = most
        self._samples: deque[_Sample] = deque([_Sample(prior, _NO_CLIENT, -inf)] * priors, maxlen=window)
        self._of_client: dict[int, int] = {}
        self._prior = prior
        self.ordered = [prior] * priors
        """The values in ascending order."""

    @property
    def median(self) -> float:
        """The median of the values."""
        return self.ordered[len(self.ordered) // 2] if self.ordered else self._prior

    def between(self, low: float, high: float) -> int:
        """Return the number of values from ``low`` to ``high``."""
        return bisect_right(self.ordered, high) - bisect_left(self.ordered, low)

    def add(self, now: float, client: int, value: float) -> bool:
        """Add a client's sample; return False if the client has its share of the samples already."""
        # Most samples need only this comparison.
        if self._of_client.get(client, 0) >= self._most and self.has_rivals(now, client):
            return False
        self._append(_Sample(value, client, now))
        return True

    def renew(self, now: float, client: int, value: float) -> None:
        """Add a client's sample; if the client has its share already, replace the client's oldest sample."""
        if not self.add(now, client, value):
            self.remove(client, next(each.value for each in self._samples if each.client == client))
            self._append(_Sample(value, client, now))

    def keep_newest(self, number: int) -> None:
        """Remove all samples except the newest ``number``."""
        while len(self._samples) > number:
            self._forget(self._samples.popleft())

    def remove(self, client: int, value: float) -> bool:
        """Remove a client's sample; return whether it was still among the samples."""
        for sample in self._samples:
            if sample.value == value and sample.client == client:
                self._samples.remove(sample)
                self._forget(sample)
                return True
        return False

    def has_rivals(self, now: float, client: int) -> bool:
        """Return whether other clients had samples lately."""
        # Without names of clients, all requests are one client's, and the search would examine every sample.
        return len(self._of_client) > (client in self._of_client) and any(
            each.client != client and now - each.at_s < CLIENT_MEMORY_S for each in self._samples
        )

    def _append(self, sample: _Sample) -> None:
        if len(self._samples) == self._window:
            self._forget(self._samples[0])
        self._samples.append(sample)
        self._of_client[sample.client] = self._of_client.get(sample.client, 0) + 1
        insort(self.ordered, sample.value)

    def _forget(self, sample: _Sample) -> None:
        """Remove a sample from the ordered values and from its client's number."""
        del self.ordered[bisect_left(self.ordered, sample.value)]
        own = self._of_client.get(sample.client, 0)
        if own > 1:
            self._of_client[sample.client] = own - 1
        else:
            self._of_client.pop(sample.client, None)


class RecentPrefills:
    """The slowness of a member's recent prefills: each one's time as a multiple of what the prior expects.

    While there are few, the pool's common median stands for the others.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._samples = RecentSamples(window=WINDOW, most=MOST_OF_CLIENT, prior=1.0, priors=0)
        self._dissenting = 0
        self._last_round = 0.0

    def accept(self, now: float, client: int, slowness: float) -> float | None:
        """Record a prefill of a client; return the bounded slowness to learn from, or None to learn nothing from it."""
        if self._agreement.rounds > self._last_round + FRESH_ROUNDS:
            # Old prefills say nothing about the member's speed now.
            self._samples.keep_newest(0)
        self._last_round = self._agreement.rounds
        if not self._samples.add(now, client, slowness):
            return None
        median = self._median()
        self._agreement.prefills.report(self, median)
        bounded = near(slowness, median)
        agreed = self._agreement.prefills.bound(bounded)
        self._dissenting = 0 if agreed == bounded else self._dissenting + 1
        return bounded if self._dissenting > DISSENTING_PREFILLS else agreed

    def withdraw(self, client: int, slowness: float) -> None:
        """Remove a prefill that turned out to be wrong, if it is still among the recent ones."""
        if not self._samples.remove(client, slowness):
            return
        if self._samples.ordered:
            self._agreement.prefills.report(self, self._median())
        else:
            self._agreement.prefills.forget(self)

    def _median(self) -> float:
        return upper_median(self._samples.ordered, self._agreement.prefills.value, window=WINDOW)


def upper_median(ordered: Sequence[float], common: float, *, window: int) -> float:
    """Return the value after the faster half of ``ordered`` (rounded up), which may be those of one client.

    If there are few of ``window`` values, ``common`` stands for the missing ones.
    """
    missing = min(_PRIOR_PREFILLS, window - len(ordered))
    if missing:
        ordered = sorted((*ordered, *(common,) * missing))
    return ordered[min((len(ordered) + 1) // 2, len(ordered) - 1)]


def near(slowness: float, median: float) -> float:
    """Return ``slowness``, or the nearest value that is not too far from the median."""
    return min(max(slowness, median / _FASTEST), median * _SLOWEST)
