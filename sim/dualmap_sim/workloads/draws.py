"""Stratified random numbers, and distributions by their quantiles: a few hundred draws already have the requested mean.

Lengths of prompts are so unequal that plain draws miss their mean by some per cent even over thousands of requests.
Here every round of draws takes each part of a distribution once, in random order. Neighbours: the generators.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import exp
from random import Random
from statistics import NormalDist
from typing import Final, Protocol

_STANDARD_NORMAL: Final = NormalDist()
_OUTERMOST: Final = 1e-4
"""Share of a log-normal distribution that is cut off at either end."""


class Distribution(Protocol):
    """A distribution by its quantile function."""

    def at(self, level: float) -> float:
        """Return the value below which a share ``level`` (0 to 1, exclusive) of the distribution lies."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Values at increasing ``levels`` from 0 to 1, straight lines between them."""

    levels: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, level: float) -> float:
        """Return the value below which a share ``level`` (0 to 1, exclusive) of the distribution lies."""
        right = bisect_right(self.levels, level)
        low, high = self.levels[right - 1], self.levels[right]
        below, above = self.values[right - 1], self.values[right]
        return below + (above - below) * (level - low) / (high - low)

    def scaled(self, factor: float) -> "Quantiles":
        """Return the distribution of ``factor`` times the value."""
        return Quantiles(self.levels, tuple(value * factor for value in self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A log-normal distribution without its tails, so that draws are bounded."""

    median: float
    sigma: float

    def at(self, level: float) -> float:
        """Return the value below which a share ``level`` (0 to 1) of the distribution lies."""
        inside = min(max(level, _OUTERMOST), 1 - _OUTERMOST)
        return self.median * exp(self.sigma * _STANDARD_NORMAL.inv_cdf(inside))


class Deck:
    """Numbers uniform in [0, 1): of every ``strata`` draws in a row from the first on, one falls into each stratum."""

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
        """Draw a length from a distribution: whole tokens, at least one."""
        return max(1, round(distribution.at(self.draw())))
