"""A request between its acceptance and its line: what the observations told about it."""

from dataclasses import dataclass

from dualmap.receipt import Receipt
from dualmap.recordings.values import RecordedOutcome
from dualmap.requests import Request
from dualmap_extproc.request.ending import AccessLogEntry, Ending

_OUTCOMES = {
    Ending.FINISHED: RecordedOutcome.OK,
    Ending.REJECTED: RecordedOutcome.ENGINE_ERROR,
    Ending.FAILED: RecordedOutcome.ENGINE_ERROR,
    Ending.ABORTED: RecordedOutcome.CLIENT_GONE,
}


@dataclass(slots=True)
class OpenRequest:
    """A request of a pool. ``request_name`` is its header ``x-request-id``; empty without it.

    ``ended_s`` is the time of its end on the clock of observations; None before, and if no end was reported.
    ``entry`` is what Envoy's access log reports. ``refusal`` is the code of the router's refusal.
    """

    pool: str
    request: Request
    request_name: str
    receipt: Receipt | None = None
    queued_s: float | None = None
    ttft_s: float | None = None
    ended_s: float | None = None
    ending: Ending = Ending.ABORTED
    entry: AccessLogEntry | None = None
    refusal: str = ""
    served: str = ""

    @property
    def outcome(self) -> RecordedOutcome:
        """The outcome, by the access log if it has an entry."""
        if self.refusal:
            return RecordedOutcome.REFUSED
        entry = self.entry
        if entry is None:
            return _OUTCOMES[self.ending]
        status = entry.status
        if entry.is_broken:
            # An engine reports usage with its last event. A client that leaves directly after it got the whole answer.
            is_whole = entry.usage is not None and status is not None and status < 400
            return RecordedOutcome.OK if is_whole else RecordedOutcome.CLIENT_GONE
        if status is not None and status >= 400:
            return RecordedOutcome.ENGINE_ERROR
        return _OUTCOMES[entry.ending]

    @property
    def duration_s(self) -> float | None:
        """The time from the arrival to the end, by the access log if it has one."""
        if self.entry is not None and self.entry.total_s is not None:
            return self.entry.total_s
        return None if self.ended_s is None else self.ended_s - self.request.arrived_s
