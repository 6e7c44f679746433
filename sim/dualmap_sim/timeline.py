"""Virtual time: scheduled calls in order of their time, and in order of scheduling for equal times.

``cluster`` and the oracles drive their runs with it. There is no clock: time is that of the next event.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeVar

Subject = TypeVar("Subject")


class Timeline:
    """A heap of acts, each with its one argument (a partial for each would cost more than the heap)."""

    def __init__(self) -> None:
        self.now_s = -inf
        """The moment of the last act."""
        # Scheduled calls other than ticks: ticks recur for ever and would hide that nothing else is due.
        self._to_come = 0
        self._scheduled = 0
        self._heap: list[tuple[float, int, bool, Callable[[Any], None], Any]] = []

    def at(self, at_s: float, act: Callable[[Subject], None], subject: Subject, *, ticks: bool = False) -> None:
        """Have ``act(subject)`` called at ``at_s``; an act that ``ticks`` keeps nothing alive."""
        self._scheduled += 1
        self._to_come += not ticks
        heappush(self._heap, (at_s, self._scheduled, ticks, act, subject))

    @property
    def is_over(self) -> bool:
        """Whether only ticks are scheduled."""
        return not self._to_come

    def step(self) -> None:
        """Run the next act; there must be one."""
        self.now_s, _, ticks, act, subject = heappop(self._heap)
        self._to_come -= not ticks
        act(subject)
