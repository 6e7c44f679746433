"""Measures cells in worker processes, and stores each result immediately, with the commit of the measured code."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from bench.paper.cells import Cell, Figures
from bench.paper.results import Measured, Results

from dualmap_sim.parallel import run_parallel

_ROOT: Final = Path(__file__).parents[2]
_CODE: Final = ("core", "sim")
"""The code that determines the results, together with the workloads and the cells' settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    figures: Figures
    cost_s: float


def measure_cells(cells: Sequence[Cell], results: Results, processes: int, *, commit: str) -> None:
    """Measure cells and store each result immediately; progress goes to stderr. Raises WorkerError."""
    began_s, done = time.monotonic(), 0

    def keep(number: int, timed: _Timed) -> None:
        nonlocal done
        done += 1
        results.put(cells[number], Measured(figures=timed.figures, cost_s=timed.cost_s, commit=commit))
        minutes = (time.monotonic() - began_s) / 60
        click.echo(
            f"{done} of {len(cells)} cells, {minutes:.1f} min: {cells[number].section}: {cells[number].name}", err=True
        )

    if cells:
        run_parallel(_timed, cells, processes=processes, on_done=keep)


def commit_of_code() -> str:
    """Return the last commit that changed the measured code, with a + if the code has uncommitted changes."""
    try:
        last = _git("log", "-1", "--format=%h", "--", *_CODE)
        return last + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", *_CODE) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _timed(cell: Cell) -> _Timed:
    began_s = time.process_time()
    return _Timed(figures=cell.measure(), cost_s=time.process_time() - began_s)


def _git(*arguments: str) -> str:
    return subprocess.run(
        ("git", "-C", str(_ROOT), *arguments), check=True, capture_output=True, text=True
    ).stdout.strip()
