"""Whether the router may ask a KV store: after failures in a row, it leaves the store alone for a while."""

from typing import Final

FAILURES_MAX: Final = 3
"""The failures in a row after which a store is left alone. An answer after the timeout is a failure."""
LEFT_ALONE_S: Final = 30.0
"""The time for which a store is left alone. Then one question tries it. If it fails, the time begins again."""


class Availability:
    """The state of one store; a store that was never asked may be asked."""

    def __init__(self) -> None:
        self._failures = 0
        self._until_s: float | None = None
        self.reason = ""
        """Why the store is left alone; empty while it may be asked."""

    @property
    def is_up(self) -> bool:
        """Whether the store is not left alone."""
        return self._until_s is None

    def may_ask(self, now: float) -> bool:
        """Return whether a question may be sent now; True counts as sent, if the store is left alone."""
        if self._until_s is None:
            return True
        if now < self._until_s:
            return False
        # Other requests do not wait for the answer to the one question.
        self._until_s = now + LEFT_ALONE_S
        return True

    def answered(self) -> bool:
        """Record a valid answer in time; return whether the store was left alone before."""
        was_up, self._failures, self._until_s, self.reason = self.is_up, 0, None, ""
        return not was_up

    def failed(self, now: float, reason: str) -> bool:
        """Record a failure; return whether the store is left alone from now on, and was not before."""
        was_up = self.is_up
        self._failures += 1
        if self._failures >= FAILURES_MAX or not was_up:
            self._until_s, self.reason = now + LEFT_ALONE_S, reason
        return was_up and not self.is_up
