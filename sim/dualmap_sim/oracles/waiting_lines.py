"""Orders of the single queue: by arrival, or first the requests that can still meet the SLO."""

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from dualmap_sim.engine import EngineRequest
from dualmap_sim.records import Record

PASSED_OVER_MAX: Final = 8
"""How often in a row the oldest waiting request may be passed over: with 8, at least every ninth start is in order.

No request starves: one that waits behind k other late ones starts within 9 (k + 1) starts. Every ninth start is more
than the tenth of requests that goodput allows to be late, so late requests are served as fast as they come. With a
number above 9, goodput could be reached by letting a tenth wait for ever.
"""


class WaitingLine(Protocol):
    """The queued requests, in the order in which they start."""

    def add(self, record: Record) -> None:
        """Take a request that arrived after all others here."""

    def head(self, now: float) -> Record | None:
        """Return the next request, or None if the queue is empty."""

    def take(self) -> None:
        """Remove what ``head`` returned last."""


class InOrder:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Record] = deque()

    def add(self, record: Record) -> None:
        """Take a request that arrived after all others here."""
        self._waiting.append(record)

    def head(self, now: float) -> Record | None:
        """Return the request that has waited longest."""
        return self._waiting[0] if self._waiting else None

    def take(self) -> None:
        """Remove the head."""
        self._waiting.popleft()


class HopefulFirst:
    """Requests that can still meet the SLO go before those that cannot, each in order of arrival.

    All have the same objective, so the order of arrival is that of the deadlines. Serving a late request costs as much
    as serving one in time and gains nothing. Still no late request waits for ever: see ``PASSED_OVER_MAX``.
    ``prefill_s`` says how long a request's prefill would take if it began now.
    """

    def __init__(self, prefill_s: Callable[[EngineRequest], float], *, slo_ttft_s: float) -> None:
        self._prefill_s = prefill_s
        self._slo_ttft_s = slo_ttft_s
        self._hopeful: deque[Record] = deque()
        # Late requests are older than all others, because only the head is found to be late.
        self._late: deque[Record] = deque()
        self._passed_over = 0
        self._next_is_late = False

    def add(self, record: Record) -> None:
        """Take a request that arrived after all others here."""
        self._hopeful.append(record)

    def head(self, now: float) -> Record | None:
        """Return the oldest that can still be in time; the oldest of all when there is none or it is its turn."""
        while self._hopeful and not self._is_hopeful(now, self._hopeful[0]):
            self._late.append(self._hopeful.popleft())
        overdue = self._passed_over >= PASSED_OVER_MAX
        self._next_is_late = bool(self._late) and (overdue or not self._hopeful)
        waiting = self._late if self._next_is_late else self._hopeful
        return waiting[0] if waiting else None

    def take(self) -> None:
        """Remove what ``head`` returned last."""
        if self._next_is_late:
            self._late.popleft()
            self._passed_over = 0
        else:
            self._hopeful.popleft()
            self._passed_over += bool(self._late)

    def _is_hopeful(self, now: float, record: Record) -> bool:
        return now + self._prefill_s(record.arrival.work) <= record.arrival.at_s + self._slo_ttft_s
