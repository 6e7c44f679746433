"""Virtual time: scheduled calls in order of their time. Calls at equal times run in order of scheduling.

``cluster`` and the oracles run on a timeline. The timeline has no clock: the time is that of the current call.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeVar

Subject = TypeVar("Subject")


class Timeline:
    """A heap of scheduled calls, each with one argument. A ``partial`` for each call would cost more than the heap."""

    def __init__(self) -> None:
        self.now_s = -inf
        """The time of the last call."""
        # Number of scheduled calls other than ticks. Ticks recur without end, so they do not keep a run going.
        self._to_come = 0
        self._scheduled = 0
        self._heap: list[tuple[float, int, bool, Callable[[Any], None], Any]] = []

    def at(self, at_s: float, act: Callable[[Subject], None], subject: Subject, *, ticks: bool = False) -> None:
        """Schedule ``act(subject)`` at ``at_s``. With ``ticks``, the call does not keep the run going."""
        self._scheduled += 1
        self._to_come += not ticks
        heappush(self._heap, (at_s, self._scheduled, ticks, act, subject))

    @property
    def is_over(self) -> bool:
        """Whether only ticks are scheduled."""
        return not self._to_come

    def step(self) -> None:
        """Run the next call. At least one call must be scheduled."""
        self.now_s, _, ticks, act, subject = heappop(self._heap)
        self._to_come -= not ticks
        act(subject)
