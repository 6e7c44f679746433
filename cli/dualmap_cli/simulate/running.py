"""Common code of both commands: exit statuses, output errors and the check for matplotlib."""

import errno
import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

import click

from dualmap_cli.interrupts import INTERRUPTED, SIGNAL_EXIT_BASE
from dualmap_sim.parallel import WorkerError


class MissingMatplotlib(Exception):
    """``--plot`` is given but matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("--plot needs the package matplotlib; run: pip install 'dualmap[demo]'")


class NotWritten(Exception):
    """Results cannot be written; the message contains the path and the reason."""


def require_matplotlib() -> None:
    """Raise MissingMatplotlib before the simulation starts."""
    if find_spec("matplotlib") is None:
        raise MissingMatplotlib


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
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    click.echo(f"\n{INTERRUPTED}", err=True)
    sys.exit(SIGNAL_EXIT_BASE + number)
