"""The tables of the figures, as Markdown."""

from collections.abc import Mapping, Sequence
from math import isnan
from statistics import fmean
from typing import Final

from bench.truth.cases import REFERENCES, SAYS, Case, Knowledge
from bench.truth.measures import Figures

Cells = Mapping[tuple[Case, Knowledge], Sequence[Figures]]
"""The figures of a workload's samples, by case and knowledge."""

_HEAD: Final = (
    "| knowledge | hit rate % | stale % | excess % | off % | off fine % | TTFT p50 s | p90 s | mean s | "
    "to round robin % | within SLO % | failed |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def tables(cells: Cells) -> str:
    """Return a table for each case, with the mean of the samples and the lowest and the highest value."""
    return "\n\n".join(
        f"### {case}: {SAYS[case]}\n\n{_table(cells, case)}"
        for case in Case
        if any(measured is case for measured, _ in cells)
    )


def name_of(case: Case, knowledge: Knowledge) -> str:
    """Return what a row is called."""
    return REFERENCES[case] if knowledge is Knowledge.REFERENCE else str(knowledge)


def _table(cells: Cells, case: Case) -> str:
    baseline = cells.get((case, Knowledge.NONE), ())
    rows = [
        _row(name_of(case, knowledge), cells[case, knowledge], baseline)
        for knowledge in Knowledge
        if (case, knowledge) in cells
    ]
    return "\n".join([_HEAD, *rows])


def _row(name: str, samples: Sequence[Figures], baseline: Sequence[Figures]) -> str:
    changes = [100 * (each.ttft_mean_s / base.ttft_mean_s - 1) for each, base in zip(samples, baseline, strict=False)]
    values = (
        _spread([100 * each.hit_rate for each in samples]),
        _spread([100 * each.stale_rate for each in samples]),
        _spread([100 * each.excess for each in samples]),
        _spread([100 * each.off for each in samples]),
        _spread([100 * each.off_fine for each in samples]),
        _spread([each.ttft_p50_s for each in samples], digits=2),
        _spread([each.ttft_p90_s for each in samples], digits=2),
        _spread([each.ttft_mean_s for each in samples], digits=2),
        "-" if samples is baseline else _spread(changes, digits=0, sign="+"),
        _spread([100 * each.within_slo for each in samples]),
        str(sum(each.failed for each in samples)),
    )
    return f"| {name} | {' | '.join(values)} |"


def _spread(values: Sequence[float], *, digits: int = 1, sign: str = "") -> str:
    known = [value for value in values if not isnan(value)]
    if not known:
        return "-"
    low, mean, high = (f"{value:{sign}.{digits}f}" for value in (min(known), fmean(known), max(known)))
    return mean if low == high else f"{mean} ({low} to {high})"
