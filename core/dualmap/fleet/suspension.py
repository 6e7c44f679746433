"""The suspension of a member after failures in a row (a circuit breaker)."""

from math import inf

# After this many failures in a row a member is suspended for FIRST_SUSPENSION_S. Each further failure doubles the time,
# up to LONGEST_SUSPENSION_S. Any success resets the count.
FAILURES_IN_A_ROW = 3
FIRST_SUSPENSION_S = 1.0
LONGEST_SUSPENSION_S = 30.0


class Suspension:
    """The failures in a row of one member, and until when it is suspended."""

    def __init__(self) -> None:
        self.until_s: float | None = None
        self._failures = 0
        self._since_s = -inf

    def failed(self, now: float, dispatched_s: float) -> bool:
        """Count a request that the member failed; return whether this suspends the member.

        A request that was dispatched before the last suspension proves nothing new when it fails.
        """
        if dispatched_s < self._since_s:
            return False
        self._failures += 1
        excess = self._failures - FAILURES_IN_A_ROW
        if excess < 0:
            return False
        self._since_s = now
        self.until_s = now + min(FIRST_SUSPENSION_S * 2.0 ** min(excess, 10), LONGEST_SUSPENSION_S)
        return True

    def succeeded(self) -> None:
        """End the row of failures and the suspension."""
        self._failures = 0
        self.until_s = None
