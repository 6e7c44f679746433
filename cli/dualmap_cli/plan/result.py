"""Makes a capacity plan of recorded traffic: what is simulated, and the result as a value."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from dualmap.pools.pool import Pool, Routing
from dualmap_cli.simulate.as_it_was import AsItWas, as_it_was_experiment, compare_with
from dualmap_cli.simulate.plan import Plan, recorded_rate
from dualmap_cli.simulate.pool_option import of_pool
from dualmap_sim.experiment import Experiment, load_trace, run_experiment
from dualmap_sim.planning.capacity import Capacity, Change, Engines, Size
from dualmap_sim.presets import EngineConfig

_LEAST_GAIN: Final = 0.005
"""A smaller gain of a changed setting is not proposed."""
_DISPATCH_WINDOWS_S: Final = (0.1, 0.25, 1.0)
_WINDOWS: Final = 24
"""The number of windows in which an autoscaler could change the number of instances."""
_SHORT_REQUESTS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """The result of ``dualmap plan``. ``low`` and ``high`` are the instances with the fastest and the slowest engine.

    ``high`` is None if no number of the slowest ones suffices.
    ``smaller`` are the next sizes below. ``autoscaled`` is the share of instance hours that an autoscaler without
    delay would run. ``cache_doubled`` is the number of instances with caches twice as large.
    """

    instances: int
    low: int
    high: int | None
    size: Size
    smaller: Sequence[Size]
    changes: Sequence[Change]
    autoscaled: float
    cache_doubled: int
    was: AsItWas | None
    warnings: Sequence[str]


def make_capacity_plan(
    plan: Plan,
    engines: Engines,
    attainment: float,
    *,
    known: Collection[str],
    on_run: Callable[[], None] = lambda: None,
) -> CapacityPlan:
    """Simulate the recording of a plan at different sizes.

    ``known`` are the engine's parameters that a fit found. Raises Unattainable.
    """
    # Without a pool, as after an import, the defaults of a pool apply.
    policy = (Routing() if plan.pool is None else plan.pool.routing).policy
    base = replace(plan.base, requests_per_s=recorded_rate(plan.base) or 1.0, policy=policy)
    capacity = Capacity(base, engines, attainment, on_run=on_run)
    was = _was(plan, on_run)
    capacity.check()
    instances = capacity.least()
    low, high = capacity.least_range(instances)
    smaller = [capacity.size(size) for size in (instances - 1, instances - 2) if size > 0]
    return CapacityPlan(
        instances=instances,
        low=low,
        high=high,
        size=capacity.size(instances),
        smaller=smaller,
        changes=_changes(plan, base, capacity, engines.usual, known, max(1, instances - 1)),
        autoscaled=capacity.busy_share(instances, windows=_WINDOWS),
        cache_doubled=capacity.with_double_cache(instances),
        was=was,
        warnings=tuple(_warnings(plan, base, was, unbounded=high is None)),
    )


def _was(plan: Plan, on_run: Callable[[], None]) -> AsItWas | None:
    experiment = as_it_was_experiment(plan)
    if experiment is None or plan.traffic is None:
        return None
    on_run()
    return compare_with(plan.traffic, experiment, run_experiment(experiment).summary)


def _warnings(plan: Plan, base: Experiment, was: AsItWas | None, *, unbounded: bool) -> Iterator[str]:
    if was is None or was.believable is None:
        yield f"the simulation is not checked: {'all requests arrived at once' if was is None else was.reason}"
    elif not was.believable:
        yield f"the simulation does not repeat the recording: {was.reason}"
    requests = len(load_trace(base).requests)
    if requests < _SHORT_REQUESTS:
        yield f"the workload has only {requests:,} requests, too few for a reliable figure"
    if plan.differing:
        yield f"{len(plan.differing)} members of the engine's file differ; the plan has equal engines"
    if unbounded:
        yield "with the slowest engine that the fit allows, no number of instances attains the share"


def _changes(
    plan: Plan, base: Experiment, capacity: Capacity, engine: EngineConfig, known: Collection[str], instances: int
) -> tuple[Change, ...]:
    """Return the changed settings that certainly attain more: the best value of each field, the largest gain first."""
    if plan.pool is None:
        return ()
    best: dict[str, Change] = {}
    for field, now, proposed, pool in _candidates(plan.pool, engine, known):
        changed = replace(of_pool(base, pool), policy=pool.routing.policy, block_tokens=base.block_tokens)
        gain = capacity.gain(changed, instances)
        if gain is not None and gain >= _LEAST_GAIN and (field not in best or gain > best[field].gain):
            best[field] = Change(field=field, now=now, proposed=proposed, gain=gain)
    return tuple(sorted(best.values(), key=lambda change: -change.gain))


def _candidates(pool: Pool, engine: EngineConfig, known: Collection[str]) -> Iterator[tuple[str, str, str, Pool]]:
    """Yield changed pools, each with its field, its value now and the changed value."""
    routing, queue = pool.routing, pool.routing.queue
    if routing.policy != "dualmap":
        yield (
            "spec.routing.policy",
            routing.policy,
            "dualmap",
            replace(pool, routing=replace(routing, policy="dualmap")),
        )
    for window_s in _DISPATCH_WINDOWS_S:
        if window_s != queue.dispatch_window_s:
            changed = replace(routing, queue=replace(queue, dispatch_window_s=window_s))
            yield (
                "spec.routing.queue.dispatchWindow",
                _duration(queue.dispatch_window_s),
                _duration(window_s),
                replace(pool, routing=changed),
            )
    believed = pool.engine
    for name, field, now, proposed, changed_engine in (
        (
            "r",
            "spec.engine.prefillTokensPerSecond",
            f"{believed.prefill_tokens_per_second:g}",
            f"{engine.prefill.tokens_per_s:.0f}",
            replace(believed, prefill_tokens_per_second=engine.prefill.tokens_per_s),
        ),
        (
            "c",
            "spec.engine.cacheTokens",
            f"{believed.cache_tokens}",
            f"{engine.cache_tokens}",
            replace(believed, cache_tokens=engine.cache_tokens),
        ),
    ):
        if name in known and now != proposed:
            yield field, now, proposed, replace(pool, engine=changed_engine)


def _duration(seconds: float) -> str:
    """Return a duration as a pool's object has it."""
    if seconds == inf:
        return "Unlimited"
    return f"{seconds:g}s" if seconds >= 1 else f"{1000 * seconds:g}ms"
