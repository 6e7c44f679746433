"""Compares a recording with its own simulation: the same policy, instances and times."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dualmap.pools.pool import Pool
from dualmap.recordings.values import RecordedOutcome, RecordedRequest
from dualmap_cli.simulate.plan import Plan, default_warmup, recorded_rate, with_transfer
from dualmap_cli.simulate.pool_option import of_pool
from dualmap_sim.experiment import Experiment, load_trace, member_ids
from dualmap_sim.recordings.replays import Traffic, was_measured
from dualmap_sim.shared_store import StoreConfig
from dualmap_sim.summary import Summary, percentile

_SHARES_APART: Final = 0.05
"""The largest difference of two shares with which a simulation is believed."""
_TIMES_APART: Final = 0.25
"""The largest relative difference of two times."""
_TIMES_APART_S: Final = 0.05
"""The largest difference of two times that are too short for a relative one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the recording and of its simulation; NaN without data."""

    measured: float
    simulated: float

    @property
    def has_both(self) -> bool:
        """Whether the figure can be compared."""
        return not (math.isnan(self.measured) or math.isnan(self.simulated))


@dataclass(frozen=True, slots=True, kw_only=True)
class AsItWas:
    """A recording beside its simulation. ``believable`` is None if nothing was measured."""

    experiment: Experiment
    ttft_p50_s: Figure
    ttft_p90_s: Figure
    hit_rate: Figure
    slo_attainment: Figure
    believable: bool | None
    reason: str


def as_it_was_experiment(plan: Plan) -> Experiment | None:
    """Return the experiment that repeats the recording of a plan: its pool at its own times; None without times."""
    assert plan.traffic is not None
    pool, instances = plan.traffic.pool, plan.traffic.instances or plan.base.instances
    base = Experiment(
        requests_per_s=1.0,
        workload=replace(plan.base.workload, scale=1.0),
        instances=instances,
        engine=plan.base.engine,
        engines=tuple(zip(member_ids(instances), plan.differing, strict=False)),
        slo_ttft_s=plan.base.slo_ttft_s,
        warmup=plan.base.warmup,
        sessions=plan.base.sessions,
    )
    requests_per_s = recorded_rate(base)
    if requests_per_s is None:
        return None
    base = replace(base, requests_per_s=requests_per_s)
    if plan.base.workload.scale != 1:
        base = replace(base, warmup=default_warmup(len(load_trace(base).requests)))
    if pool is None:
        return base
    recorded = replace(of_pool(base, pool), block_tokens=None, policy=pool.routing.policy, slo_ttft_s=pool.slo.ttft_s)
    return with_recorded_kv(recorded, pool, prefillers=plan.traffic.prefillers)


def with_recorded_kv(experiment: Experiment, pool: Pool, *, prefillers: int) -> Experiment:
    """Return an experiment with the members of a pool's prefill pool, or with its KV store.

    Members of a prefill pool are equal and have no store.
    """
    if prefillers and experiment.engine.decode is not None:
        instances = experiment.instances + prefillers
        engine = with_transfer(experiment.engine)
        return replace(
            experiment, instances=instances, prefillers=prefillers, engine=engine, engines=(), kv_moves=False
        )
    if pool.kv_store.is_used:
        store = StoreConfig(tokens_per_s=pool.kv_store.fetch_tokens_per_second)
        return replace(experiment, store=store, kv_moves=False)
    return experiment


def compare_with(traffic: Traffic, experiment: Experiment, simulated: Summary) -> AsItWas:
    """Compare the counted requests of a recording with their simulation."""
    start = experiment.workload.start
    counted = traffic.requests[start:][: experiment.workload.requests][experiment.warmup :]
    measured_s = sorted(each.ttft_s for each in counted if each.ttft_s is not None)
    ttft_p50_s = Figure(measured=percentile(measured_s, 0.5), simulated=simulated.ttft_p50_s)
    ttft_p90_s = Figure(measured=percentile(measured_s, 0.9), simulated=simulated.ttft_p90_s)
    hit_rate = Figure(measured=_hit_rate(counted), simulated=simulated.hit_rate)
    slo_attainment = Figure(measured=_attainment(counted, experiment.slo_ttft_s), simulated=simulated.slo_attainment)
    reasons = [
        *_apart("TTFT p50", ttft_p50_s, seconds=True),
        *_apart("TTFT p90", ttft_p90_s, seconds=True),
        *_apart("hit rate", hit_rate, seconds=False),
        *_apart("share within the SLO", slo_attainment, seconds=False),
    ]
    if traffic.sample < 1:
        reasons.append(f"the recording has only {traffic.sample:.4g} of the sessions")
    if not any(map(was_measured, counted)):
        believable, reason = None, "the recording has no measurements"
    elif not measured_s:
        believable, reason = None, "the recording has no times to the first token, which streamed answers have"
    elif reasons:
        if traffic.membership_changes:
            reasons.append(f"the members changed {traffic.membership_changes} times, which is not simulated")
        believable, reason = False, "; ".join(reasons)
    else:
        believable, reason = True, "the simulation repeats what was measured"
    return AsItWas(
        experiment=experiment,
        ttft_p50_s=ttft_p50_s,
        ttft_p90_s=ttft_p90_s,
        hit_rate=hit_rate,
        slo_attainment=slo_attainment,
        believable=believable,
        reason=reason,
    )


def _hit_rate(counted: Sequence[RecordedRequest]) -> float:
    both = [
        (each.cached_tokens, each.engine_prompt_tokens)
        for each in counted
        if each.cached_tokens is not None and each.engine_prompt_tokens
    ]
    return sum(cached for cached, _ in both) / sum(prompt for _, prompt in both) if both else math.nan


def _attainment(counted: Sequence[RecordedRequest], slo_ttft_s: float) -> float:
    asked = [each for each in counted if each.streamed or each.outcome is RecordedOutcome.REFUSED]
    within = sum(each.ttft_s is not None and each.ttft_s <= slo_ttft_s for each in asked)
    return within / len(asked) if asked else math.nan


def _apart(name: str, figure: Figure, *, seconds: bool) -> Iterator[str]:
    """Yield why a figure makes the simulation unbelievable."""
    if not figure.has_both:
        return
    apart = abs(figure.simulated - figure.measured)
    limit = max(_TIMES_APART_S, _TIMES_APART * figure.measured) if seconds else _SHARES_APART
    if apart > limit:
        shown = [f"{each:.2f} s" if seconds else f"{each:.1%}" for each in (figure.simulated, figure.measured)]
        yield f"the {name} is {shown[0]} simulated and {shown[1]} measured"
