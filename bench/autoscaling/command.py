"""The command ``python -m bench autoscaling``: runs the missing measurements, then writes the page and the chart."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from bench.autoscaling.measures import SECTION, cells
from bench.autoscaling.settings import Extent
from bench.autoscaling.shown import draw, page
from bench.paper.cells import Cell
from bench.paper.measuring import commit_of_code, measure_cells
from bench.paper.results import Results, ResultsError
from bench.paper.settings import TRACE

from dualmap_sim.parallel import WorkerError

_ROOT: Final = Path(__file__).parents[2]
_RECORDED: Final = _ROOT / "bench" / "results"
_QUICK: Final = _ROOT / "build" / "autoscaling-quick"


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--stale", is_flag=True, help="Repeat measurements that were made by another version of the code.")
@click.option(
    "--draw",
    "only_draw",
    is_flag=True,
    help="Do not measure. Write the results page and the chart from the stored results.",
)
@click.option("--quick", is_flag=True, help="Run one load shape once, as a smoke test. The results go to build/.")
@click.option("--processes", default=2, type=click.IntRange(1, 64), help="Number of measurements to run in parallel.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    default=TRACE,
    help="File of the Conversation trace. If the file is missing, a generated Tool&Agent workload replaces the trace.",
)
def autoscaling(*, stale: bool, only_draw: bool, quick: bool, processes: int, trace: Path) -> None:
    """Measure autoscaling in virtual time, and print the tables.

    A full benchmark takes about 15 minutes on two cores. The results of each run are stored as JSON. An interrupted
    benchmark continues with the runs that have no stored result.

    \b
    Example:
      python -m bench autoscaling
      python -m bench autoscaling --stale      # after a change of the autoscaling rule or the router
    """
    extent = Extent(quick=quick, trace=trace)
    directory = _QUICK if quick else _RECORDED
    directory.mkdir(parents=True, exist_ok=True)
    results = Results(directory)
    try:
        every = cells(extent)
        if not only_draw:
            commit = commit_of_code()
            kept = {cell.name: results.get(cell) for cell in every}
            lacking = [c for c in every if (was := kept[c.name]) is None or (stale and was.commit != commit)]
            measure_cells(lacking, results, processes, commit=commit)
        text = _headed(results, extent, every)
        draw(results, extent, directory / f"{SECTION}.png")
    except (ResultsError, WorkerError) as error:
        click.echo(f"autoscaling: {error}", err=True)
        sys.exit(1)
    (directory / f"{SECTION}.md").write_text(text)
    click.echo(text)


def _headed(results: Results, extent: Extent, every: Sequence[Cell]) -> str:
    kept = [measured for cell in every if (measured := results.get(cell)) is not None]
    commits = ", ".join(sorted({measured.commit for measured in kept})) or "none"
    minutes = sum(measured.cost_s for measured in kept) / 60
    return (
        f"# Autoscaling, measured\n\n`python -m bench autoscaling{' --quick' if extent.quick else ''}`: {len(kept)} "
        f"of {len(every)} runs, {minutes:.1f} minutes of processor time; code as of {commits} (a + says: with "
        f"changes).\n\n"
        f"{page(results, extent)}\n![how the fleets followed](autoscaling.png)\n"
    )
