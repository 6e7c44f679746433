"""Writes an output file completely or not at all, and never over a file that is read."""

import gzip
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, cast

import click

_MODE: Final = 0o666
_COMPRESSED: Final = ".gz"


def check_output(output: Path, inputs: Iterable[Path]) -> None:
    """Raise a usage error if ``output`` is an input or in a folder that is read, or cannot be a regular file."""
    folder = output.absolute().parent
    if not folder.is_dir():
        raise click.BadParameter(f"{str(output)!r}: the folder {str(folder)!r} does not exist", param_hint="-o")
    if output.exists() and not output.is_file():
        raise click.BadParameter(f"{str(output)!r} is not a regular file; give another name", param_hint="-o")
    # A link leads to the file that would be replaced.
    folder = output.resolve().parent
    for path in inputs:
        if _is_same(path, output) or _is_same(path, folder):
            raise click.BadParameter(f"{str(output)!r} is in what is read; give a file elsewhere", param_hint="-o")


def write_lines(output: Path, lines: Iterable[str]) -> int:
    """Write lines, compressed if the file's name ends in ``.gz``; return how many. Raises OSError.

    The lines are written to a temporary file in the same folder, which then takes the place of ``output``.
    """
    count = 0
    handle, name = tempfile.mkstemp(dir=output.absolute().parent, prefix=f".{output.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as raw:
            file = cast("BinaryIO", gzip.GzipFile("", "wb", fileobj=raw)) if output.suffix == _COMPRESSED else raw
            for line in lines:
                file.write(line.encode())
                count += 1
            if file is not raw:
                file.close()
            os.fchmod(raw.fileno(), _MODE & ~_umask())
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(name, output.resolve())
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return count


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False
