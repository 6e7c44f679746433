"""The windows of time in which a plan measures attainment, and the share of them that must attain the goal."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HOUR_S: Final = 3600.0
WINDOW_REQUESTS: Final = 20
"""A window with fewer requests has no attainment of its own, because a single request would decide it."""
_ROUNDING: Final = 1e-9


class NoWindow(Exception):
    """No window has enough requests for an attainment of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The windows that must attain the goal: the share ``percentile`` (0 to 1) of the windows of ``window_s``."""

    percentile: float
    window_s: float

    def may_miss(self, windows: int) -> int:
        """Return how many of so many windows may miss the goal."""
        return min(windows - 1, int((1 - self.percentile) * windows + _ROUNDING))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window that begins ``start_s`` after the first request, and its part of the counted requests."""

    start_s: float
    part: slice

    @property
    def requests(self) -> int:
        """The number of its requests."""
        return int(self.part.stop - self.part.start)


def windows_of(arrivals_s: Sequence[float], window_s: float) -> tuple[Window, ...]:
    """Return the windows of arrival times, which ascend from time 0, without windows of too few requests."""
    found, first = [], 0
    while first < len(arrivals_s):
        number = int(arrivals_s[first] / window_s)
        stop = max(first + 1, bisect_left(arrivals_s, (number + 1) * window_s))
        if stop - first >= WINDOW_REQUESTS:
            found.append(Window(start_s=number * window_s, part=slice(first, stop)))
        first = stop
    return tuple(found)
