"""The command ``python -m bench truth``: its options, progress on stderr, and tables on stdout."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
from bench.truth.cases import BLOCK_TOKENS, RATES, Case, Knowledge, Run, kinds
from bench.truth.goodput import ATTAINMENT, goodput, goodput_table
from bench.truth.measures import Figures, measure
from bench.truth.tables import Cells, tables
from bench.virtual import ENGINES, REQUESTS, SLO_TTFT_S, run_all, workloads

_SAMPLES: Final = 3
_QUICK_REQUESTS: Final = 400


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=click.Choice([str(case) for case in Case]),
    help="Case to measure; repeat for several. Default: all.",
)
@click.option("--samples", default=_SAMPLES, type=click.IntRange(1, 5), help="Number of runs of each cell.")
@click.option("--quick", is_flag=True, help=f"Measure one short run of {_QUICK_REQUESTS} requests of each cell.")
@click.option(
    "--goodput",
    "with_goodput",
    is_flag=True,
    help="Search instead the highest rate that meets the SLO, with one sample of each cell. Takes ten minutes.",
)
@click.option(
    "--processes",
    is_flag=True,
    help="Measure small caches with engines, router and Envoy as processes and KV events over sockets, in real time.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write every figure to this JSON file."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the figures into this PNG file.")
def truth(
    *,
    cases: tuple[str, ...],
    samples: int,
    quick: bool,
    with_goodput: bool,
    processes: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Compare what routers can know about their engines' caches, and what this knowledge brings.

    The kinds of knowledge are the router's own records, records that the engines' usage corrects, and the engines' KV
    events. Round robin is the baseline. A full benchmark simulates 8 engines in virtual time. It takes two minutes on
    two idle cores, and eight minutes on busy ones. With --processes, the times are real, and only one case is measured.

    \b
    Example:
      python -m bench truth
      python -m bench truth --case bypass --case small --json truth.json --plot truth.png
      python -m bench truth --goodput
      python -m bench truth --processes
    """
    if processes:
        # Imported here because the HTTP client takes a second to load.
        from bench.truth.processes import measure_processes

        measure_processes(quick=quick, json_file=json_file)
        return
    runs = [
        Run(case=case, knowledge=knowledge, workload=workload, sample=sample, requests=requests, rate=RATES[workload])
        for requests in (_QUICK_REQUESTS if quick else REQUESTS,)
        for workload in workloads()
        for sample in range(1 if quick or with_goodput else samples)
        for case in Case
        if not cases or str(case) in cases
        for knowledge in kinds(case)
    ]
    if with_goodput:
        rates = list(zip(runs, run_all(goodput, runs), strict=True))
        click.echo(f"Highest rate with {ATTAINMENT:.0%} of the requests within the SLO of {SLO_TTFT_S:g} s.\n")
        click.echo(goodput_table(rates))
        if json_file is not None:
            json_file.write_text(json.dumps([{**asdict(run), "goodput": rate} for run, rate in rates], indent=1))
        return
    measured = list(zip(runs, run_all(measure, runs), strict=True))
    found = _by_workload(measured)
    click.echo(f"{ENGINES} engines with blocks of {BLOCK_TOKENS} tokens. Mean of the samples (lowest to highest).")
    for workload, cells in found.items():
        click.echo(f"\n## {workload} at {RATES[workload]:g}/s\n\n{tables(cells)}")
    if json_file is not None:
        json_file.write_text(json.dumps([{**asdict(run), **asdict(each)} for run, each in measured], indent=1))
    if plot is not None:
        # Imported here because the plotting library takes a second to load.
        from bench.truth.plot import draw

        draw(plot, found)


def _by_workload(measured: Sequence[tuple[Run, Figures]]) -> Mapping[str, Cells]:
    found: dict[str, dict[tuple[Case, Knowledge], list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for run, each in measured:
        found[run.workload][run.case, run.knowledge].append(each)
    return {workload: dict(cells) for workload, cells in found.items()}
