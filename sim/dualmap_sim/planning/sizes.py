"""Searches for the least number of instances with which a workload attains its SLO, by simulations."""

from collections.abc import Callable
from typing import Final

LARGEST: Final = 1024
"""The largest number of instances that is tried."""

Attains = Callable[[int], float]
"""Returns the share of requests within the SLO with a number of instances."""


class Unattainable(Exception):
    """No number of instances attains the target: ``instances`` attain ``share``, or any number for None."""

    def __init__(self, *, share: float, instances: int | None) -> None:
        super().__init__(f"{instances or 'any number of'} instances attain {share:.1%}")
        self.share = share
        self.instances = instances


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
    while high - low > 1:
        middle = (low + high) // 2
        if attains(middle) < target:
            low = middle
        else:
            high = middle
    return high
