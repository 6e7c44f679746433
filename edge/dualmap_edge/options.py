"""Command-line option types that several commands use."""

import re
from typing import Any, Final

import click

from dualmap.errors import PoolError
from dualmap.objects.fields import parse_duration

PORT: Final = click.IntRange(0, 65535)
_SIZE: Final = re.compile(r"(\d{1,15})(B|kB|KiB|MB|MiB|GB|GiB)?", re.ASCII)
_BYTES: Final = {"kB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}


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


class Size(click.ParamType[int]):
    """A size in bytes, as a number or with a unit (``512MiB``, ``1GB``); at least 1 MB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes; the error names the accepted forms."""
        match = _SIZE.fullmatch(str(value))
        size = int(match[1]) * _BYTES.get(match[2], 1) if match else 0
        if size < 10**6:
            self.fail(f"{value!r} is not accepted; give at least 1MB, such as 512MiB, 1GB or a number of bytes")
        return size
