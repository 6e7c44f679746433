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

from bench.known_times import known_times
from bench.paper.cells import Cell, Figures
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.sections import goodput, ttft
from bench.paper.settings import (
    BASELINES,
    CONVERSATION,
    MODELS,
    OTHERS,
    OURS,
    RATES,
    TITLES,
    TOOL_AGENT,
    Extent,
    few_rates,
)
from bench.paper.tables import Spread, number, table

from dualmap.queue.request_queue import MemberQueue
from dualmap_sim.experiment import Experiment, load_trace, run_experiment
from dualmap_sim.workloads.trace import Trace

_RATES: Final[Mapping[tuple[str, str], tuple[float, float, float]]] = {
    (TOOL_AGENT, "14b"): (6.56, 6.56, 6.12),
    (CONVERSATION, "pd"): (4.58, 4.72, 5.06),
}
"""The goodput of ``limit`` in each window."""
_BOUND: Final = "limit_deadline"
_USUAL: Final = "`dualmap`"
_BELOW: Final = (*OURS, *BASELINES, *OTHERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One difference to take away: a change of the experiment, or of the code during the run."""

    policy: str = "dualmap"
    change: Callable[[Experiment], Experiment] = lambda experiment: experiment
    during: Callable[[Experiment], AbstractContextManager[object]] | None = None


def _ample(experiment: Experiment) -> Experiment:
    return replace(experiment, engine=replace(experiment.engine, cache_tokens=10**9))


def _no_window(experiment: Experiment) -> Experiment:
    queue = replace(experiment.routing.queue, dispatch_window_s=0.0)
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


def _true_times(experiment: Experiment) -> AbstractContextManager[None]:
    """Let the router know every prefill time exactly."""
    return known_times(experiment.engine.prefill)


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
VARIANTS: Final[Mapping[str, tuple[Variant, tuple[tuple[str, str], ...]]]] = {
    _USUAL: (Variant(), _BOTH),
    "`limit`": (Variant(policy="limit"), _BOTH),
    "`limit_pooled`": (Variant(policy="limit_pooled"), _BOTH),
    "`limit_deadline`": (Variant(policy=_BOUND), _BOTH),
    "`pooled_deadline`": (Variant(policy="pooled_deadline"), _BOTH),
    "`dualmap`, caches without a limit": (Variant(change=_ample), _BOTH),
    "`dualmap`, late requests count in T_q": (Variant(during=_late_delays), _BOTH),
    "`dualmap`, no deferring": (Variant(change=_in_order), _BOTH),
    "`dualmap`, prefill times known": (Variant(during=_true_times), _BOTH),
    "`dualmap`, dispatch window 0 s": (Variant(change=_no_window), _BOTH),
    "`dualmap`, always the lowest cost of all members": (Variant(change=_any_member), _BOTH),
    "`dualmap`, keys of 2 blocks": (Variant(change=_short_keys), (_BOTH[0],)),
    "`dualmap`, batches spread": (Variant(during=_spread_batches), (_BOTH[1],)),
    "`limit`, batches spread": (Variant(policy="limit", during=_spread_batches), (_BOTH[1],)),
    "`dualmap`, engines without decode": (Variant(change=_prefill_only), (_BOTH[0],)),
    "`limit`, engines without decode": (Variant(policy="limit", change=_prefill_only), (_BOTH[0],)),
}


def attainment(experiment: Experiment, name: str) -> Figures:
    """Return the share within the SLO with one difference taken away."""
    variant, _ = VARIANTS[name]
    changed = variant.change(experiment)
    with ExitStack() as stack:
        if variant.during is not None:
            stack.enter_context(variant.during(changed))
        summary = run_experiment(changed).summary
    return {"slo_attainment": summary.slo_attainment, "refused_share": summary.refused / summary.requests}


def _cell(extent: Extent, column: tuple[str, str], window: int, name: str) -> Cell:
    variant, _ = VARIANTS[name]
    experiment = extent.experiment(*column, window, variant.policy, _RATES[column][window])
    return Cell(
        section="gap",
        name=f"{' '.join(column)} window {window} {name.replace('`', '')}",
        policy=variant.policy,
        measure=partial(attainment, replace(experiment, sample_s=None), name),
    )


def _columns(extent: Extent, name: str) -> list[tuple[str, str]]:
    return [column for column in VARIANTS[name][1] if column[0] in extent.workloads]


def _settings(extent: Extent) -> list[tuple[str, str]]:
    return [(workload, model) for workload in extent.workloads for model in MODELS]


def _cells(extent: Extent) -> Sequence[Cell]:
    gaps = [_cell(extent, c, w, name) for w in extent.windows() for name in VARIANTS for c in _columns(extent, name)]
    above = [ttft.cell(extent, *each, rate, _BOUND) for each in _settings(extent) for rate in _rates(extent, *each)]
    return [*above, *gaps]


def _rates(extent: Extent, workload: str, model: str) -> tuple[float, ...]:
    return few_rates(RATES[workload, model], extent)


def _page(results: Results, extent: Extent, _plots: Path) -> str:
    return (
        "One difference between `dualmap` and the bounds is taken away at a time. "
        "Mean of the measured windows, with the lowest and the highest; differences to `dualmap` in percentage points, "
        f"over the windows of both.\n\n{_gaps(results, extent)}\n"
        f"## How near policies come to `{_BOUND}`\n\n{_nearest(results, extent)}"
    )


def _gaps(results: Results, extent: Extent) -> str:
    columns = [column for column in _RATES if column[0] in extent.workloads]
    rows = []
    for name in VARIANTS:
        row = [name]
        for column in columns:
            shares, usual = (_shares(results, extent, column, each) for each in (name, _USUAL))
            worth = Spread.of(shares[window] - usual[window] for window in shares if window in usual)
            row += [Spread.of(shares.values()).show(1, 100), number(worth.mean, 1, 100)]
        rows.append(row)
    heads = [head for workload, model in columns for head in (f"{TITLES[workload]} {model}, %", "difference")]
    return table(("within the SLO at the goodput of `limit`", *heads), rows)


def _shares(results: Results, extent: Extent, column: tuple[str, str], name: str) -> dict[int, float]:
    """Return the share within the SLO by window, without the windows that have none."""
    if column not in _columns(extent, name):
        return {}
    kept = {window: results.figures(_cell(extent, column, window, name)) for window in extent.windows()}
    return {window: figures["slo_attainment"] for window, figures in kept.items() if figures is not None}


def _nearest(results: Results, extent: Extent) -> str:
    """Return how near the best policy of each column comes to the bound, in goodput and within the SLO at one rate."""
    rows = []
    for workload, model in _settings(extent):
        rates = {
            (window, policy): figures["goodput_qps"]
            for window in extent.windows()
            for policy in (_BOUND, *_BELOW)
            if (figures := results.figures(goodput.TRACES.cell(extent, workload, model, window, policy))) is not None
        }
        within = {
            (rate, policy): figures["slo_attainment"]
            for rate in _rates(extent, workload, model)
            for policy in (_BOUND, *_BELOW)
            if (figures := results.figures(ttft.cell(extent, workload, model, rate, policy))) is not None
        }
        best = max(
            (
                (100 * rate / rates[w, _BOUND], p)
                for (w, p), rate in rates.items()
                if p != _BOUND and (w, _BOUND) in rates
            ),
            default=None,
        )
        least = min(
            (
                (100 * (within[r, _BOUND] - share), p, r)
                for (r, p), share in within.items()
                if p != _BOUND and (r, _BOUND) in within
            ),
            default=None,
        )
        rows.append(
            [
                f"{TITLES[workload]} {model}",
                "-" if best is None else f"{best[0]:.1f} % (`{best[1]}`)",
                "-" if least is None else f"{least[0]:+.1f} (`{least[1]}` at {least[2]:g}/s)",
            ]
        )
    heads = (
        f"`{_BOUND}` and the policy that comes nearest",
        "goodput of the policy, % of the bound's",
        "within the SLO at one rate: lead of the bound, percentage points",
    )
    return table(heads, rows)


SECTION: Final = Section(
    name="gap",
    title="What separates dualmap from the bounds",
    cells=_cells,
    page=_page,
    excerpts={"gap": _gaps, "nearest": _nearest},
)
