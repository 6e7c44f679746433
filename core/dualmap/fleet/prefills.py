"""The pending prefills of one member: their tokens and their expected compute time."""

from collections import OrderedDict
from collections.abc import Callable
from math import inf

from dualmap.fleet.in_flight import InFlightRequest

# A prefill at the head counts as ended if no prefill of the member ended for a time limit. The limit is
# SILENT_PREFILL_S or SILENT_PREFILL_FACTOR times the prefill's expected time, whichever is longer.
SILENT_PREFILL_S = 30.0
SILENT_PREFILL_FACTOR = 10.0


class PrefillAccount:
    """The prefills without an observed end, in order of dispatch: engines serve requests in order of arrival."""

    def __init__(self) -> None:
        self.tokens = 0
        """Pending prefill tokens."""
        self.compute_s = 0.0
        self.head: InFlightRequest | None = None
        """The first pending prefill, stored separately because every event reads it several times."""
        self.pending: OrderedDict[str, InFlightRequest] = OrderedDict()
        # The earliest possible start of the head's prefill: the end of the previous prefill, or the head's dispatch.
        self._head_since_s = 0.0
        # The start of the time without a report for the head. Later than `_head_since_s` if the previous prefill
        # counted as ended without a report.
        self._silent_since_s = 0.0

    def add(self, request: InFlightRequest, begins_s: float) -> None:
        """Add a dispatched request; if no other request is pending, its prefill starts at ``begins_s``."""
        if self.head is None:
            self.head = request
            self._head_since_s = self._silent_since_s = begins_s
            self.compute_s = 0.0  # Remove the rounding error of earlier sums.
        self.pending[request.request_id] = request
        self.compute_s += request.compute_s
        self.tokens += request.new_tokens

    def remove(self, request: InFlightRequest) -> None:
        """Remove a pending request."""
        del self.pending[request.request_id]
        if self.head is request:
            self.head = next(iter(self.pending.values()), None)
        self.compute_s -= request.compute_s
        self.tokens -= request.new_tokens

    def restart(self, begins_s: float) -> None:
        """Record that the head's prefill starts at ``begins_s``."""
        self._head_since_s = self._silent_since_s = begins_s

    def give_up_head(self, now: float) -> None:
        """Count the head as ended without a report and remove it; a stall of the member continues."""
        if self.head is not None:
            self.remove(self.head)
            self._silent_since_s = now

    def busy_since_s(self, request: InFlightRequest) -> float:
        """Return the earliest time at which the prefill of ``request`` can have started as the head."""
        return max(self._head_since_s, request.dispatched_s)

    def overdue_s(self) -> float:
        """Return the time at which the head's prefill counts as ended without a report; infinity without a head.

        Without streaming, no first token is observable, so the prefill counts as ended at its expected end.
        """
        head = self.head
        if head is None:
            return inf
        if head.streamed:
            return self._silent_since_s + max(SILENT_PREFILL_S, SILENT_PREFILL_FACTOR * head.compute_s)
        return self.busy_since_s(head) + head.compute_s

    def backlog_s(self, now: float, decode_stall_s: float) -> float:
        """Return the seconds of pending prefill.

        The head's progress reduces the backlog. If the head runs ``decode_stall_s`` longer than its expected time, the
        member is in the paper's decode bottleneck (section A.7). The time without a completed prefill is then added to
        the backlog. Deviation: the paper compares the complete interval with a threshold. The paper's rule would also
        report a stall for every long prefill, such as a prefill of 20 000 tokens.
        """
        head = self.head
        if head is None:
            return 0.0
        # Comparisons instead of min and max, for speed: every event calls this method for every member with a queue.
        interval_s, compute_s = now - self._head_since_s, head.compute_s
        if interval_s <= 0.0:
            backlog_s = self.compute_s
        elif interval_s <= compute_s:
            backlog_s = self.compute_s - interval_s
        else:
            backlog_s = self.compute_s - compute_s
            if interval_s > compute_s + decode_stall_s:
                backlog_s += interval_s
        return backlog_s if backlog_s > 0.0 else 0.0

    def keep(self) -> Callable[[], None]:
        """Return a function that puts the account back to its present state."""
        kept = vars(self) | {"pending": self.pending.copy()}
        return lambda: vars(self).update(kept)

    def forecast(self, now: float, decode_stall_s: float) -> tuple[float, float, float]:
        """Return ``backlog_s`` as a function of time: ``max(ends_s - t, least_s)`` for every t before ``until_s``."""
        head = self.head
        if head is None:
            return -inf, 0.0, inf
        began_s, behind_s = self._head_since_s, max(0.0, self.compute_s - head.compute_s)
        stalls_s = began_s + head.compute_s + decode_stall_s
        if now < began_s:
            return -inf, self.compute_s, began_s
        if now > stalls_s:
            return -inf, behind_s + (now - began_s), -inf
        return began_s + self.compute_s, behind_s, stalls_s

    def reaches_s(self, backlog_s: float) -> float:
        """Return when the backlog decreases to ``backlog_s`` without an event; infinity if it needs an event."""
        head = self.head
        if head is None:
            return inf
        over_s = self.compute_s - backlog_s
        return self._head_since_s + over_s if over_s <= head.compute_s else inf
