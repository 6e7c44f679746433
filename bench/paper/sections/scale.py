"""Goodput of 8 to 256 instances (paper appendix A.3.1, Fig. 13a): Tool&Agent on 7b, requests in proportion.

Beyond 32 instances, where the paper ends, fewer policies, for the time it takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell
from bench.paper.charts import draw_lines, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.measures import goodput_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import BASELINES, OURS, TOOL_AGENT, Extent
from bench.paper.tables import change, number, table

from dualmap_sim.workloads.catalog import Workload

_PAPERS: Final = ("limit", *BASELINES, *OURS)
_SIZES: Final[Mapping[int, tuple[str, ...]]] = {
    8: _PAPERS,
    16: _PAPERS,
    32: _PAPERS,
    64: ("limit", "min_ttft", "dualmap"),
    128: ("limit", "dualmap"),
    256: ("limit", "dualmap"),
}
_REQUESTS: Final = 250
"""For each instance; a quarter of the paper's."""
_WARMUP: Final = 40
_TOLERANCE: Final = 0.02


def _cell(extent: Extent, size: int, policy: str) -> Cell:
    experiment = replace(
        extent.experiment(TOOL_AGENT, "7b", 0, policy),
        workload=Workload(name=TOOL_AGENT, requests=size * _REQUESTS),
        instances=size,
        warmup=size * _WARMUP,
    )
    return Cell(
        section="scale",
        name=f"{size} instances {policy}",
        policy=policy,
        measure=partial(goodput_figures, experiment, tolerance=_TOLERANCE),
    )


def _sizes(extent: Extent) -> dict[int, tuple[str, ...]]:
    return {size: policies for size, policies in _SIZES.items() if not extent.quick or size <= 16}


def _cells(extent: Extent) -> Sequence[Cell]:
    return [_cell(extent, size, policy) for size, policies in _sizes(extent).items() for policy in policies]


def _page(results: Results, extent: Extent, plots: Path) -> str:
    sizes = _sizes(extent)
    found = {
        (size, policy): figures["goodput_qps"]
        for size, policies in sizes.items()
        for policy in policies
        if (figures := results.figures(_cell(extent, size, policy))) is not None
    }
    shown = (*OURS, *BASELINES, "limit")
    rows = [[policy, *(_show(found, size, policy) for size in sizes)] for policy in shown]
    text = table(("goodput/s (for each instance)", *(f"{size}" for size in sizes)), rows)
    counted = ", ".join(f"{size}: {size * _REQUESTS:,}" for size in sizes)
    figure, axes = grid(1, 2)
    whole = {policy: [(size, found.get((size, policy))) for size in sizes] for policy in shown}
    each = {policy: [(size, rate and rate / size) for size, rate in whole[policy]] for policy in shown}
    for place, lines, title in ((axes[0][0], whole, "goodput"), (axes[0][1], each, "goodput for each instance")):
        draw_lines(place, shown, lines)
        place.set_xscale("log", base=2)
        place.set_xticks(list(sizes), [f"{size}" for size in sizes])
        finish(place, f"{title}, requests/s", across="instances")
    axes[0][0].set_yscale("log")
    legend(figure, shown)
    save(figure, plots / "scale.png")
    return (
        f"Requests: {counted}; the first {_WARMUP} for each instance are not counted.\n\n{text}\n![scale](scale.png)\n"
    )


def _show(found: Mapping[tuple[int, str], float | None], size: int, policy: str) -> str:
    rate = found.get((size, policy))
    return "-" if rate is None else f"{number(rate)} ({number(rate / size, 3)})"


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    def rate(size: int, policy: str) -> float | None:
        figures = results.figures(_cell(extent, size, policy))
        return None if figures is None else figures["goodput_qps"]

    sizes = _sizes(extent)
    linear, ahead = [], []
    for policy in OURS:
        first = rate(8, policy)
        grown = [(size, rate(size, policy)) for size in sizes if size > 8 and policy in sizes[size]]
        if first is not None:
            shown = ", ".join(f"{size}: {each / first:.2f} times" for size, each in grown if each is not None)
            linear.append(f"`{policy}` {shown}")
        for size in sizes:
            ours, others = rate(size, policy), [each for p in BASELINES if p in sizes[size] and (each := rate(size, p))]
            if ours is not None and others:
                ahead.append(f"`{policy}` {change(ours, max(others))} ({size})")
    return (
        Claim("A.3.1, Fig. 13a", "goodput grows nearly linearly from 8 to 32 instances", "; ".join(linear)),
        Claim("A.3.1, Fig. 13a", "it is ahead of every baseline at every size", ", ".join(ahead)),
    )


SECTION: Final = Section(
    name="scale", title="Goodput of 8 to 256 instances (Figure 13a)", cells=_cells, page=_page, claims=_claims
)
