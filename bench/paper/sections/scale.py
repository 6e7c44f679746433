"""Goodput of 8 to 256 instances (DualMap paper, appendix A.3.1, Fig. 13a): Tool&Agent on 7b, requests in proportion.

The paper ends at 32 instances. From 128 instances, only `dualmap` and `limit` run, each at one rate instead of a
search, to save time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell
from bench.paper.charts import draw_lines, finish, grid, legend, save
from bench.paper.claims import Claim
from bench.paper.measures import goodput_figures, run_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import OURS, RIVALS, TOOL_AGENT, Extent
from bench.paper.tables import change, number, table

from dualmap_sim.experiment import Experiment
from dualmap_sim.workloads.catalog import Workload

_POLICIES: Final = ("limit", *RIVALS, *OURS)
_SIZES: Final = (8, 16, 32, 64)
_LARGE: Final = (128, 256)
_AT_ONE_RATE: Final = ("limit", "dualmap")
_RATE_EACH: Final = 0.95
"""Requests per second per instance."""
_REQUESTS: Final = 250
"""Requests per instance, a quarter of the paper's number."""
_WARMUP: Final = 40
_TOLERANCE: Final = 0.02


def _experiment(extent: Extent, size: int, policy: str) -> Experiment:
    return replace(
        extent.experiment(TOOL_AGENT, "7b", 0, policy, size * _RATE_EACH),
        workload=Workload(name=TOOL_AGENT, requests=size * _REQUESTS),
        instances=size,
        warmup=size * _WARMUP,
    )


def _cell(extent: Extent, size: int, policy: str) -> Cell:
    return Cell(
        section="scale",
        name=f"{size} instances {policy}",
        policy=policy,
        measure=partial(goodput_figures, _experiment(extent, size, policy), tolerance=_TOLERANCE),
    )


def _run_cell(extent: Extent, size: int, policy: str) -> Cell:
    return Cell(
        section="scale",
        name=f"{size} instances at {size * _RATE_EACH:g}/s {policy}",
        policy=policy,
        measure=partial(run_figures, replace(_experiment(extent, size, policy), sample_s=None)),
    )


def _sizes(extent: Extent) -> tuple[int, ...]:
    return _SIZES[:2] if extent.quick else _SIZES


def _cells(extent: Extent) -> Sequence[Cell]:
    searches = [_cell(extent, size, policy) for size in _sizes(extent) for policy in _POLICIES]
    return [*searches, *(_run_cell(extent, size, policy) for size in _large(extent) for policy in _AT_ONE_RATE)]


def _large(extent: Extent) -> tuple[int, ...]:
    """Return the sizes with one run instead of a search, and the smallest size for comparison."""
    return (8,) if extent.quick else (8, *_LARGE)


def _page(results: Results, extent: Extent, plots: Path) -> str:
    sizes = _sizes(extent)
    found = {
        (size, policy): figures["goodput_qps"]
        for size in sizes
        for policy in _POLICIES
        if (figures := results.figures(_cell(extent, size, policy))) is not None
    }
    shown = (*OURS, *RIVALS, "limit")
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
        f"Requests: {counted}; the first {_WARMUP} for each instance are not counted.\n\n{text}\n"
        f"{_at_one_rate(results, extent)}\n![scale](scale.png)\n"
    )


def _at_one_rate(results: Results, extent: Extent) -> str:
    rows = []
    for size in _large(extent):
        for policy in _AT_ONE_RATE:
            measured = results.get(_run_cell(extent, size, policy))
            if measured is not None:
                figures = measured.figures
                shares = (f"{100 * figures[name]:.1f} %" for name in ("slo_attainment", "hit_rate"))
                times = (number(figures[name]) for name in ("ttft_p50_s", "ttft_p90_s"))
                rows.append([policy, f"{size}", f"{size * _RATE_EACH:g}", *shares, *times, f"{measured.cost_s:.0f}"])
    heads = ("policy", "instances", "requests/s", "within SLO", "hit rate", "TTFT p50 s", "p90", "processor seconds")
    return f"At {_RATE_EACH:g} requests/s for each instance:\n\n{table(heads, rows)}"


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
        grown = [(size, rate(size, policy)) for size in sizes if size > 8]
        if first is not None:
            shown = ", ".join(f"{size}: {each / first:.2f} times" for size, each in grown if each is not None)
            linear.append(f"`{policy}` {shown}")
        for size in sizes:
            ours, others = rate(size, policy), [(each, p) for p in RIVALS if (each := rate(size, p))]
            if ours is not None and others:
                best, name = max(others)
                ahead.append(f"`{policy}` {change(ours, best)} `{name}` ({size})")
    return (
        Claim("A.3.1, Fig. 13a", "goodput grows nearly linearly from 8 to 32 instances", "; ".join(linear)),
        Claim("A.3.1, Fig. 13a", "it is ahead of every baseline at every size", ", ".join(ahead)),
    )


SECTION: Final = Section(
    name="scale", title="Goodput of 8 to 256 instances (Figure 13a)", cells=_cells, page=_page, claims=_claims
)
