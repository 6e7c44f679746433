"""The next times at which queued requests can be dispatched without an event, for each member with a queue.

After every event, the router reads the earliest of these times. Every member may have a dispatch time, so a heap stores
the times. Only the times of changed loads are computed again.
"""

from heapq import heapify, heappop, heappush
from itertools import count

from dualmap.fleet.load import MemberLoad

# The heap may contain this many invalid times in addition to twice the number of valid times.
_INVALID = 64


class DispatchTimes:
    """The dispatch times of the loads with queued requests."""

    def __init__(self) -> None:
        self.changed: dict[MemberLoad, None] = {}
        """The loads with queued requests that changed since the last call; each load adds itself."""
        self._heap: list[tuple[float, int, MemberLoad]] = []
        # The number of each load's latest heap entry: all earlier entries are invalid.
        self._latest: dict[MemberLoad, int] = {}
        self._numbers = count()

    def first_s(self, window_s: float, *, after_s: float) -> float | None:
        """Return the first time after ``after_s``, the time of the last check; None if only an event allows a dispatch.

        A member with an earlier time is stalled and still saturated.
        """
        for load in self.changed:
            self._compute(load, window_s, after_s)
        self.changed.clear()
        if len(self._heap) > 2 * len(self._latest) + _INVALID:
            self._heap = [each for each in self._heap if self._latest.get(each[2]) == each[1]]
            heapify(self._heap)
        while self._heap:
            opens_s, number, load = self._heap[0]
            if self._latest.get(load) != number:
                heappop(self._heap)
            elif opens_s > after_s and load.queue:
                return opens_s
            else:
                heappop(self._heap)
                self._compute(load, window_s, after_s)
        return None

    def _compute(self, load: MemberLoad, window_s: float, after_s: float) -> None:
        self._latest.pop(load, None)
        opens_s = load.dispatches_s(window_s, after_s=after_s) if load.queue else None
        if opens_s is not None:
            self._latest[load] = number = next(self._numbers)
            heappush(self._heap, (opens_s, number, load))
