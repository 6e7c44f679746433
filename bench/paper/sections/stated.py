"""What it is worth to state more in the pool's object than the shipped defaults: goodput in the first window.

All other sections run at shipped defaults: the routers know what the engines report, and nothing is stated. The two
policies with the highest goodput show what each further statement changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell
from bench.paper.measures import goodput_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.sections import goodput
from bench.paper.settings import MODELS, TITLES, Extent
from bench.paper.tables import change, number, table

from dualmap_sim.experiment import Experiment

_POLICIES: Final = ("dualmap", "llmd_default")
_NOTHING: Final = "nothing (shipped defaults)"


def _both(experiment: Experiment) -> Experiment:
    return replace(experiment, believed_tokens_per_s=None, block_tokens=None)


_STATED: Final[Mapping[str, Callable[[Experiment], Experiment]]] = {
    "prefill speed": lambda e: replace(e, believed_tokens_per_s=None),
    "the trace's blocks": lambda e: replace(e, block_tokens=None),
    "both": _both,
    "both and the memories, engines report nothing": lambda e: replace(_both(e), kv_tokens_known=True, discovery=False),
}


def _cell(extent: Extent, stated: str, workload: str, model: str, policy: str) -> Cell:
    if stated == _NOTHING:
        return goodput.TRACES.cell(extent, workload, model, 0, policy)
    return Cell(
        section="stated",
        name=f"{stated} {workload} {model} {policy}",
        policy=policy,
        measure=partial(goodput_figures, _STATED[stated](extent.experiment(workload, model, 0, policy))),
    )


def _cells(extent: Extent) -> Sequence[Cell]:
    return [
        _cell(extent, stated, workload, model, policy)
        for stated in (_NOTHING, *_STATED)
        for policy in _POLICIES
        for workload in extent.workloads
        for model in MODELS
    ]


def _page(results: Results, extent: Extent, _plots: Path) -> str:
    return "\n".join(
        (
            "The prefill speed is `spec.engine.prefillTokensPerSecond`, the length of blocks "
            "`spec.routing.prefix.blockTokens`, and the memories `spec.engine.cacheTokens` and `kvTokens`. Stated "
            "memories change nothing if the engines report the same. In brackets, the change from the shipped "
            "defaults.\n",
            *(_table(results, extent, policy) for policy in _POLICIES),
        )
    )


def _table(results: Results, extent: Extent, policy: str) -> str:
    columns = [(workload, model) for workload in extent.workloads for model in MODELS]

    def rate(stated: str, column: tuple[str, str]) -> float | None:
        figures = results.figures(_cell(extent, stated, *column, policy))
        return None if figures is None else figures["goodput_qps"]

    rows = []
    for stated in (_NOTHING, *_STATED):
        rates = [(rate(stated, each), rate(_NOTHING, each)) for each in columns]
        rows.append(
            [
                stated,
                *(
                    number(now) + f" ({change(now, base)})" * (stated != _NOTHING and now is not None)
                    for now, base in rates
                ),
            ]
        )
    heads = (f"stated, `{policy}`: goodput/s", *(f"{TITLES[workload]} {model}" for workload, model in columns))
    return table(heads, rows)


def _excerpt(results: Results, extent: Extent) -> str:
    return _table(results, extent, _POLICIES[0])


SECTION: Final = Section(
    name="stated",
    title="What stating more is worth",
    cells=_cells,
    page=_page,
    excerpts={"stated": _excerpt},
)
