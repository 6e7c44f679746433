"""Goodput under difficult conditions: several routers, a slow instance, wrong speeds, another SLO.

Both workloads run on 7b with all policies, in the first window. Four routers run in every window.
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
from bench.paper.tables import Spread, change, number, table

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
_ROUTERS_POLICIES: Final = ("dualmap",)
_BOUND: Final = "limit"
_WITH_SESSIONS: Final = "with session ids"


def _cell(extent: Extent, condition: str, workload: str, window: int, policy: str) -> Cell:
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
    if condition in _SEVERAL:
        return _ROUTERS_POLICIES
    if condition == _WITH_SESSIONS:
        return OURS
    return (*_SHOWN, _BOUND) if condition == "SLO 10 s" else _SHOWN


def _windows(condition: str, extent: Extent) -> tuple[int, ...]:
    return extent.windows if condition in _SEVERAL else extent.windows[:1]


def _cells(extent: Extent) -> Sequence[Cell]:
    return [
        _cell(extent, condition, workload, window, policy)
        for condition in (*_CONDITIONS, _WITH_SESSIONS)
        for window in _windows(condition, extent)
        for policy in _policies(condition)
        for workload in extent.workloads
    ]


def _found(results: Results, extent: Extent, condition: str, workload: str, policy: str) -> Spread:
    """Return the goodput under a condition, in the windows measured under this condition."""
    cells = [_cell(extent, condition, workload, window, policy) for window in _windows(condition, extent)]
    return Spread.of(figures["goodput_qps"] for cell in cells if (figures := results.figures(cell)) is not None)


def _page(results: Results, extent: Extent, plots: Path) -> str:
    parts = []
    shown = [each for each in _CONDITIONS if each not in _SEVERAL]
    figure, axes = grid(len(extent.workloads), 1 + len(shown))
    for row, workload in zip(axes, extent.workloads, strict=True):
        rows = []
        for policy in (*_SHOWN, _BOUND):
            single = results.figures(_cell(extent, _AS_IT_IS, workload, 0, policy))
            base = None if single is None else single["goodput_qps"]
            means = [_found(results, extent, condition, workload, policy).mean for condition in shown]
            rows.append([policy, number(base), *(f"{number(each)} ({change(each, base, 0)})" for each in means)])
        parts.append(f"## {TITLES[workload]}, first window: goodput/s\n\n")
        parts.append(table(("policy", _AS_IT_IS, *shown), rows) + "\n")
        for place, condition in zip(row, (_AS_IT_IS, *shown), strict=True):
            values = [_found(results, extent, condition, workload, policy).values[:1] for policy in _SHOWN]
            bars(place, _SHOWN, values)
            finish(place, f"{TITLES[workload]}: {condition}")
    legend(figure, _SHOWN)
    save(figure, plots / "robust.png")
    routers = f"## Several routers, and session ids\n\n{_routers(results, extent)}"
    return "".join(parts) + routers + "\n![robustness](robust.png)\n"


def _routers(results: Results, extent: Extent) -> str:
    rows = []
    for workload in extent.workloads:
        for policy in OURS:
            one = goodput.TRACES.spread(results, extent, workload, _MODEL, policy)
            several = [_found(results, extent, each, workload, policy) for each in _SEVERAL]
            named = _found(results, extent, _WITH_SESSIONS, workload, policy)
            rows.append(
                [
                    TITLES[workload],
                    policy,
                    one.show(),
                    *(shown for four in several for shown in (four.show(), change(four.mean, one.mean))),
                    named.show(),
                ]
            )
    heads = (
        "workload",
        "policy",
        "one router",
        _ROUTERS,
        "change",
        f"{_LOCAL}, views {1000 * _VIEW_S:g} ms old",
        "change",
        "one router, session ids (first window)",
    )
    return table(heads, rows)


def _excerpt(results: Results, extent: Extent) -> str:
    """Return the goodput under each condition: of the default policy, and of the best other one."""
    rows = []
    for condition in (_AS_IT_IS, *(each for each in _CONDITIONS if each not in _SEVERAL)):
        for workload in extent.workloads:
            rates = {p: _found(results, extent, condition, workload, p).mean for p in (*OURS, *RIVALS)}
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
