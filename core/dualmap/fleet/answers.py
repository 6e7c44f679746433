"""How long the answers of a pool's last requests took, to predict whether a member finishes one before it leaves."""

from collections import deque
from math import inf
from typing import Final

_KEPT: Final = 128
# Fewer answers do not show how long one may take.
_ENOUGH: Final = 8


class AnswerTimes:
    """The durations of the last answers: from the first token, or from the dispatch if that is not observed."""

    def __init__(self) -> None:
        self._last_s: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        """Add the duration of an answer that ended without an error."""
        self._last_s.append(seconds)

    @property
    def longest_s(self) -> float:
        """The longest of the last durations; infinity while too few are known."""
        return max(self._last_s) if len(self._last_s) >= _ENOUGH else inf
