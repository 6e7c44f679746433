"""The answers that an owner did not send in time, and the pause in which a router does not ask it."""

from math import inf
from typing import Final

ANSWER_TIMEOUT_S: Final = 0.02
"""The longest wait for the owner's first answer to a question. In-cluster answers take about a millisecond."""
MISSES_MAX: Final = 3
"""The missed answers in a row after which a router does not ask the owner for PAUSE_S.

Questions that waited at the same time miss one answer together, because one delay of the owner delays all answers."""
PAUSE_S: Final = 0.5
"""The time for which a router does not ask an owner that has missed MISSES_MAX answers."""


class MissedAnswers:
    """The missed answers of a pool's present owner."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last_s = self._paused_until_s = -inf

    def is_paused(self, now: float) -> bool:
        """Return whether the router must not ask the owner."""
        return now < self._paused_until_s

    def on_missed(self, now: float, *, asked_s: float) -> None:
        """Count the missed answer to a question of ``asked_s``; start a pause after several in a row."""
        if asked_s < self._last_s:
            # This question waited at the same time as the question that missed the last answer.
            self._in_a_row = max(self._in_a_row, 1)
            return
        self._in_a_row += 1
        self._last_s = now
        if self._in_a_row >= MISSES_MAX:
            self._paused_until_s = now + PAUSE_S

    def reset(self) -> bool:
        """Forget the missed answers, after an answer or for a new owner; return whether there were any."""
        had_any = self._in_a_row > 0
        self._in_a_row, self._paused_until_s = 0, -inf
        return had_any
