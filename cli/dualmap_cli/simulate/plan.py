"""Turns options into experiments, and checks them before a run starts.

Each error is a click.BadParameter with the option, the value and the accepted values.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from dualmap.pools.pool import Pool, Slo
from dualmap_cli.simulate.engines import Assumed, check_equal, differing_members, engines_of, slow_ones
from dualmap_cli.simulate.pool_option import of_pool
from dualmap_cli.simulate.values import REQUESTS_MOST
from dualmap_cli.trace.warnings import warn, warn_of_error
from dualmap_sim.experiment import Experiment, load_trace, load_traffic, member_ids
from dualmap_sim.oracles import ORACLES
from dualmap_sim.presets import EngineConfig
from dualmap_sim.recordings.errors import RecordingError
from dualmap_sim.recordings.replays import SeveralPools, Traffic
from dualmap_sim.shared_store import StoreConfig
from dualmap_sim.workloads.catalog import Workload
from dualmap_sim.workloads.mooncake import TraceError
from dualmap_sim.workloads.statistics import decode_work_s, prefill_work_s

if TYPE_CHECKING:
    from dualmap_cli.engine_file import EngineFile

POLICIES_COMPARED: Final = ("round_robin", "dualmap")
INSTANCES: Final = 8
REQUESTS: Final = 4000
WARMUP: Final = 500
WARMUP_SHARE: Final = 0.25
_SAMPLES_MOST: Final = 2000
"""Maximum number of load samples of a run. In a chart, more samples would overlap."""
_TRANSFER_TOKENS_PER_S: Final = 100_000.0
"""The speed of KV from a prefill engine to a decode engine: 10 GB/s for 7b, which has 0.1 MB of KV per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of both commands. ``base`` is an experiment; its policy, workload and rate vary between runs."""

    policies: tuple[str, ...]
    base: Experiment
    windows: tuple[Workload, ...]
    pool: Pool | None
    """The pool of ``--pool`` or ``--recording``, whose settings ``base`` has."""
    traffic: Traffic | None
    """What ``--recording`` contains."""
    differing: Mapping[str, EngineConfig]
    """The engines of the members that differ in the file of ``--engine``, by member id."""
    assumed: Assumed
    """The parameters of the engine that are the preset's, or have no interval, though ``--engine`` gives a file."""
    repeats_members: bool
    """Whether runs have the recorded members, which join and leave at their times."""
    model: str
    """A key of ``PRESETS``. ``base`` has the preset's engine, with the changes of ``--set``."""
    processes: int
    plot: Path | None
    as_json: bool


def make_plan(
    *,
    trace_file: Path | None,
    recording: Path | None,
    pool_name: str | None,
    scale: float,
    workload: str | None,
    sessions: bool | None,
    requests: int | None,
    warmup: int | None,
    starts: Sequence[int],
    seeds: Sequence[int],
    pool: Pool | None,
    policies: tuple[str, ...] | None,
    instances: int | None,
    prefillers: int,
    model: str,
    engine_file: "EngineFile | None",
    parameters: Sequence[tuple[str, float]],
    slow: Sequence[tuple[str, float]],
    slo_ttft_s: float | None,
    routers: int,
    decide: str,
    hop_delay_s: float,
    view_delay_s: float,
    feedback_delay_s: float,
    believed_speed: float | None,
    store_tokens_per_s: float | None,
    processes: int | None,
    plot: Path | None,
    as_json: bool,
    repeats_members: bool = False,
    has_set: bool = True,
) -> Plan:
    """Read the options, load every window once, and check that the engines can serve it. Raises BadParameter.

    With ``repeats_members``, runs have the members of a recording, unless the options say otherwise. ``has_set`` says
    whether the command has the option ``--set``.
    """
    engine, differing = engines_of(model, engine_file, parameters)
    source = _source(trace_file, recording, pool_name, scale, workload, requests, starts)
    traffic = _traffic(source)
    if traffic is not None:
        pool = pool or traffic.pool
        if "cap" not in dict(parameters):
            engine = _accepting(engine, traffic)
            differing = {name: _accepting(each, traffic) for name, each in differing.items()}
    is_as_recorded = repeats_members and not (instances or prefillers)
    recorded_members = _recorded_members(traffic, pool) if is_as_recorded else ()
    if pool is None:
        policies = policies or POLICIES_COMPARED
    else:
        policies = policies or (pool.routing.policy,)
        instances = instances or (traffic.instances if traffic is not None and traffic.pool is pool else 0)
        instances = instances or len(pool.members)
        slo_ttft_s = slo_ttft_s or pool.slo.ttft_s
    instances, slo_ttft_s = instances or INSTANCES, slo_ttft_s or Slo().ttft_s
    if prefillers:
        _check_split(prefillers, instances, engine, apart=routers == 1 and not slow, policies=policies)
        engine = with_transfer(engine)
    base = Experiment(
        requests_per_s=1.0,
        workload=source,
        instances=instances,
        prefillers=prefillers,
        engine=engine,
        engines=slow_ones(slow, engine, recorded_members or member_ids(instances), policies)
        or differing_members(differing, recorded_members, instances),
        slo_ttft_s=slo_ttft_s,
        routers=routers,
        owner_decides=decide == "owner",
        hop_delay_s=hop_delay_s,
        view_delay_s=view_delay_s,
        feedback_delay_s=feedback_delay_s,
        sessions=_has_sessions(trace_file, traffic) if sessions is None else sessions,
        kv_moves=engine.pull_tokens_per_s is not None and not prefillers,
        believed_tokens_per_s=believed_speed,
        store=None if store_tokens_per_s is None else StoreConfig(tokens_per_s=store_tokens_per_s),
    )
    check_equal(differing, policies)
    if pool is not None:
        base = of_pool(base, pool)
    if traffic is not None:
        # The recorded blocks are those of the router, in tokens as the engines count them.
        base = replace(base, block_tokens=None)
    _check_moves(base, policies)
    windows = tuple(replace(base.workload, start=start, seed=seed) for start in starts for seed in seeds)
    shortest = min(_loaded(base, window, exactly=requests) for window in windows)
    for window in windows:
        _check_memory(replace(base, workload=window), dict(parameters), engine_file, has_set=has_set)
    return Plan(
        policies=policies,
        base=replace(base, workload=windows[0], warmup=_warmup(warmup, shortest)),
        windows=windows,
        pool=pool,
        traffic=traffic,
        differing=differing,
        assumed=Assumed.of(model, engine_file, parameters),
        repeats_members=bool(recorded_members),
        model=model,
        processes=processes or os.cpu_count() or 1,
        plot=plot,
        as_json=as_json,
    )


def with_transfer(engine: EngineConfig) -> EngineConfig:
    """Return an engine from which KV moves to a decode engine: at its own speed, or at the assumed one."""
    return replace(engine, pull_tokens_per_s=engine.pull_tokens_per_s or _TRANSFER_TOKENS_PER_S)


def _accepting(engine: EngineConfig, traffic: Traffic) -> EngineConfig:
    """Return an engine that computes every recorded prompt whole, because the recorded engines accepted them."""
    longest = max(each.input_tokens for each in traffic.trace.requests)
    return replace(engine, input_tokens_max=max(engine.input_tokens_max, longest))


def _recorded_members(traffic: Traffic | None, pool: Pool | None) -> tuple[str, ...]:
    """Return the members of a recorded pool that runs repeat; none for another pool, or with a prefill pool."""
    if traffic is None or pool is None or pool is not traffic.pool or pool.prefill_pool:
        return ()
    return traffic.members


def _check_moves(base: Experiment, policies: Sequence[str]) -> None:
    """Check that the options allow the experiment's store, or moves of KV between engines. Raises BadParameter."""
    if base.store is not None and base.kv_moves:
        raise click.BadParameter("the parameter pull has no effect with --kv-store; omit one", param_hint="--kv-store")
    if base.store is not None and base.prefillers:
        raise click.BadParameter("a prefill pool has no store; omit one of the options", param_hint="--kv-store")
    if base.store is not None and any(policy in ORACLES for policy in policies):
        raise click.BadParameter("the bounds have no store; omit --kv-store or them", param_hint="--kv-store")
    if base.kv_moves and not base.sessions:
        raise click.BadParameter(
            "the parameter pull moves the KV cache of sessions and needs session ids; give --sessions",
            param_hint="--set",
        )


def _warmup(asked: int | None, shortest: int) -> int:
    """Return the number of warm-up requests of windows of at least ``shortest`` requests. Raises BadParameter."""
    if asked is None:
        return default_warmup(shortest)
    if asked >= shortest:
        raise click.BadParameter(
            f"{asked} is not accepted; a window has only {shortest} requests, give less than {shortest}",
            param_hint="--warmup",
        )
    return asked


def default_warmup(requests: int) -> int:
    """Return the number of warm-up requests of so many."""
    return min(WARMUP, int(requests * WARMUP_SHARE))


def recorded_rate(experiment: Experiment) -> float | None:
    """Return the mean rate of a recording's window, at which its requests keep their times; None for other traces."""
    if experiment.workload.recording is None:
        return None
    trace = load_trace(experiment)
    return len(trace.requests) / trace.duration_s if trace.duration_s else None


def half_reuse_rate(experiment: Experiment) -> float:
    """Return the rate, to two digits, at which the engines are fully loaded if half of the reusable tokens are reused.

    At this rate a policy with less reuse becomes overloaded, and a policy with more reuse does not. So this rate shows
    the differences between policies.
    """
    trace, engine = load_trace(experiment), experiment.engine
    work_s = decode_work_s(trace, engine) + sum(
        prefill_work_s(trace, engine.prefill, ideally_cached=cached) / 2 for cached in (False, True)
    )
    rate = experiment.instances * len(trace.requests) / work_s
    return round(rate, 1 - math.floor(math.log10(rate)))


def sample_s(experiment: Experiment) -> float:
    """Return the interval between load samples: one second, or longer for a long run.

    A run is long if the requests arrive over a long time, or if the engines need a long time for them.
    """
    trace, engine = load_trace(experiment), experiment.engine
    arriving_s = len(trace.requests) / experiment.requests_per_s
    work_s = prefill_work_s(trace, engine.prefill, ideally_cached=False) + decode_work_s(trace, engine)
    return max(1.0, arriving_s / _SAMPLES_MOST, work_s / experiment.instances / _SAMPLES_MOST)


def _source(
    trace_file: Path | None,
    recording: Path | None,
    pool_name: str | None,
    scale: float,
    workload: str | None,
    requests: int | None,
    starts: Sequence[int],
) -> Workload:
    """Return the workload that contains the windows. Raises UsageError or BadParameter."""
    if sum(each is not None for each in (trace_file, recording, workload)) > 1:
        raise click.UsageError("--trace, --recording and --workload exclude each other; give one of them")
    if pool_name is not None and recording is None:
        raise click.UsageError("--pool-name needs --recording")
    if scale != 1 and recording is None:
        raise click.UsageError("--scale needs --recording")
    if recording is not None:
        return Workload(
            recording=recording, recorded_pool=pool_name or "", scale=scale, requests=requests or REQUESTS_MOST
        )
    requests = requests or REQUESTS
    if trace_file is None and (most := max(starts) + requests) > REQUESTS_MOST:
        raise click.BadParameter(
            f"the window ends at request {most}; give a window that ends at request {REQUESTS_MOST} or earlier",
            param_hint="--start and --requests",
        )
    return Workload(name=workload or "default", trace=trace_file, requests=requests)


def _has_sessions(trace_file: Path | None, traffic: Traffic | None) -> bool:
    """Return whether the requests name their sessions, as all generated ones do."""
    if traffic is not None:
        return any(request.session is not None for request in traffic.requests)
    return trace_file is None


def _traffic(workload: Workload) -> Traffic | None:
    """Return what a recording contains, None for another workload. Raises BadParameter."""
    if workload.recording is None:
        return None
    try:
        traffic = load_traffic(workload.recording, workload.recorded_pool)
    except SeveralPools as error:
        warn_of_error(error)
        raise click.BadParameter(str(error), param_hint="--pool-name") from error
    except RecordingError as error:
        warn_of_error(error)
        raise click.BadParameter(str(error), param_hint="--recording") from error
    warn(traffic.reading)
    if traffic.unknown_outputs:
        click.echo(
            f"warning: {traffic.unknown_outputs:,} of {len(traffic.requests):,} answers have no recorded length; the "
            "mean length of the others is simulated for them",
            err=True,
        )
    return traffic


def _check_split(
    prefillers: int, instances: int, engine: EngineConfig, *, apart: bool, policies: Sequence[str]
) -> None:
    """Check that the other options allow a prefill pool. Raises BadParameter."""
    problem = ""
    if prefillers >= instances:
        problem = f"give less than the {instances} of --instances, because an engine must decode"
    elif engine.decode is None:
        problem = "the engines of this --model do not decode; give another --model"
    elif not apart:
        problem = "omit --routers and --slow"
    elif any(policy in ORACLES for policy in policies):
        problem = "theoretical bounds have no prefill pool; omit them in --policy"
    if problem:
        raise click.BadParameter(f"{prefillers} is not accepted; {problem}", param_hint="--prefill-instances")


def _loaded(base: Experiment, window: Workload, *, exactly: int | None) -> int:
    """Load a window and check it; return the number of its requests."""
    try:
        trace = load_trace(replace(base, workload=window))
    except TraceError as error:
        raise click.BadParameter(str(error), param_hint="--trace") from error
    if not trace.requests and window.scale == 1:
        raise click.BadParameter(
            f"{window.start} is not accepted; {window.recording} has no request {window.start}, give a lower number",
            param_hint="--start",
        )
    if not trace.requests:
        raise click.BadParameter(
            f"{window.scale:g} is not accepted; no session of the recording is left, give more", param_hint="--scale"
        )
    if exactly is not None and window.scale == 1 and len(trace.requests) < exactly:
        raise click.BadParameter(
            f"{exactly} is not accepted; {window.trace or window.recording} has {len(trace.requests)} requests from "
            f"request {window.start} on, give {len(trace.requests)} or less",
            param_hint="--requests",
        )
    if trace.closed_loop and not base.sessions:
        raise click.BadParameter(
            f"the closed-loop workload {window.name} needs session ids; omit --no-sessions",
            param_hint="--no-sessions",
        )
    return len(trace.requests)


def _check_memory(
    base: Experiment, parameters: Mapping[str, float], file: "EngineFile | None", *, has_set: bool
) -> None:
    """Check that an engine has the memory for each request. Raises BadParameter for the option that gave the memory."""
    needed = max(request.input_tokens + request.output_tokens for request in load_trace(base).requests)
    memory = base.engine.kv_memory_tokens
    if needed <= memory:
        return
    if "m" in parameters:
        hint = "--set"
    else:
        hint = "--engine" if file is not None and "m" in dict(file.parameters) else "--model"
    give = "give a file of --engine with" if not has_set else "give" if hint == "--set" else "give --set"
    cap = ", or a lower cap (maximum length of a prompt)" if has_set else ""
    raise click.BadParameter(
        f"the engine has m={memory} tokens of KV memory, and a request of this workload needs {needed}; {give} "
        f"m={needed} or more{cap}",
        param_hint=hint,
    )
