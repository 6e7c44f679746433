"""Checks of command-line options that click lacks, for ``engine-sim`` and the demo in ``dualmap_cli``."""

import math
from typing import Any

import click


class FiniteFloatRange(click.FloatRange):
    """A range of numbers that includes both bounds. Unlike click's own range, it rejects NaN."""

    def __init__(self, least: float, most: float) -> None:
        super().__init__(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raises click.BadParameter with the value and the range."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{number} is not in the range {self.min:g}<=x<={self.max:g}.", param, ctx)
        return number


def not_blank(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Return the option's text, as a click callback. Raises click.BadParameter if the text is blank."""
    if not value.strip():
        raise click.BadParameter(f"{value!r} is not accepted; give at least one character that is not white space.")
    return value
