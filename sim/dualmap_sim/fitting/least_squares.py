"""Robust least squares of relative errors with coefficients that are not negative, and their intervals.

The errors are relative because TTFT spans three orders of magnitude. Huber's weights keep single slow answers, such as
those of a paused process, from deciding (P. J. Huber, "Robust estimation of a location parameter", 1964). They do not
limit a row with a wrong count that is far too high, so such rows are left out first: a fit to a small random part of
the rows, the one with the least median error, predicts far more than was measured (P. J. Rousseeuw, "Least median of
squares regression", 1984). The intervals are percentiles of fits to resampled rows (B. Efron, "Bootstrap methods",
1979).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_Matrix = NDArray[np.float64]
_ITERATIONS: Final = 20
_HUBER: Final = 1.345
_MAD_TO_SIGMA: Final = 1.4826
_EXACT: Final = 1e-9
RESAMPLES: Final = 200
_INTERVAL: Final = (0.05, 0.95)
SEED: Final = 0
FAR: Final = 10.0
"""A count is wrong if the times that it predicts are this often as long as the measured times."""
FEW: Final = 0.05
"""If a larger share of the counts were wrong by that, the model is wrong instead, and all counts are used."""
_PARTS: Final = 30
_PART_ROWS: Final = 20


class Resampled:
    """The coefficients of fits to resampled rows."""

    def __init__(self, fits: _Matrix) -> None:
        self._fits = fits

    def column(self, number: int) -> _Matrix:
        """Return the coefficient of a column in each fit."""
        column: _Matrix = self._fits[:, number]
        return column


def interval(of: _Matrix) -> tuple[float, float]:
    """Return the 90 % interval of a quantity, given its value for each fit to resampled rows."""
    low, high = np.quantile(of, _INTERVAL)
    return float(low), float(high)


class Problem:
    """Rows of columns, and the seconds above 0 that a sum of the columns is to predict.

    Equal problems have equal fits.
    """

    def __init__(self, rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> None:
        matrix = np.asarray(rows, dtype=np.float64) / np.asarray(seconds, dtype=np.float64)[:, None]
        matrix = matrix[_is_sound(matrix)]
        self._scale = np.abs(matrix).max(axis=0)
        self._scale[self._scale == 0] = 1.0
        self._matrix = matrix / self._scale

    def has(self, column: int) -> bool:
        """Return whether any row has a value in a column."""
        return bool(self._matrix[:, column].any())

    def best(self) -> _Matrix:
        """Return the coefficient of each column."""
        coefficients: _Matrix = _robust(self._matrix) / self._scale
        return coefficients

    def alone(self, column: int) -> float:
        """Return the coefficient of a column that predicts without the others. It must have values."""
        return float(_robust(self._matrix[:, [column]])[0] / self._scale[column])

    def resampled(self) -> Resampled:
        """Return the fits to rows that are drawn with replacement."""
        generator, count = np.random.default_rng(SEED), len(self._matrix)
        draws = (self._matrix[generator.integers(0, count, count)] for _ in range(RESAMPLES))
        return Resampled(np.array([_robust(each) for each in draws]) / self._scale)


def _is_sound(matrix: _Matrix) -> NDArray[np.bool_]:
    """Return for each row whether its counts can be right: whether most rows do not predict far more for it."""
    generator, count = np.random.default_rng(SEED), len(matrix)
    # A quantile, because the largest value may be the wrong one. Some columns have few values.
    scale = np.quantile(np.abs(matrix), 0.9, axis=0)
    scale[scale == 0] = np.abs(matrix).max(axis=0)[scale == 0]
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    parts = (scaled[generator.permutation(count)[:_PART_ROWS]] for _ in range(_PARTS))
    fits = [_not_negative(each, np.ones(len(each))) for each in parts]
    best = min(fits, key=lambda each: float(np.median(np.abs(scaled @ each - 1.0))))
    sound: NDArray[np.bool_] = scaled @ best < FAR
    return sound if sound.mean() >= 1 - FEW else np.ones(count, dtype=np.bool_)


def _robust(matrix: _Matrix) -> _Matrix:
    """Return the coefficients with which each row's sum is nearest to 1."""
    weights = np.ones(len(matrix))
    solved = _not_negative(matrix, weights)
    for _ in range(_ITERATIONS):
        errors = np.abs(matrix @ solved - 1.0)
        bound = _HUBER * _MAD_TO_SIGMA * float(np.median(errors))
        if bound < _EXACT:
            break
        weights = np.minimum(1.0, bound / np.maximum(errors, bound))
        before, solved = solved, _not_negative(matrix, weights)
        if np.allclose(before, solved, rtol=1e-6, atol=0.0):
            break
    return solved


def _not_negative(matrix: _Matrix, weights: _Matrix) -> _Matrix:
    """Solve weighted least squares for coefficients of 0 or more, by the active-set method of Lawson and Hanson.

    C. L. Lawson, R. J. Hanson, "Solving Least Squares Problems", 1974, chapter 23, on the normal equations.
    """
    weighted = matrix * weights[:, None]
    gram, target = matrix.T @ weighted, weighted.sum(axis=0)
    solved, free = np.zeros(len(target)), np.zeros(len(target), dtype=bool)
    for _ in range(3 * len(target)):
        gradient = np.where(free, -np.inf, target - gram @ solved)
        entering = int(gradient.argmax())
        if gradient[entering] <= _EXACT * abs(target[entering]):
            break
        free[entering] = True
        while True:
            trial = np.zeros(len(target))
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], target[free], rcond=None)[0]
            if trial[free].min() > 0:
                solved = trial
                break
            # Move towards the trial until the first coefficient becomes 0, and keep that one at 0.
            leaving = free & (trial <= 0)
            step = float((solved[leaving] / (solved[leaving] - trial[leaving])).min())
            solved = solved + step * (trial - solved)
            free &= solved > _EXACT * float(solved.max())
            solved[~free] = 0.0
            if not free.any():
                break
    return solved
