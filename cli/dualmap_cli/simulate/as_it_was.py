"""Compares a recording with its own simulation: the same policy, instances and times."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from dualmap.pools.pool import Pool
from dualmap.recordings.values import RecordedOutcome, RecordedRequest
from dualmap_cli.simulate.comparison import (
    Figure,
    WindowShares,
    ratio,
    share,
    share_reasons,
    time_reasons,
    window_shares,
)
from dualmap_cli.simulate.engines import differing_members
from dualmap_cli.simulate.plan import Plan, default_warmup, recorded_rate, with_transfer
from dualmap_cli.simulate.pool_option import of_pool
from dualmap_cli.simulate.runs import losses_of
from dualmap_cli.simulate.values import window_text
from dualmap_sim.events import PoolChange
from dualmap_sim.experiment import Experiment, Outcome, load_trace, run_experiment
from dualmap_sim.notices import Losses
from dualmap_sim.recordings.pool_history import Unrepeated
from dualmap_sim.recordings.replays import Traffic, was_measured
from dualmap_sim.records import Record
from dualmap_sim.repeats import with_changes
from dualmap_sim.shared_store import StoreConfig
from dualmap_sim.summary import percentile

_Pair = tuple[RecordedRequest, Record]
"""A request as it was recorded, and as it was simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsItWas:
    """A recording beside its simulation. ``believable`` is None if nothing was measured."""

    experiment: Experiment
    ttft_p50_s: Figure
    ttft_p90_s: Figure
    hit_rate: Figure
    slo_attainment: Figure
    windows: WindowShares
    unrepeated: tuple[Unrepeated, ...]
    believable: bool | None
    reason: str
    losses: Losses | None = None
    """What the simulation lost, to compare it with runs in which members got a notice."""
    assumed: tuple[str, ...] = ()
    """The parameters of the prefill speed that are not from a recording, though the engine is from a file."""


def run_as_it_was(plan: Plan, *, lost_from_s: float | None = None) -> AsItWas | None:
    """Simulate the recording of a plan as it was, and compare it with what was measured; None without times.

    With ``lost_from_s``, the result has what was lost from then on.
    """
    experiment = None if plan.traffic is None else as_it_was_experiment(plan)
    if experiment is None or plan.traffic is None:
        return None
    outcome = run_experiment(experiment)
    was = compare_with(plan.traffic, experiment, outcome)
    return replace(was, losses=losses_of(outcome, experiment, lost_from_s), assumed=plan.assumed.prefill_speed)


def as_it_was_warnings(was: AsItWas | None) -> Iterator[str]:
    """Yield why the simulation of a recording may not be believed, and what it does not repeat."""
    if was is None or was.believable is None:
        yield f"the simulation is not checked: {'all requests arrived at once' if was is None else was.reason}"
    elif not was.believable:
        yield f"the simulation does not repeat the recording: {was.reason}"
    if was is not None and was.unrepeated:
        yield f"the simulation does not repeat: {unrepeated_text(was.unrepeated)}"


def trust_text(was: AsItWas) -> str:
    """Return whether the simulation of a recording may be believed, with the reason."""
    trust = {True: "may be believed", False: "may not be believed", None: "is not checked"}[was.believable]
    but = f", but {', '.join(was.assumed)} are not from a recording" if was.believable and was.assumed else ""
    return f"The simulation {trust}{but}: {was.reason}."


def as_it_was_experiment(plan: Plan) -> Experiment | None:
    """Return the experiment that repeats the recording of a plan, with the changes of its pool; None without times.

    The members of a pool with a prefill pool stay as they are.
    """
    assert plan.traffic is not None
    pool, instances = plan.traffic.pool, plan.traffic.instances or plan.base.instances
    base = Experiment(
        requests_per_s=1.0,
        workload=replace(plan.base.workload, scale=1.0),
        instances=instances,
        engine=plan.base.engine,
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
        return replace(base, engines=differing_members(plan.differing, (), instances))
    recorded = with_recorded_kv(_with_settings(base, pool), pool, prefillers=plan.traffic.prefillers)
    if recorded.prefillers or not plan.traffic.members:
        return recorded
    engines = differing_members(plan.differing, plan.traffic.members, instances)
    return with_changes(replace(recorded, engines=engines), plan.traffic, _with_settings)


def _with_settings(experiment: Experiment, pool: Pool) -> Experiment:
    """Return an experiment with the policy, the settings and the SLO of a recorded pool."""
    configured = of_pool(experiment, pool)
    return replace(configured, block_tokens=None, policy=pool.routing.policy, slo_ttft_s=pool.slo.ttft_s)


def unrepeated_text(unrepeated: Sequence[Unrepeated]) -> str:
    """Return the changes that a simulation does not repeat: what changed, and when for the first time."""
    first = {each.what: each for each in reversed(unrepeated)}
    counts = Counter(each.what for each in unrepeated)
    return "; ".join(
        f"{what} at {datetime.fromtimestamp(each.recorded_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
        + (f", and {counts[what] - 1} more times" if counts[what] > 1 else "")
        for what, each in sorted(first.items(), key=lambda item: item[1].recorded_s)
    )


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


def compare_with(traffic: Traffic, experiment: Experiment, outcome: Outcome) -> AsItWas:
    """Compare the counted requests of a recording with their simulation.

    A figure covers the same requests on both sides: those for which the recording has it.
    """
    counted = traffic.requests[experiment.workload.start :][: experiment.workload.requests][experiment.warmup :]
    pairs = tuple(zip(counted, outcome.records[experiment.warmup :], strict=True))
    timed = [(request, record) for request, record in pairs if request.ttft_s is not None]
    measured_s = sorted(request.ttft_s for request, _ in timed if request.ttft_s is not None)
    simulated_s = sorted(record.ttft_s for _, record in timed if record.ttft_s is not None)
    ttft_p50_s, ttft_p90_s = (
        Figure(measured=percentile(measured_s, part), simulated=percentile(simulated_s, part)) for part in (0.5, 0.9)
    )
    hit_rate = _hit_rate(pairs)
    asked = [each for each in pairs if each[0].streamed or each[0].outcome is RecordedOutcome.REFUSED]
    arrivals_s = [record.arrival.at_s for _, record in asked]
    slos_s = _slos_s(experiment, arrivals_s)
    measured = [_is_within(request.ttft_s, slo_s) for (request, _), slo_s in zip(asked, slos_s, strict=True)]
    simulated = [_is_within(record.ttft_s, slo_s) for (_, record), slo_s in zip(asked, slos_s, strict=True)]
    slo_attainment = Figure(measured=share(measured), simulated=share(simulated))
    windows = window_shares(arrivals_s, measured, simulated)
    reasons = [
        *time_reasons("TTFT p50", ttft_p50_s),
        *time_reasons("TTFT p90", ttft_p90_s),
        *share_reasons("hit rate", hit_rate),
        *share_reasons("share within the SLO", slo_attainment),
        *windows.reasons(),
    ]
    unrepeated = traffic.unrepeated_between(counted[0], counted[-1])
    believable, reason = _verdict(traffic, counted, reasons, windows, timed=bool(timed))
    return AsItWas(
        experiment=experiment,
        ttft_p50_s=ttft_p50_s,
        ttft_p90_s=ttft_p90_s,
        hit_rate=hit_rate,
        slo_attainment=slo_attainment,
        windows=windows,
        unrepeated=unrepeated,
        believable=believable,
        reason=reason,
    )


def _verdict(
    traffic: Traffic, counted: Sequence[RecordedRequest], reasons: list[str], windows: WindowShares, *, timed: bool
) -> tuple[bool | None, str]:
    """Return whether the simulation may be believed, None if nothing was measured, and why."""
    if traffic.sample < 1:
        reasons.append(f"the recording has only {traffic.sample:.4g} of the sessions")
    if not any(map(was_measured, counted)):
        return None, "the recording has no measurements"
    if not timed:
        return None, "the recording has no times to the first token, which streamed answers have"
    if reasons:
        return False, "; ".join(reasons)
    repeated = "the simulation repeats what was measured"
    if not windows.shares:
        return True, repeated
    alike = len(windows.shares) - len(windows.differing)
    return True, (
        f"{repeated}, and the share within the SLO in {alike} of {len(windows.shares)} windows "
        f"({window_text(windows.window_s)})"
    )


def _slos_s(experiment: Experiment, arrivals_s: Sequence[float]) -> list[float]:
    """Return the pool's SLO at each arrival."""
    changes = [event for event in experiment.events if isinstance(event, PoolChange)]
    times_s = [event.at_s for event in changes]
    slos_s = [experiment.slo_ttft_s, *(event.pool.slo.ttft_s for event in changes)]
    return [slos_s[bisect_right(times_s, at_s)] for at_s in arrivals_s]


def _is_within(ttft_s: float | None, slo_ttft_s: float) -> bool:
    return ttft_s is not None and ttft_s <= slo_ttft_s


def _hit_rate(pairs: Sequence[_Pair]) -> Figure:
    """Return the hit rate of the served requests of which an engine reported the cached tokens."""
    known = [
        (request.cached_tokens, request.engine_prompt_tokens, record)
        for request, record in pairs
        if request.cached_tokens is not None and request.engine_prompt_tokens
    ]
    served = [record for _, _, record in known if record.finished_s is not None]
    return Figure(
        measured=ratio(sum(cached for cached, _, _ in known), sum(prompt for _, prompt, _ in known)),
        simulated=ratio(
            sum(record.cached_tokens for record in served), sum(record.arrival.work.prompt_tokens for record in served)
        ),
    )
