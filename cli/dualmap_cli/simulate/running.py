"""What surrounds both commands: how they end when something stops them, and what they need installed."""

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
    """A chart is asked for and the library that draws it is not installed."""

    def __init__(self) -> None:
        super().__init__("--plot needs the package matplotlib; run: pip install 'dualmap[demo]'")


class NotWritten(Exception):
    """Results cannot be put where they were wanted; ``str()`` says where, and why."""


def require_matplotlib() -> None:
    """Raise MissingMatplotlib now rather than after minutes of simulating."""
    if find_spec("matplotlib") is None:
        raise MissingMatplotlib


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise NotWritten for what cannot be written. A pipe that nobody reads any more is left to click."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise NotWritten(f"{what} cannot be written: {error.strerror}") from error


@contextmanager
def writing_results() -> Iterator[None]:
    """Raise NotWritten unless all that is written to stdout in this context gets there."""
    with writing("the results"):
        try:
            yield
            sys.stdout.flush()
        except OSError:
            # The rest stays in the buffer, and Python would try to write it, fail and tell once more on its way out.
            sys.stdout = io.StringIO()
            raise


@contextmanager
def command_errors(command: str) -> Iterator[None]:
    """End the command as CONTRACT says: 1 where it failed, 128 and the signal's number where SIGTERM ended it.

    Ctrl-C is KeyboardInterrupt, which ``main`` tells. Either way what is raised here ends the runs' processes.
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
