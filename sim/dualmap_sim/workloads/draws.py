"""Stratified random numbers, and distributions by their quantiles. A few hundred draws have nearly the exact mean.

Prompt lengths are very unequal. The mean of independent draws would differ by some per cent even over thousands of
requests. Here every round of draws takes one value from each stratum of a distribution, in random order. The generators
use this module.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import exp
from random import Random
from statistics import NormalDist
from typing import Final, Protocol

_STANDARD_NORMAL: Final = NormalDist()
_OUTERMOST: Final = 1e-4
"""Share of a log-normal distribution that is cut off at each end."""


class Distribution(Protocol):
    """A distribution, defined by its quantile function."""

    def at(self, level: float) -> float:
        """Return the quantile of ``level`` (0 to 1, exclusive)."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Values at increasing ``levels`` from 0 to 1, with linear interpolation."""

    levels: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, level: float) -> float:
        """Return the quantile of ``level`` (0 to 1, exclusive)."""
        right = bisect_right(self.levels, level)
        low, high = self.levels[right - 1], self.levels[right]
        below, above = self.values[right - 1], self.values[right]
        return below + (above - below) * (level - low) / (high - low)

    def scaled(self, factor: float) -> "Quantiles":
        """Return the distribution with all values multiplied by ``factor``."""
        return Quantiles(self.levels, tuple(value * factor for value in self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A log-normal distribution without its tails, so that draws are bounded."""

    median: float
    sigma: float

    def at(self, level: float) -> float:
        """Return the quantile of ``level`` (0 to 1)."""
        inside = min(max(level, _OUTERMOST), 1 - _OUTERMOST)
        return self.median * exp(self.sigma * _STANDARD_NORMAL.inv_cdf(inside))


class Deck:
    """Uniform random numbers in [0, 1). Each round of ``strata`` consecutive draws has one number in each stratum."""

    def __init__(self, rng: Random, *, strata: int) -> None:
        self._rng = rng
        self._strata = strata
        self._left: list[int] = []

    def draw(self) -> float:
        """Return the next number."""
        if not self._left:
            self._left = list(range(self._strata))
            self._rng.shuffle(self._left)
        return (self._left.pop() + self._rng.random()) / self._strata

    def tokens(self, distribution: Distribution) -> int:
        """Draw a length from a distribution, as a whole number of tokens, at least 1."""
        return max(1, round(distribution.at(self.draw())))
