"""Goodput under difficult conditions: several routers, a slow instance, wrong speeds, another SLO.

Both workloads run on 7b with all policies, in the first window. Several routers run with the default policy.
``python -m bench routers`` measures more numbers of routers, workloads and models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from bench.paper.cells import Cell
from bench.paper.charts import bars, finish, grid, legend, save
from bench.paper.measures import goodput_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.sections import goodput
from bench.paper.settings import DEFAULT_POLICY, OURS, RIVALS, TITLES, Extent
from bench.paper.tables import change, number, table

from dualmap_sim.experiment import Experiment
from dualmap_sim.presets import PRESETS, slowed

_MODEL: Final = "7b"
_SHOWN: Final = (*OURS, *RIVALS)
_SPEED: Final = PRESETS[_MODEL].prefill.tokens_per_s
_ROUTERS: Final = "4 routers, the owner decides"
_LOCAL: Final = "4 routers, each by itself"
_VIEW_S: Final = 0.1
_AS_IT_IS: Final = "as it is"

_CONDITIONS: Final[Mapping[str, Callable[[Experiment], Experiment]]] = {
    "one instance at half speed": lambda e: replace(e, engines=(("qwen-0", slowed(e.engine, 2.0)),)),
    "speed believed half": lambda e: replace(e, believed_tokens_per_s=_SPEED / 2),
    "speed believed double": lambda e: replace(e, believed_tokens_per_s=_SPEED * 2),
    "SLO 10 s": lambda e: replace(e, slo_ttft_s=10.0),
    "engines report nothing": lambda e: replace(e, discovery=False),
    "feedback 20 ms late, 1 % lost": lambda e: replace(e, feedback_delay_s=0.02, report_loss=0.01),
    _ROUTERS: lambda e: replace(e, routers=4, view_delay_s=_VIEW_S),
    _LOCAL: lambda e: replace(e, routers=4, owner_decides=False, view_delay_s=_VIEW_S),
}
_SEVERAL: Final = (_ROUTERS, _LOCAL)
_BOUND: Final = "limit"
_WITH_SESSIONS: Final = "with session ids"


def _cell(extent: Extent, condition: str, workload: str, policy: str) -> Cell:
    (window,) = extent.windows()
    if condition == _AS_IT_IS:
        return goodput.TRACES.cell(extent, workload, _MODEL, window, policy)
    experiment = extent.experiment(workload, _MODEL, window, policy)
    if condition == _WITH_SESSIONS:
        experiment = replace(experiment, sessions=True)
    else:
        experiment = _CONDITIONS[condition](experiment)
    return Cell(
        section="robust",
        name=f"{condition} {workload} window {window} {policy}",
        policy=policy,
        measure=partial(goodput_figures, experiment),
    )


def _policies(condition: str) -> tuple[str, ...]:
    if condition in (*_SEVERAL, _WITH_SESSIONS):
        return (DEFAULT_POLICY,)
    return (*_SHOWN, _BOUND) if condition == "SLO 10 s" else _SHOWN


def _cells(extent: Extent) -> Sequence[Cell]:
    return [
        _cell(extent, condition, workload, policy)
        for condition in (*_CONDITIONS, _WITH_SESSIONS)
        for policy in _policies(condition)
        for workload in extent.workloads
    ]


def _found(results: Results, extent: Extent, condition: str, workload: str, policy: str) -> float | None:
    """Return the goodput under a condition, None if it is not measured."""
    figures = results.figures(_cell(extent, condition, workload, policy))
    return None if figures is None else figures["goodput_qps"]


def _beside(rate: float | None, base: float | None, digits: int = 1) -> str:
    """Return a goodput with its change from ``base``, or a dash if it is not measured."""
    return "-" if rate is None else f"{number(rate)} ({change(rate, base, digits)})"


def _page(results: Results, extent: Extent, plots: Path) -> str:
    parts = []
    shown = [each for each in _CONDITIONS if each not in _SEVERAL]
    figure, axes = grid(len(extent.workloads), 1 + len(shown))
    for row, workload in zip(axes, extent.workloads, strict=True):
        rows = []
        for policy in (*_SHOWN, _BOUND):
            base = _found(results, extent, _AS_IT_IS, workload, policy)
            rates = [_found(results, extent, condition, workload, policy) for condition in shown]
            rows.append([policy, number(base), *(_beside(each, base, 0) for each in rates)])
        parts.append(f"## {TITLES[workload]}, first window: goodput/s\n\n")
        parts.append(table(("policy", _AS_IT_IS, *shown), rows) + "\n")
        for place, condition in zip(row, (_AS_IT_IS, *shown), strict=True):
            found = [_found(results, extent, condition, workload, policy) for policy in _SHOWN]
            bars(place, _SHOWN, [[] if each is None else [each] for each in found])
            finish(place, f"{TITLES[workload]}: {condition}")
    legend(figure, _SHOWN)
    save(figure, plots / "robust.png")
    routers = f"## Several routers, and session ids\n\n{_routers(results, extent)}"
    return "".join(parts) + routers + "\n![robustness](robust.png)\n"


def _routers(results: Results, extent: Extent) -> str:
    rows = []
    for workload in extent.workloads:
        one, *others = (
            _found(results, extent, condition, workload, DEFAULT_POLICY)
            for condition in (_AS_IT_IS, *_SEVERAL, _WITH_SESSIONS)
        )
        rows.append([TITLES[workload], number(one), *(_beside(each, one) for each in others)])
    local = f"{_LOCAL}, views {1000 * _VIEW_S:g} ms old"
    return table((f"goodput/s of `{DEFAULT_POLICY}`", "one router", _ROUTERS, local, "one router, session ids"), rows)


def _excerpt(results: Results, extent: Extent) -> str:
    """Return the goodput under each condition: of the default policy, and of the best other one."""
    rows = []
    for condition in (_AS_IT_IS, *(each for each in _CONDITIONS if each not in _SEVERAL)):
        for workload in extent.workloads:
            rates = {p: _found(results, extent, condition, workload, p) for p in (*OURS, *RIVALS)}
            others = [(rate, policy) for policy, rate in rates.items() if policy in RIVALS and rate is not None]
            best, name = max(others, default=(None, ""))
            rows.append(
                [
                    condition,
                    TITLES[workload],
                    *(number(rates[policy]) for policy in OURS),
                    f"{number(best)} `{name}`" if name else "-",
                    change(rates[DEFAULT_POLICY], best),
                ]
            )
    ours = (f"`{policy}`" for policy in OURS)
    return table(("condition", "workload", *ours, "best other policy", f"`{DEFAULT_POLICY}` against it"), rows)


SECTION: Final = Section(
    name="robust",
    title="Robustness",
    cells=_cells,
    page=_page,
    excerpts={"robust": _excerpt, "routers": _routers},
)
