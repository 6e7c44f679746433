"""Parsers of option values as click callbacks: lists, durations and pairs.

Each callback raises click.BadParameter with the option, the value and the accepted values.
"""

import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from dualmap.errors import PoolError
from dualmap.objects.fields import parse_duration
from dualmap.policies.registry import POLICIES
from dualmap_sim.oracles import ORACLES

RATE_MOST: Final = 100_000.0
"""Requests per second, more than any pool receives."""
FACTOR_LEAST: Final = 0.001
FACTOR_MOST: Final = 1000.0
REQUESTS_MOST: Final = 10_000_000
"""Maximum length of a workload; a longer run would take too long."""
_HOUR_S: Final = 3600.0

N = TypeVar("N", int, float)
Callback = Callable[[click.Context, click.Parameter, Any], Any]


def duration(low_s: float, high_s: float) -> Callback:
    """Return a callback that reads ``500ms``, ``5s``, ``10m`` as seconds, as in pool files; None without a value."""

    def read(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        try:
            return parse_duration(value, "", low_s=low_s, high_s=high_s)
        except PoolError as error:
            raise click.BadParameter(f"{value!r} is not accepted; give {error.accepted}") from error

    return read


def policies(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Read names of policies and oracles, separated by commas; repeated names count once. None without a value."""
    if value is None:
        return None
    names = _split(value)
    for name in names:
        if name not in POLICIES and name not in ORACLES:
            raise click.BadParameter(
                f"{name!r} is not a policy; give some of {', '.join(sorted(POLICIES))}, "
                f"or of the bounds {', '.join(sorted(ORACLES))}"
            )
    return names


def factor(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """Read a factor such as ``2x`` or ``0.5``."""
    return _number(float, value.strip().removesuffix("x"), FACTOR_LEAST, FACTOR_MOST)


def numbers(kind: type[N], low: N, high: N) -> Callback:
    """Return a callback that reads comma-separated numbers from ``low`` to ``high``; repeated numbers count once."""

    def read(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[N, ...] | None:
        if value is None:
            return None
        return tuple(dict.fromkeys(_number(kind, each, low, high) for each in _split(value)))

    return read


def named_numbers(
    _context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    """Read the values of a repeatable option ``NAME=NUMBER``; the caller checks names and numbers."""
    return tuple(_named_number(each) for each in value)


def count_text(count: int, noun: str) -> str:
    """Return a number of things, such as ``1 instance`` or ``1,000 instances``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def window_text(window_s: float) -> str:
    """Return the length of a window of time for people, in words that ``--peak`` accepts for an hour and a day."""
    if window_s in (_HOUR_S, 24 * _HOUR_S):
        return "hour" if window_s == _HOUR_S else "day"
    for unit_s, unit in ((24 * _HOUR_S, "days"), (_HOUR_S, "h"), (60.0, "min")):
        if window_s % unit_s == 0:
            return f"{window_s / unit_s:g} {unit}"
    return f"{window_s:g} s"


def _named_number(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not accepted; give NAME=NUMBER") from None


def _number(kind: type[N], text: str, low: N, high: N) -> N:
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or math.isnan(number) or not low <= number <= high:
        what = "whole numbers" if kind is int else "numbers"
        raise click.BadParameter(f"{text!r} is not accepted; give {what} from {low:,} to {high:,}")
    return number


def _split(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.split(",")))
