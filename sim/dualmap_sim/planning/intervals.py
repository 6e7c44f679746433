"""Shares with intervals: the mean of a run's values, and how much it varies between resamples of the run's parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import Final

_PARTS: Final = 20
"""A run is resampled in this many parts, because neighbouring requests share their fate."""
_RESAMPLES: Final = 400
_INTERVAL: Final = (0.05, 0.95)
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share or a difference of shares, with the interval of the engine's fit and of the workload's parts."""

    value: float
    low: float
    high: float


def mean(values: Sequence[float]) -> float:
    """Return the mean of one or more values."""
    return sum(values) / len(values)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval of the mean of values in order of arrival, by resampling the parts of the run."""
    length = max(1, ceil(len(values) / _PARTS))
    parts = [values[start : start + length] for start in range(0, len(values), length)]
    draws = Random(_SEED)
    means = []
    for _ in range(_RESAMPLES):
        drawn = draws.choices(parts, k=len(parts))
        means.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    means.sort()
    low, high = (means[int(share * (_RESAMPLES - 1))] for share in _INTERVAL)
    return low, high


def widened(values: Sequence[float], ends: Sequence[float], *, least: float, most: float) -> Share:
    """Return the mean of values, with an interval of their parts and of ``ends``, within ``least`` and ``most``.

    ``ends`` are the means with the slowest and the fastest engine.
    """
    value = mean(values)
    low, high = interval(values)
    return Share(
        value=value,
        low=max(least, min(value, *ends) - (value - low)),
        high=min(most, max(value, *ends) + (high - value)),
    )
