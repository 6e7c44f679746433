"""Figures of a recording beside those of its simulation, and how far apart they may be."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap_cli.simulate.values import window_text
from dualmap_sim.planning.windows import WINDOW_REQUESTS, windows_of

SHARES_APART: Final = 0.05
"""The largest difference of two shares with which a simulation is believed."""
_TIMES_APART: Final = 0.25
"""The largest relative difference of two times."""
_TIMES_APART_S: Final = 0.05
"""The largest difference of two times that are too short for a relative one."""
_WINDOW_APART: Final = 0.1
"""The largest difference of two shares of a window."""
_ERRORS_APART: Final = 2.0
"""... and the standard errors by which chance alone may separate the shares of a window with few requests."""
_WINDOWS_APART: Final = 0.1
"""The largest share of windows that differ."""
WINDOWS_MOST: Final = 24
"""The most windows of a recording."""
_REQUESTS_LEAST: Final = 2 * WINDOW_REQUESTS
"""The least mean number of requests in a window."""
_DAY_S: Final = 86_400.0
_LENGTHS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200)
"""The lengths of windows that a recording of less than some days may get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the recording and of its simulation; NaN without data."""

    measured: float
    simulated: float

    @property
    def has_both(self) -> bool:
        """Whether the figure can be compared."""
        return not (math.isnan(self.measured) or math.isnan(self.simulated))

    @property
    def apart(self) -> float:
        """The difference of both."""
        return abs(self.simulated - self.measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowShare:
    """The share within the SLO of the requests that arrived in a window, ``start_s`` after the first request."""

    start_s: float
    requests: int
    slo_attainment: Figure

    @property
    def differs(self) -> bool:
        """Whether the shares are further apart than 10 percentage points, and than chance explains."""
        both = self.slo_attainment
        mean = (both.measured + both.simulated) / 2
        chance = _ERRORS_APART * math.sqrt(2 * mean * (1 - mean) / self.requests)
        return both.apart > max(_WINDOW_APART, chance)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowShares:
    """The shares in windows of ``window_s`` each, without those of too few requests."""

    window_s: float
    shares: tuple[WindowShare, ...]

    @property
    def differing(self) -> tuple[WindowShare, ...]:
        """The windows whose shares differ."""
        return tuple(each for each in self.shares if each.differs)

    def reasons(self) -> Iterator[str]:
        """Yield why the windows make the simulation unbelievable: too many of them differ."""
        differing = self.differing
        if len(differing) <= int(_WINDOWS_APART * len(self.shares)):
            return
        worst = max(differing, key=lambda each: each.slo_attainment.apart)
        both = worst.slo_attainment
        yield (
            f"the share within the SLO differs in {len(differing)} of {len(self.shares)} windows "
            f"({window_text(self.window_s)}), most from {worst.start_s:,.0f} s on: {both.simulated:.1%} simulated and "
            f"{both.measured:.1%} measured"
        )


def window_shares(arrivals_s: Sequence[float], measured: Sequence[bool], simulated: Sequence[bool]) -> WindowShares:
    """Return the shares within the SLO by windows of time, from whether each request was within it.

    ``arrivals_s`` ascend, in seconds after the first request. There are at most 24 windows, of 40 requests on average,
    and none if one window would contain everything.
    """
    most = min(WINDOWS_MOST, len(arrivals_s) // _REQUESTS_LEAST)
    lasts_s = arrivals_s[-1] - arrivals_s[0] if arrivals_s else 0.0
    if most < 2 or not lasts_s:
        return WindowShares(window_s=lasts_s, shares=())
    window_s = _length_s(lasts_s / most)
    return WindowShares(
        window_s=window_s,
        shares=tuple(
            WindowShare(
                start_s=window.start_s,
                requests=window.requests,
                slo_attainment=Figure(measured=share(measured[window.part]), simulated=share(simulated[window.part])),
            )
            for window in windows_of(arrivals_s, window_s)
        ),
    )


def time_reasons(name: str, figure: Figure) -> Iterator[str]:
    """Yield why a time in seconds makes the simulation unbelievable."""
    if figure.has_both and figure.apart > max(_TIMES_APART_S, _TIMES_APART * figure.measured):
        yield f"the {name} is {figure.simulated:.2f} s simulated and {figure.measured:.2f} s measured"


def share_reasons(name: str, figure: Figure) -> Iterator[str]:
    """Yield why a share makes the simulation unbelievable."""
    if figure.has_both and figure.apart > SHARES_APART:
        yield f"the {name} is {figure.simulated:.1%} simulated and {figure.measured:.1%} measured"


def _length_s(least_s: float) -> float:
    """Return the shortest usual length of a window that is not below ``least_s``."""
    place = bisect_left(_LENGTHS_S, least_s)
    return float(_LENGTHS_S[place]) if place < len(_LENGTHS_S) else math.ceil(least_s / _DAY_S) * _DAY_S


def ratio(part: int, whole: int) -> float:
    """Return a part of a whole; NaN without a whole."""
    return part / whole if whole else math.nan


def share(within: Sequence[bool]) -> float:
    """Return the share of true values; NaN without values."""
    return ratio(sum(within), len(within))
