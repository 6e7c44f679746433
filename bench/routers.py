"""Measures the goodput of one, two, four and eight routers that share the requests of a pool, in virtual time.

The pool's owner decides for all routers, or each router decides by itself with the other routers' last updates.
``bench.replicas`` instead compares hit rates and attainment at fixed rates, for routers that decide by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click
from bench.virtual import CONVERSATION

from dualmap_sim.experiment import Experiment
from dualmap_sim.goodput import Goodput, goodput
from dualmap_sim.parallel import run_parallel
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.catalog import Workload

MODELS: Final = ("7b", "14b")
GENERATED: Final = ("tool_agent", "default", "poisson_chats")
REQUESTS: Final = 4000
WARMUP: Final = 500
QUICK_REQUESTS: Final = 1000
FEEDBACK_DELAY_S: Final = 0.01
VIEW_DELAY_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A number of routers, and whether the pool's owner decides for them."""

    routers: int
    owner_decides: bool = True

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.routers}" if self.owner_decides else f"{self.routers}, each by itself"


ONE: Final = Variant(routers=1)
SEVERAL: Final = (
    Variant(routers=2),
    Variant(routers=4),
    Variant(routers=8),
    Variant(routers=4, owner_decides=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One search of the goodput, beginning at ``guess``."""

    workload: str
    model: str
    variant: Variant
    requests: int
    trace: Path
    guess: float | None = None


def search(cell: Cell) -> Goodput:
    """Return the goodput of a cell."""
    is_trace = cell.workload == "conversation"
    workload = Workload(
        name="default" if is_trace else cell.workload, trace=cell.trace if is_trace else None, requests=cell.requests
    )
    experiment = Experiment(
        requests_per_s=1.0,
        workload=workload,
        engine=PRESETS[cell.model],
        warmup=min(WARMUP, cell.requests // 4),
        routers=cell.variant.routers,
        owner_decides=cell.variant.owner_decides,
        view_delay_s=VIEW_DELAY_S,
        feedback_delay_s=FEEDBACK_DELAY_S,
        sessions=False,
        sample_s=None,
    )
    return goodput(experiment, guess=cell.guess)


@click.command(context_settings={"show_default": True})
@click.option("--quick", is_flag=True, help="Measure two workloads with short runs and 7b only, in some minutes.")
@click.option("--processes", type=click.IntRange(1, 64), default=2, help="Number of searches to run in parallel.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    default=CONVERSATION,
    show_default="the Conversation trace",
    help="File of the Conversation trace. If the file is missing, its rows are skipped.",
)
def main(quick: bool, processes: int, trace: Path) -> None:
    """Search the goodput of one to eight routers, and print it relative to one router.

    The engines are 8 of the engine model, and the SLO is 5 s. Each router gets an equal share of the requests at
    random. Messages between routers take 1 ms, first tokens and completions reach a router after 10 ms, and updates
    of other routers are 100 ms old on average.
    """
    found = ("conversation",) if trace.exists() else ()
    if not found:
        click.echo(f"conversation is skipped: there is no {trace}", err=True)
    workloads = (*found, *(GENERATED[:1] if quick else GENERATED))
    alone = [
        Cell(
            workload=workload,
            model=model,
            variant=ONE,
            requests=QUICK_REQUESTS if quick else REQUESTS,
            trace=trace,
        )
        for workload in workloads
        for model in (MODELS[:1] if quick else MODELS)
    ]
    ones = _measure(alone, processes)
    cells = [
        replace(cell, variant=variant, guess=one.requests_per_s or None)
        for cell, one in zip(alone, ones, strict=True)
        for variant in SEVERAL
    ]
    others = _measure(cells, processes)
    click.echo(table(alone, ones, others))


def table(alone: Sequence[Cell], ones: Sequence[Goodput], others: Sequence[Goodput]) -> str:
    """Return the table: a row for each workload and model, with the goodput of several routers relative to one."""
    lines = [
        f"| workload | engine | 1 router, requests/s | {' | '.join(each.name for each in SEVERAL)} |",
        f"|---|---|---|{'---|' * len(SEVERAL)}",
    ]
    for number, (cell, one) in enumerate(zip(alone, ones, strict=True)):
        row = others[number * len(SEVERAL) : (number + 1) * len(SEVERAL)]
        shares = " | ".join(_share(each.requests_per_s, one.requests_per_s) for each in row)
        lines.append(f"| {cell.workload} | {cell.model} | {one.requests_per_s:.2f} | {shares} |")
    return "\n".join(lines)


def _share(rate: float, of: float) -> str:
    return f"{rate / of:.1%}" if of else "-"


def _measure(cells: Sequence[Cell], processes: int) -> list[Goodput]:
    def done(number: int, found: Goodput) -> None:
        cell = cells[number]
        name = f"{cell.workload} {cell.model}, routers: {cell.variant.name}"
        click.echo(f"{name}: {found.requests_per_s:.2f} requests/s", err=True)

    return run_parallel(search, cells, processes=processes, on_done=done)
