"""The gap: what separates ``dualmap`` from the bounds, in the two columns of the goodput table that are furthest away.

Each difference between ``dualmap`` and ``limit`` is taken away alone, and the share within the SLO is measured at the
goodput of ``limit``. All rows of a column have equal rates, so their differences have less random variation than
goodput. The section also compares every policy with ``limit_deadline``, in all columns and above the goodput.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final
from unittest.mock import patch

from bench.paper.cells import Cell, Figures
from bench.paper.claims import Claim
from bench.paper.measures import run_figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.sections import goodput
from bench.paper.settings import BASELINES, CONVERSATION, MODELS, OTHERS, OURS, RATES, TITLES, TOOL_AGENT, Extent
from bench.paper.tables import Spread, number, table

from dualmap.fleet.estimate import LearntSpeed, Speed
from dualmap.fleet.view import Everyone
from dualmap.queue.request_queue import MemberQueue
from dualmap_sim.experiment import Experiment, load_trace, run_experiment
from dualmap_sim.presets import PrefillCost
from dualmap_sim.workloads.trace import Trace

_RATES: Final[Mapping[tuple[str, str], tuple[float, float, float]]] = {
    (TOOL_AGENT, "14b"): (6.56, 6.56, 6.12),
    (CONVERSATION, "pd"): (4.58, 4.72, 5.06),
}
"""The goodput of ``limit`` in each window."""
_BOUND: Final = "limit_deadline"
_FIFO: Final = ("limit", "limit_pooled")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """One difference to take away: a change of the experiment, or of the code during the run."""

    policy: str = "dualmap"
    change: Callable[[Experiment], Experiment] = lambda experiment: experiment
    during: Callable[[Experiment], AbstractContextManager[object]] | None = None


def _slower(experiment: Experiment) -> Experiment:
    return replace(experiment, requests_per_s=0.97 * experiment.requests_per_s)


def _ample(experiment: Experiment) -> Experiment:
    return replace(experiment, engine=replace(experiment.engine, cache_tokens=10**9))


def _window(seconds: float, experiment: Experiment) -> Experiment:
    queue = replace(experiment.routing.queue, dispatch_window_s=seconds)
    return replace(experiment, routing=replace(experiment.routing, queue=queue))


def _in_order(experiment: Experiment) -> Experiment:
    queue = replace(experiment.routing.queue, max_overtaken=0)
    return replace(experiment, routing=replace(experiment.routing, queue=queue))


def _any_member(experiment: Experiment) -> Experiment:
    return replace(
        experiment, routing=replace(experiment.routing, spill=replace(experiment.routing.spill, slo_fraction=0.0))
    )


def _short_keys(experiment: Experiment) -> Experiment:
    prefix = replace(experiment.routing.prefix, max_blocks=experiment.routing.prefix.initial_blocks)
    return replace(experiment, routing=replace(experiment.routing, prefix=prefix))


def _prefill_only(experiment: Experiment) -> Experiment:
    return replace(experiment, engine=replace(experiment.engine, decode=None))


class _TrueSpeed(Speed):
    """The engine's own prefill time, with its fixed cost and the time to load cached tokens."""

    cost: PrefillCost

    def compute_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self.cost.seconds(new_tokens=new_tokens, cached_tokens=cached_tokens)


@contextmanager
def _true_times(experiment: Experiment) -> Iterator[None]:
    """Let the router know every prefill time exactly."""
    cost = experiment.engine.prefill
    speed = _TrueSpeed(1 / cost.tokens_per_s, cost.attention / (2 * cost.tokens_per_s))
    speed.cost = cost
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(LearntSpeed, "current", property(lambda _: speed, lambda *_: None), create=True)
        )
        # The columns use the formula of the learnt speed.
        stack.enter_context(patch.object(Everyone, "costs_s", lambda self, weights: [weights.cost_s(c) for c in self]))
        yield


@contextmanager
def _late_delays(_experiment: Experiment) -> Iterator[None]:
    """Count the deferred requests in T_q, as if a new request waited for them."""
    with patch.object(MemberQueue, "ahead_s", property(lambda queue: queue.compute_s)):
        yield


@contextmanager
def _spread_batches(_experiment: Experiment) -> Iterator[None]:
    """Spread the requests that arrive at the same time evenly until the next arrivals."""
    with patch("dualmap_sim.experiment.load_trace", lambda experiment: spread_evenly(load_trace(experiment))):
        yield


def spread_evenly(trace: Trace) -> Trace:
    """Return a trace in which equal arrival times are spread until the next one; the last batch stays."""
    batches = [list(batch) for _, batch in groupby(trace.requests, key=lambda request: request.arrival_s)]
    requests = []
    for batch, following in zip(batches, [*batches[1:], batches[-1]], strict=True):
        gap_s = (following[0].arrival_s - batch[0].arrival_s) / len(batch)
        requests += [replace(each, arrival_s=each.arrival_s + place * gap_s) for place, each in enumerate(batch)]
    return replace(trace, requests=tuple(requests))


_BOTH: Final = tuple(_RATES)
_VARIANTS: Final[Mapping[str, tuple[_Variant, tuple[tuple[str, str], ...]]]] = {
    "`dualmap`": (_Variant(), _BOTH),
    "`dualmap`, 3 % fewer requests/s": (_Variant(change=_slower), _BOTH),
    "`limit`": (_Variant(policy="limit"), _BOTH),
    "`limit_pooled`": (_Variant(policy="limit_pooled"), _BOTH),
    "`limit_deadline`": (_Variant(policy=_BOUND), _BOTH),
    "`pooled_deadline`": (_Variant(policy="pooled_deadline"), _BOTH),
    "`dualmap`, caches without a limit": (_Variant(change=_ample), _BOTH),
    "`dualmap`, late requests count in T_q": (_Variant(during=_late_delays), _BOTH),
    "`dualmap`, no deferring": (_Variant(change=_in_order), _BOTH),
    "`dualmap`, prefill times known": (_Variant(during=_true_times), _BOTH),
    "`dualmap`, dispatch window 0 s": (_Variant(change=partial(_window, 0.0)), _BOTH),
    "`dualmap`, dispatch window 1 s": (_Variant(change=partial(_window, 1.0)), _BOTH),
    "`dualmap`, always the lowest cost of all members": (_Variant(change=_any_member), _BOTH),
    "`dualmap`, keys of 2 blocks": (_Variant(change=_short_keys), _BOTH),
    "`dualmap`, batches spread": (_Variant(during=_spread_batches), (_BOTH[1],)),
    "`limit`, batches spread": (_Variant(policy="limit", during=_spread_batches), (_BOTH[1],)),
    "`dualmap`, engines without decode": (_Variant(change=_prefill_only), (_BOTH[0],)),
    "`limit`, engines without decode": (_Variant(policy="limit", change=_prefill_only), (_BOTH[0],)),
}


def attainment(experiment: Experiment, name: str) -> Figures:
    """Return the share within the SLO with one difference taken away."""
    variant, _ = _VARIANTS[name]
    changed = variant.change(experiment)
    with ExitStack() as stack:
        if variant.during is not None:
            stack.enter_context(variant.during(changed))
        summary = run_experiment(changed).summary
    return {"slo_attainment": summary.slo_attainment, "refused_share": summary.refused / summary.requests}


def _cell(extent: Extent, column: tuple[str, str], window: int, name: str) -> Cell:
    variant, _ = _VARIANTS[name]
    experiment = extent.experiment(*column, window, variant.policy, _RATES[column][window])
    return Cell(
        section="gap",
        name=f"{' '.join(column)} window {window} {name.replace('`', '')}",
        policy=variant.policy,
        measure=partial(attainment, replace(experiment, sample_s=None), name),
    )


def _columns(extent: Extent, name: str) -> list[tuple[str, str]]:
    return [column for column in _VARIANTS[name][1] if column[0] in extent.workloads]


def _above(extent: Extent, workload: str, model: str, policy: str) -> Cell:
    """Return the cell of a policy at the highest rate of the curves, which is above the goodput."""
    rate = RATES[workload, model][-1]
    return Cell(
        section="gap",
        name=f"{workload} {model} above the goodput {policy}",
        policy=policy,
        measure=partial(run_figures, extent.experiment(workload, model, 0, policy, rate)),
    )


def _settings(extent: Extent) -> list[tuple[str, str]]:
    return [(workload, model) for workload in extent.workloads for model in MODELS]


def _cells(extent: Extent) -> Sequence[Cell]:
    gaps = [_cell(extent, c, w, name) for name in _VARIANTS for w in extent.windows for c in _columns(extent, name)]
    return [*gaps, *(_above(extent, *each, policy) for each in _settings(extent) for policy in ("dualmap", _BOUND))]


def _page(results: Results, extent: Extent, plots: Path) -> str:
    found = {
        (name, column): Spread.of(
            figures["slo_attainment"]
            for window in extent.windows
            if (figures := results.figures(_cell(extent, column, window, name))) is not None
        )
        for name in _VARIANTS
        for column in _columns(extent, name)
    }
    columns = [column for column in _RATES if column[0] in extent.workloads]
    rows = []
    for name in _VARIANTS:
        row = [name]
        for column in columns:
            share, usual = found.get((name, column), Spread(())), found["`dualmap`", column].mean
            worth = "-" if share.mean is None or usual is None else f"{100 * (share.mean - usual):+.1f}"
            row += [share.show(1, 100), worth]
        rows.append(row)
    heads = [head for workload, model in columns for head in (f"{TITLES[workload]} {model}, %", "difference")]
    gaps = table(("within the SLO at the goodput of `limit`", *heads), rows)
    return (
        "One difference between `dualmap` and the bounds is taken away at a time. "
        f"Mean of {len(extent.windows)} windows, with the lowest and the highest; differences to `dualmap` in "
        f"percentage points.\n\n{gaps}\n## No policy passes `{_BOUND}`\n\n{_nearest(results, extent)}"
    )


def _nearest(results: Results, extent: Extent) -> str:
    """Return how near the best policy of each column comes to the bound: goodput, and attainment above it."""
    rows = []
    for workload, model in _settings(extent):
        shares = [
            (100 * figures["goodput_qps"] / bound["goodput_qps"], policy)
            for window in extent.windows
            if (bound := results.figures(goodput.cell(extent, workload, model, window, _BOUND))) is not None
            for policy in (*OURS, *BASELINES, *OTHERS, *_FIFO)
            if (figures := results.figures(goodput.cell(extent, workload, model, window, policy))) is not None
            and figures["goodput_qps"] is not None
        ]
        nearest = {kind: max((s for s in shares if (s[1] in _FIFO) is kind), default=None) for kind in (False, True)}
        above = [results.figures(_above(extent, workload, model, policy)) for policy in ("dualmap", _BOUND)]
        rows.append(
            [
                f"{TITLES[workload]} {model}",
                *("-" if each is None else f"{each[0]:.1f} % (`{each[1]}`)" for each in nearest.values()),
                f"{RATES[workload, model][-1]:g}",
                *(number(None if each is None else each["slo_attainment"], 1, 100) for each in above),
            ]
        )
    heads = (
        "largest goodput of a window, % of the bound's",
        "router",
        "other bound",
        "overload, requests/s",
        "`dualmap` in the SLO, %",
        f"`{_BOUND}`, %",
    )
    return table(heads, rows)


def _claims(_results: Results, _extent: Extent) -> Sequence[Claim]:
    """Return no claims: the sources have no such comparison."""
    return ()


SECTION: Final = Section(
    name="gap", title="What separates dualmap from the bounds", cells=_cells, page=_page, claims=_claims
)
