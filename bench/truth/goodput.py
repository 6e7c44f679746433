"""Finds the highest request rate at which each kind of knowledge meets the SLO."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import log
from statistics import fmean
from typing import Final

from bench.truth.cases import Case, Knowledge, Run
from bench.truth.measures import measure
from bench.truth.tables import name_of

from dualmap_sim.goodput import highest_step

ATTAINMENT: Final = 0.9
"""The share of the requests that must get the first token within the SLO."""
_STEP: Final = 1.02
_RANGE: Final = (0.25, 6.0)
"""The lowest and the highest rate of the search, as parts of the run's own rate."""


def goodput(run: Run) -> float:
    """Return the highest rate, to 2 %, at which ``ATTAINMENT`` of the requests meet the SLO.

    The search is a bisection on a grid of rates. All kinds of knowledge use the same grid. Attainment is not
    monotonic in the rate, so several rates may be such limits.
    """

    def attains(step: int) -> bool:
        return measure(replace(run, rate=run.rate * _STEP**step)).within_slo >= ATTAINMENT

    lowest, highest = (round(log(part) / log(_STEP)) for part in _RANGE)
    return float(run.rate * _STEP ** highest_step(attains, lowest, highest))


def goodput_table(measured: Sequence[tuple[Run, float]]) -> str:
    """Return a table with a row for each case and kind of knowledge, and a column for each workload."""
    rates: dict[tuple[Case, Knowledge], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, rate in measured:
        rates[run.case, run.knowledge][run.workload].append(rate)
    workloads = sorted({run.workload for run, _ in measured})
    lines = [
        f"| case | knowledge | {' | '.join(f'{workload}, requests/s' for workload in workloads)} |",
        f"|---|---|{'---:|' * len(workloads)}",
    ]
    for (case, knowledge), found in rates.items():
        values = " | ".join(f"{fmean(found[workload]):.2f}" for workload in workloads)
        lines.append(f"| {case} | {name_of(case, knowledge)} | {values} |")
    return "\n".join(lines)
