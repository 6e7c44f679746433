"""Makes a capacity plan of recorded traffic: what is simulated, and the result as a value."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import click

from dualmap.pools.kv_store import KvStore
from dualmap.pools.pool import Routing
from dualmap_cli.plan.settings import Change, changes
from dualmap_cli.simulate.as_it_was import AsItWas, as_it_was_warnings, run_as_it_was, with_recorded_kv
from dualmap_cli.simulate.plan import Plan, recorded_rate, with_transfer
from dualmap_cli.simulate.values import count_text, window_text
from dualmap_sim.experiment import Experiment, load_trace
from dualmap_sim.planning.capacity import Capacity, Engines, Size, Sizes
from dualmap_sim.planning.intervals import Share
from dualmap_sim.planning.sizes import Fleet
from dualmap_sim.planning.windows import WINDOW_REQUESTS, NoWindow, Peak, Window

_AUTOSCALED_WINDOWS: Final = 24
"""The number of windows in which an autoscaler could change the number of instances."""
_SHORT_REQUESTS: Final = 500
_STORE_TOKENS_PER_S: Final = KvStore().fetch_tokens_per_second
"""The speed of a KV store that a pool does not have yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of a plan, what the least fleet attains in each, and how many of them may miss the goal.

    ``may_miss`` is None if the plan has no peak.
    """

    window_s: float
    windows: Sequence[Window]
    shares: Sequence[Share]
    percentile: float | None
    may_miss: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """The result of ``dualmap plan``.

    ``smaller`` are the next fleets below: with one and two instances fewer, or with one fewer of either kind.
    ``compared`` is the fleet with which ``changes`` are measured. ``autoscaled`` is the share of instance hours that an
    autoscaler without delay would run. ``cache_doubled`` are the fleets with caches twice as large, ``with_store``
    those with a KV store, None if the pool has a store or a prefill pool.
    """

    sizes: Sizes
    size: Size
    smaller: Sequence[Size]
    windows: Windows
    compared: Fleet
    changes: Sequence[Change]
    autoscaled: Share
    cache_doubled: Sizes
    with_store: Sizes | None
    store_tokens_per_s: float
    was: AsItWas | None
    warnings: Sequence[str]


def make_capacity_plan(
    plan: Plan,
    engines: Engines,
    attainment: float,
    *,
    peak: Peak | None,
    known: Collection[str],
    on_run: Callable[[], None] = lambda: None,
) -> CapacityPlan:
    """Simulate the recording of a plan at different sizes.

    ``known`` are the engine's parameters that a fit found. Raises Unattainable, and BadParameter for a peak without
    windows, or for engines that cannot decode in a pool with a prefill pool.
    """
    base = _base(plan)
    if base.prefillers:
        engines = Engines(
            usual=with_transfer(engines.usual),
            slowest=with_transfer(engines.slowest),
            fastest=with_transfer(engines.fastest),
        )
    try:
        capacity = Capacity(base, engines, attainment, peak=peak, on_run=on_run)
    except NoWindow as error:
        raise click.BadParameter(
            f"no window has the {WINDOW_REQUESTS} requests that it needs; give a longer window, or omit it",
            param_hint="--peak",
        ) from error
    was = run_as_it_was(plan)
    on_run()
    capacity.check()
    usual = capacity.least()
    sizes = capacity.sizes(usual)
    smaller = [capacity.size(fleet) for fleet in _smaller(usual)]
    windows = _windows(capacity, usual, peak)
    compared = (
        max(smaller, key=lambda size: (size.fleet.instances, size.slo_attainment.value)).fleet if smaller else usual
    )
    stored = base.store is not None or base.prefillers
    return CapacityPlan(
        sizes=sizes,
        size=capacity.size(usual),
        smaller=smaller,
        windows=windows,
        compared=compared,
        changes=() if plan.pool is None else changes(plan.pool, base, capacity, engines.usual, known, compared),
        autoscaled=capacity.busy_share(sizes, windows=_AUTOSCALED_WINDOWS),
        cache_doubled=capacity.with_double_cache(sizes),
        with_store=None if stored else capacity.with_store(sizes, tokens_per_s=_STORE_TOKENS_PER_S),
        store_tokens_per_s=_STORE_TOKENS_PER_S,
        was=was,
        warnings=tuple(_warnings(plan, base, was, windows, attainment, unbounded=sizes.high is None)),
    )


def _base(plan: Plan) -> Experiment:
    """Return the experiment whose size varies, with equal engines. Raises BadParameter."""
    # Without a pool, as after an import, the defaults of a pool apply.
    policy = (Routing() if plan.pool is None else plan.pool.routing).policy
    base = replace(plan.base, requests_per_s=recorded_rate(plan.base) or 1.0, policy=policy, engines=())
    if plan.pool is None:
        return base
    if plan.pool.prefill_pool and base.engine.decode is None:
        raise click.BadParameter(
            "the engines do not decode, which a pool with prefillPool requires; give another", param_hint="--model"
        )
    # The number of prefill instances varies as well.
    return with_recorded_kv(base, plan.pool, prefillers=1 if plan.pool.prefill_pool else 0)


def _smaller(fleet: Fleet) -> Sequence[Fleet]:
    if fleet.prefillers:
        return fleet.smaller()
    return [Fleet(number) for number in (fleet.instances - 1, fleet.instances - 2) if number > 0]


def _windows(capacity: Capacity, fleet: Fleet, peak: Peak | None) -> Windows:
    return Windows(
        window_s=capacity.window_s,
        windows=capacity.windows,
        shares=capacity.in_windows(fleet),
        percentile=None if peak is None else peak.percentile,
        may_miss=None if peak is None else peak.may_miss(len(capacity.windows)),
    )


def _warnings(
    plan: Plan, base: Experiment, was: AsItWas | None, windows: Windows, attainment: float, *, unbounded: bool
) -> Iterator[str]:
    yield from as_it_was_warnings(was)
    if assumed := plan.assumed.text():
        yield f"{assumed}; the ranges do not cover their errors"
    requests = len(load_trace(base).requests)
    if requests < _SHORT_REQUESTS:
        yield f"the workload has only {count_text(requests, 'request')}, too few for a reliable figure"
    if plan.differing:
        differ = "differs" if len(plan.differing) == 1 else "differ"
        yield f"{count_text(len(plan.differing), 'member')} of the engine's file {differ}; the plan has equal engines"
    if base.prefillers and plan.pool is not None and plan.pool.kv_store.is_used:
        yield "the pool has a prefill pool and a KV store; the plan has no store"
    if unbounded:
        yield "with the slowest engine that the fit allows, no number of instances attains the share"
    lasts_s = load_trace(base).duration_s
    if windows.may_miss is not None and windows.window_s > lasts_s:
        yield (
            f"the windows of --peak ({window_text(windows.window_s)}) are longer than the recording, which lasts "
            f"{lasts_s:,.0f} s, so they add nothing to its average; give shorter ones"
        )
    missed = [share.value for share in windows.shares if share.value < attainment]
    if missed and windows.may_miss is None:
        name = window_text(windows.window_s)
        yield (
            f"{len(missed)} of {len(windows.shares)} windows ({name}) attain less than {attainment:.1%}, the worst "
            f"{min(missed):.1%}; to plan for them, give --peak p100-{name}"
        )
