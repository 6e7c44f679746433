"""The option ``--peak``: the windows of time that a plan must hold."""

import re
from typing import Final

import click

from dualmap.errors import PoolError
from dualmap.objects.fields import parse_duration
from dualmap_sim.planning.windows import HOUR_S, Peak

_NAMED_S: Final = {"hour": HOUR_S, "day": 24 * HOUR_S}
_SHORTEST_S: Final = 1.0
_LONGEST_S: Final = 366 * 24 * HOUR_S
_FORM: Final = re.compile(r"p(\d{1,3}(?:\.\d{1,3})?)-(.+)")


def read_peak(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Peak | None:
    """Read a percentile and a window such as ``p99-hour`` or ``p95-10m``; None without a value. Raises BadParameter."""
    if value is None:
        return None
    found = _FORM.fullmatch(value.strip())
    window_s = None if found is None else _window_s(found[2])
    percent = 0.0 if found is None else float(found[1])
    if window_s is None or not 0 < percent <= 100:
        raise click.BadParameter(
            f"{value!r} is not accepted; give a percentile above p0 up to p100 with at most three decimals, and a "
            "window: hour, day, or from 1s to 8784h, such as p99-hour, p90-day or p95-10m"
        )
    return Peak(percentile=percent / 100, window_s=window_s)


def _window_s(text: str) -> float | None:
    if text in _NAMED_S:
        return _NAMED_S[text]
    try:
        return parse_duration(text, "", low_s=_SHORTEST_S, high_s=_LONGEST_S)
    except PoolError:
        return None
