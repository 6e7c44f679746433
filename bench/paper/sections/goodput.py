"""Goodput: the highest rate at which 90 % of the requests get their first token within 5 s (paper section 4.2, Fig. 3).

Every policy on both workloads and all three models, three windows each; the bounds that no router can reach beside
them. Other sections take single cells from here.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell
from bench.paper.charts import bars, finish, grid, legend, save
from bench.paper.measures import goodput_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import BASELINES, BOUNDS, MODELS, OTHERS, OURS, TITLES, Extent
from bench.paper.tables import Spread, change, ratio, table

_SHOWN: Final = (*OURS, *BASELINES, *OTHERS, *BOUNDS)


def cell(extent: Extent, workload: str, model: str, window: int, policy: str) -> Cell:
    """Return the cell of one policy's goodput in one window."""
    experiment = extent.experiment(workload, model, window, policy)
    return Cell(
        section="goodput",
        name=f"{workload} {model} window {window} {policy}",
        policy=policy,
        measure=partial(goodput_figures, experiment),
    )


def spread(results: Results, extent: Extent, workload: str, model: str, policy: str) -> Spread:
    """Return a policy's goodput in the windows that were measured."""
    found = [results.figures(cell(extent, workload, model, window, policy)) for window in extent.windows]
    return Spread.of(None if each is None else each["goodput_qps"] for each in found)


def _cells(extent: Extent) -> Sequence[Cell]:
    return [
        cell(extent, workload, model, window, policy)
        for policies in (BOUNDS, BASELINES, OTHERS, OURS)
        for window in extent.windows
        for workload in extent.workloads
        for model in MODELS
        for policy in policies
    ]


def _page(results: Results, extent: Extent, plots: Path) -> str:
    columns = [(workload, model) for workload in extent.workloads for model in MODELS]
    found = {(policy, *column): spread(results, extent, *column, policy) for policy in _SHOWN for column in columns}
    heads = ["goodput, requests/s", *(f"{TITLES[workload]} {model}" for workload, model in columns)]
    absolute = table(heads, [[policy, *(found[policy, *c].show() for c in columns)] for policy in _SHOWN])
    relative = table(
        ["of `limit`", *heads[1:]],
        [
            [policy, *(ratio(found[policy, *c].mean, found["limit", *c].mean) for c in columns)]
            for policy in _SHOWN
            if policy != "limit"
        ],
    )
    best = {c: max((found[p, *c].mean or 0.0) for p in BASELINES) for c in columns}
    gains = table(
        ["over the best of the paper's baselines", *heads[1:]],
        [[policy, *(change(found[policy, *c].mean, best[c]) for c in columns)] for policy in OURS],
    )
    figure, axes = grid(2, len(columns) // 2 if len(columns) > 3 else len(columns))
    places = [each for row in axes for each in row]
    for place, (workload, model) in zip(places, columns, strict=False):
        bars(place, _SHOWN, [found[policy, workload, model].values for policy in _SHOWN])
        finish(place, f"{TITLES[workload]}, {model}: goodput, requests/s")
    for place in places[len(columns) :]:
        place.set_visible(False)
    legend(figure, _SHOWN)
    save(figure, plots / "goodput.png")
    return f"{absolute}\n{relative}\n{gains}\n![goodput](goodput.png)\n"


SECTION: Final = Section(
    name="goodput",
    title="Goodput (Figure 3)",
    cells=_cells,
    page=_page,
)
