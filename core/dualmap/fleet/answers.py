"""How long the answers of a pool's last requests took, to predict whether a member finishes one before it leaves."""

from collections import deque
from math import ceil, inf
from typing import Final

_KEPT: Final = 128
# Fewer answers do not show how long one may take.
_ENOUGH: Final = 8
# A cut answer costs more than a prompt that is computed again. The longest answer would be too careful: few requests
# would stay at a member with a notice of two minutes (bench/results/notices.md).
_SHARE: Final = 0.95


class AnswerTimes:
    """The durations of the last answers: from the first token, or from the dispatch if no first token is observed."""

    def __init__(self) -> None:
        self._last_s: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        """Add the duration of an answer that ended without an error."""
        self._last_s.append(seconds)

    def mean_s(self) -> float:
        """Return the mean duration of the last answers; 0 without any."""
        return sum(self._last_s) / len(self._last_s) if self._last_s else 0.0

    def expected_s(self) -> float:
        """Return the time in which nearly all of the last answers ended; infinity while too few are known."""
        if len(self._last_s) < _ENOUGH:
            return inf
        return sorted(self._last_s)[ceil(_SHARE * len(self._last_s)) - 1]
