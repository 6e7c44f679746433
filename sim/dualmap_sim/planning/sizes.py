"""Searches for the least number of instances with which a workload attains its SLO, by simulations."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

LARGEST: Final = 1024
"""The largest number of instances that is tried."""

Attains = Callable[[int], float]
"""Returns the share of requests within the SLO with a number of instances."""
SplitAttains = Callable[[int, int], float]
"""Returns the share of requests within the SLO with numbers of prefill and of decode instances."""


class Unattainable(Exception):
    """No number of instances attains the target: ``instances`` attain ``share``, or any number for None."""

    def __init__(self, *, share: float, instances: int | None) -> None:
        super().__init__(f"{instances or 'any number of'} instances attain {share:.1%}")
        self.share = share
        self.instances = instances


@dataclass(frozen=True, slots=True)
class Fleet:
    """A number of instances, of which ``prefillers`` are in a prefill pool: 0 without one."""

    instances: int
    prefillers: int = 0

    @property
    def decoders(self) -> int:
        """The number of instances that are not in the prefill pool."""
        return self.instances - self.prefillers

    def smaller(self) -> tuple["Fleet", ...]:
        """Return the fleets with one instance fewer: of either kind if there is a prefill pool."""
        if not self.prefillers:
            return (Fleet(self.instances - 1),) if self.instances > 1 else ()
        fewer = []
        if self.prefillers > 1:
            fewer.append(Fleet(self.instances - 1, self.prefillers - 1))
        if self.decoders > 1:
            fewer.append(Fleet(self.instances - 1, self.prefillers))
        return tuple(fewer)


def least_instances(attains: Attains, target: float, *, first: int) -> int:
    """Return the least number of instances that attains ``target``, searching from ``first``. Raises Unattainable.

    One more instance may attain slightly less, because keys move. So a smaller size may attain the target, too, but
    never the next smaller one.
    """
    low, high = 0, min(LARGEST, max(1, first))
    while (share := attains(high)) < target:
        if high == LARGEST:
            raise Unattainable(share=share, instances=high)
        low, high = high, min(LARGEST, 2 * high)
    return _between(attains, target, low, high)


def fewest_up_to(attains: Attains, target: float, most: int) -> int:
    """Return the least number of instances that attains ``target``, searching down from ``most``, which attains it."""
    high, step = most, 1
    while high > 1:
        low = max(1, high - step)
        if attains(low) < target:
            return _between(attains, target, low, high)
        high, step = low, 2 * step
    return high


def least_split(attains: SplitAttains, target: float, *, first: int) -> Fleet:
    """Return the least fleet of prefill and decode instances that attains ``target``. Raises Unattainable.

    The search begins with ``first`` of each. It finds the least number of each kind beside an ample number of the
    other. It then adds instances to both of these numbers, one more at a time, in every possible way. If more instances
    never attain less, this is the least sum. In any case, no fleet with one fewer of either kind attains the target.
    """
    half = LARGEST // 2
    ample = min(half, max(1, first))
    while (share := attains(ample, ample)) < target:
        if ample == half:
            raise Unattainable(share=share, instances=LARGEST)
        ample = min(half, 2 * ample)
    most = min(half, 2 * ample)
    prefillers = least_instances(lambda number: attains(number, most), target, first=max(1, ample // 2))
    decoders = least_instances(lambda number: attains(most, number), target, first=max(1, ample // 2))
    # The numbers that attained beside ``most`` decode instances are then among those that the loop tries.
    decoders = min(decoders, most)
    for added in count():
        tried = [(attains(prefillers + more, decoders + added - more), prefillers + more) for more in range(added + 1)]
        share, prefilling = max(tried)
        if share >= target:
            break
    return _reduced(attains, target, Fleet(prefillers + decoders + added, prefilling))


def _reduced(attains: SplitAttains, target: float, fleet: Fleet) -> Fleet:
    """Remove instances of a fleet that attains ``target``, one at a time, as long as it still does."""
    for smaller in fleet.smaller():
        if attains(smaller.prefillers, smaller.decoders) >= target:
            return _reduced(attains, target, smaller)
    return fleet


def _between(attains: Attains, target: float, low: int, high: int) -> int:
    """Return the least number above ``low``, which misses the target, up to ``high``, which attains it."""
    while high - low > 1:
        middle = (low + high) // 2
        if attains(middle) < target:
            low = middle
        else:
            high = middle
    return high
