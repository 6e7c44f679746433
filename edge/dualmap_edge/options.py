"""Command-line option types that several commands use."""

from typing import Any, Final

import click

from dualmap.errors import PoolError
from dualmap.objects.pool_reader import parse_duration

PORT: Final = click.IntRange(0, 65535)


class Duration(click.ParamType[float]):
    """A duration in the format of pool files (``500ms``, ``25s``, ``1m``), converted to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the duration in seconds; the error message contains the accepted formats."""
        if isinstance(value, float):
            return value
        try:
            return parse_duration(value, "duration", high_s=3600.0)
        except PoolError as error:
            # Click adds the option's name to the message.
            self.fail(f"{value!r} is not accepted; give {error.accepted}", param, ctx)
