"""When passing time alone lets in what is held: the instances for which requests wait, soonest first.

With every event the router asks when the first of them opens, and there may be as many as members; so the times are
kept in a heap, and only those of the loads that have changed since are found anew.
"""

from heapq import heapify, heappop, heappush
from itertools import count

from dualmap.fleet.load import MemberLoad

# So many void times may be in the heap besides.
_VOID = 64


class Openings:
    """The opening times of the loads that hold requests; ``reopening`` are those whose times are to be found anew."""

    def __init__(self, reopening: dict[MemberLoad, None]) -> None:
        self._reopening = reopening
        self._heap: list[tuple[float, int, MemberLoad]] = []
        # The number of each load's latest entry in the heap: the others are void.
        self._latest: dict[MemberLoad, int] = {}
        self._numbers = count()

    def first_s(self, window_s: float, *, after_s: float) -> float | None:
        """Return when the first opens after ``after_s``, when all were looked at; None when it takes an event.

        One that should have opened by then is kept closed by a stall.
        """
        for load in self._reopening:
            self._find(load, window_s, after_s)
        self._reopening.clear()
        if len(self._heap) > 2 * len(self._latest) + _VOID:
            self._heap = [each for each in self._heap if self._latest.get(each[2]) == each[1]]
            heapify(self._heap)
        while self._heap:
            opens_s, number, load = self._heap[0]
            if self._latest.get(load) != number:
                heappop(self._heap)
            elif opens_s > after_s and load.held:
                return opens_s
            else:
                heappop(self._heap)
                self._find(load, window_s, after_s)
        return None

    def _find(self, load: MemberLoad, window_s: float, after_s: float) -> None:
        self._latest.pop(load, None)
        opens_s = load.opens_s(window_s, after_s=after_s) if load.held else None
        if opens_s is not None:
            self._latest[load] = number = next(self._numbers)
            heappush(self._heap, (opens_s, number, load))
