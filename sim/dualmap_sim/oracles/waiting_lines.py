"""Orders of the single queue: by arrival, or with the requests first that can still meet the SLO."""

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from dualmap_sim.engine import EngineRequest
from dualmap_sim.records import Record

PASSED_OVER_MAX: Final = 8
"""Number of starts in a row that may pass over the oldest waiting request. With 8, every ninth start is in order.

No request starves: a request behind k other late requests starts within 9 (k + 1) starts. Goodput allows a tenth of the
requests to be late. One start in nine is more than one in ten, so late requests do not accumulate. With a number above
9, goodput could be reached while a tenth of the requests never starts.
"""


class WaitingLine(Protocol):
    """The queued requests, in the order of their start."""

    def add(self, record: Record) -> None:
        """Add a request that arrived after all queued requests."""

    def head(self, now: float) -> Record | None:
        """Return the next request, or None if the queue is empty."""

    def take(self) -> None:
        """Remove the request that ``head`` returned last."""


class InOrder:
    """The order of arrival: first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Record] = deque()

    def add(self, record: Record) -> None:
        """Add a request that arrived after all queued requests."""
        self._waiting.append(record)

    def head(self, now: float) -> Record | None:
        """Return the request that has waited longest."""
        return self._waiting[0] if self._waiting else None

    def take(self) -> None:
        """Remove the head of the queue."""
        self._waiting.popleft()


class HopefulFirst:
    """Requests that can still meet the SLO go before late requests. Each group is in order of arrival.

    All requests have the same SLO, so the order of arrival is also the order of deadlines. Serving a late request costs
    as much as serving a request in time, and does not increase goodput. ``PASSED_OVER_MAX`` ensures that every late
    request is served. ``prefill_s`` returns how long a request's prefill would take if it began now.
    """

    def __init__(self, prefill_s: Callable[[EngineRequest], float], *, slo_ttft_s: float) -> None:
        self._prefill_s = prefill_s
        self._slo_ttft_s = slo_ttft_s
        self._hopeful: deque[Record] = deque()
        # Late requests are older than all other requests, because the oldest of the other requests becomes late first.
        self._late: deque[Record] = deque()
        self._passed_over = 0
        self._next_is_late = False

    def add(self, record: Record) -> None:
        """Add a request that arrived after all queued requests."""
        self._hopeful.append(record)

    def head(self, now: float) -> Record | None:
        """Return the oldest request that can still meet the SLO, or the oldest late request.

        A late request is next if no other request waits, or if it was passed over ``PASSED_OVER_MAX`` times.
        """
        while self._hopeful and not self._is_hopeful(now, self._hopeful[0]):
            self._late.append(self._hopeful.popleft())
        overdue = self._passed_over >= PASSED_OVER_MAX
        self._next_is_late = bool(self._late) and (overdue or not self._hopeful)
        waiting = self._late if self._next_is_late else self._hopeful
        return waiting[0] if waiting else None

    def take(self) -> None:
        """Remove the request that ``head`` returned last."""
        if self._next_is_late:
            self._late.popleft()
            self._passed_over = 0
        else:
            self._hopeful.popleft()
            self._passed_over += bool(self._late)

    def _is_hopeful(self, now: float, record: Record) -> bool:
        return now + self._prefill_s(record.arrival.work) <= record.arrival.at_s + self._slo_ttft_s
