"""What surrounds both commands: how they end when something stops them, and what they need installed."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

import click

from dualmap_cli.interrupts import INTERRUPTED, SIGNAL_EXIT_BASE
from dualmap_sim.goodput import NeverOverloaded
from dualmap_sim.parallel import WorkerError


class MissingMatplotlib(Exception):
    """A chart is asked for and the library that draws it is not installed."""

    def __init__(self) -> None:
        super().__init__("--plot needs the package matplotlib; run: pip install 'dualmap[demo]'")


def require_matplotlib() -> None:
    """Raise MissingMatplotlib now rather than after minutes of simulating."""
    if find_spec("matplotlib") is None:
        raise MissingMatplotlib


@contextmanager
def command_errors(command: str) -> Iterator[None]:
    """End the command as CONTRACT says: 1 where it failed, 128 and the signal's number where SIGTERM ended it.

    Ctrl-C is KeyboardInterrupt, which ``main`` tells. Either way what is raised here ends the runs' processes.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except (NeverOverloaded, MissingMatplotlib, WorkerError) as error:
        click.echo(f"dualmap {command}: {error}", err=True)
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    click.echo(f"\n{INTERRUPTED}", err=True)
    sys.exit(SIGNAL_EXIT_BASE + number)
