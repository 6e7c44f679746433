"""Types of command line options that several commands have."""

from typing import Any, Final

import click

from dualmap.errors import PoolError
from dualmap.objects.pool_reader import parse_duration

PORT: Final = click.IntRange(0, 65535)


class Duration(click.ParamType[float]):
    """A duration as pool files spell it (``500ms``, ``25s``, ``1m``), in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds; the error names the accepted forms."""
        if isinstance(value, float):
            return value
        try:
            return parse_duration(value, "duration", high_s=3600.0)
        except PoolError as error:
            # Click names the option itself.
            self.fail(f"{value!r} is not accepted; give {error.accepted}", param, ctx)
