"""Common code of the commands that print results: exit statuses, output errors, and the option ``--plot``."""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

import click

from dualmap_cli.interrupts import INTERRUPTED, SIGNAL_EXIT_BASE
from dualmap_sim.parallel import WorkerError

PICTURES: Final = (".png", ".svg")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class MissingMatplotlib(Exception):
    """``--plot`` is given but matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("--plot needs the package matplotlib; run: pip install 'dualmap[demo]'")


class _Terminated(SystemExit):
    """SIGTERM ends the command."""


class NotWritten(Exception):
    """Results cannot be written; the message contains the path and the reason."""


def require_matplotlib() -> None:
    """Raise MissingMatplotlib before the simulation starts."""
    if find_spec("matplotlib") is None:
        raise MissingMatplotlib


def plot_option(*, help: str) -> Callable[[_Function], _Function]:
    """Return a decorator that adds the option ``--plot``; the command receives a path that can be written, or None."""
    return click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), callback=_picture, help=help)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise NotWritten if a write fails, except for a closed pipe, which click handles."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise NotWritten(f"{what} cannot be written: {error.strerror}") from error


@contextmanager
def writing_results() -> Iterator[None]:
    """Raise NotWritten if the output written to stdout in this context cannot be flushed."""
    with writing("the results"):
        try:
            yield
            sys.stdout.flush()
        except OSError:
            # The remaining output is dropped. Otherwise Python would fail to flush it at exit and print a second error.
            sys.stdout = io.StringIO()
            raise


@contextmanager
def command_errors(command: str) -> Iterator[None]:
    """Exit with 1 after a failure, and with 128 plus the signal's number after SIGTERM.

    Ctrl-C raises KeyboardInterrupt, which ``main`` handles. SystemExit and KeyboardInterrupt end the worker processes.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except (MissingMatplotlib, NotWritten, WorkerError) as error:
        click.echo(f"dualmap {command}: {error}", err=True)
        sys.exit(1)
    except _Terminated:
        # A progress bar has ended by now, so this is the last line.
        click.echo(f"\n{INTERRUPTED}", err=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    raise _Terminated(SIGNAL_EXIT_BASE + number)


def _picture(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    """Return the path of the chart; reject a path that is not writable before the simulation starts."""
    if value is not None and value.suffix not in PICTURES:
        raise click.BadParameter(f"{str(value)!r} is not accepted; give a file that ends in {' or '.join(PICTURES)}")
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"{str(value)!r}: the folder {str(value.absolute().parent)!r} does not exist")
    if value is not None and not os.access(value if value.exists() else value.absolute().parent, os.W_OK):
        raise click.BadParameter(f"{str(value)!r} cannot be written; give a file in a writable folder")
    return value
