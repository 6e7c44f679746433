"""The suspension of a member after consecutive failures (a circuit breaker)."""

from math import inf

# After FAILURES_IN_A_ROW consecutive failures, a member is suspended for FIRST_SUSPENSION_S. Each further failure
# doubles the time, up to LONGEST_SUSPENSION_S. Any success resets the count.
FAILURES_IN_A_ROW = 3
FIRST_SUSPENSION_S = 1.0
LONGEST_SUSPENSION_S = 30.0


class Suspension:
    """One member's consecutive failures, and the end of its suspension."""

    def __init__(self) -> None:
        self.until_s: float | None = None
        self._failures = 0
        self._since_s = -inf

    def failed(self, now: float, dispatched_s: float) -> bool:
        """Count a request that the member failed; return whether this suspends the member.

        A failure does not count if the request was dispatched before the last suspension.
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
        """Reset the failure count and end the suspension."""
        self._failures = 0
        self.until_s = None
