"""One experiment: a workload at a rate, a policy, engines and an SLO, replayed in virtual time.

An ``Experiment`` is a value: equal experiments give equal outcomes on any machine. Another process can run an
experiment, and ``dataclasses.replace`` makes a variant. The fields are the variables of the DualMap paper's evaluation
(section 5).

``cluster`` and ``oracles`` replay the requests, and ``summary`` computes the figures. ``goodput`` searches over rates,
and ``parallel`` runs several experiments. Traces and prompts are cached per process. Runs that differ only in policy or
rate share the cached traces and prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from dualmap.pools.kv_store import KvStore
from dualmap.pools.pool import Engine, Member, Model, Pool, Routing, Slo
from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.cluster import Cluster, ClusterConfig, Replica, ReplicationConfig
from dualmap_sim.decoders import split
from dualmap_sim.events import Event
from dualmap_sim.lost_runs import LostRun
from dualmap_sim.oracles import ORACLES, run_oracle
from dualmap_sim.prefill_decode import SplitCluster, SplitConfig, split_pools
from dualmap_sim.presets import PRESETS, EngineConfig
from dualmap_sim.recordings.replays import Traffic, read_traffic
from dualmap_sim.records import LoadSample, Record
from dualmap_sim.shared_store import StoreConfig
from dualmap_sim.summary import Summary, summarise
from dualmap_sim.workloads.catalog import Workload
from dualmap_sim.workloads.scaling import scaled_sessions
from dualmap_sim.workloads.trace import Trace

_KEPT: Final = 4
"""Number of traces and prompts cached per process: an evaluation uses the windows of one or two workloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The settings of one experiment: workload, rate, engines, policy, and more.

    Prompts longer than the engine's maximum are cut (DualMap paper, A.2.1). Members have the ids ``qwen-0``,
    ``qwen-1``, ..., unless ``members`` has others.
    """

    requests_per_s: float
    workload: Workload = field(default_factory=Workload)
    policy: str = "dualmap"
    """A key of ``dualmap.policies.registry.POLICIES`` or of ``dualmap_sim.oracles.ORACLES``."""
    instances: int = 8
    members: tuple[Member, ...] | None = None
    """The members at the beginning of the run, without a prefill pool. None makes them of ``instances``."""
    engine: EngineConfig = PRESETS["7b"]
    engines: tuple[tuple[str, EngineConfig], ...] = ()
    """Members with an engine that differs from ``engine``, by member id."""
    decoders: int = 0
    """Number of the instances that only decode (``decoders.py``). The other instances only prefill; 0 for no split."""
    prefillers: int = 0
    """Number of the instances in a prefill pool (``prefill_decode.py``), 0 for none."""
    decode_policy: str | None = None
    """Policy of the pool with a prefill pool. None uses ``policy``, which is that of the prefill pool."""
    prefill_min_tokens: int = 512
    """Uncached tokens of a prompt that a decode member computes itself, if there is a prefill pool."""
    slo_ttft_s: float = 5.0
    warmup: int = 500
    """Number of requests at the start of the trace that are served but not counted."""
    routers: int = 1
    owner_decides: bool = True
    """Whether the pool's owner decides for all routers, instead of each router by itself."""
    hop_delay_s: float = 0.001
    """Delay of a message between two routers."""
    view_delay_s: float = 0.1
    """Mean age of a router's data about the other routers' requests."""
    feedback_delay_s: float = 0.0
    """Delay until a router receives a first token or a completion."""
    report_loss: float = 0.0
    """Share of first tokens and completions that are never reported."""
    routing: Routing = field(default_factory=Routing)
    """The pool's ``spec.routing`` except the policy and the block length, which the experiment sets."""
    pool_engine: Engine | None = None
    """The pool's ``spec.engine``, which may differ from ``engine``. None makes it of ``engine``."""
    block_tokens: int | None = None
    """Block length of the routers' keys and indexes. None uses the trace's length, which is exact and fastest."""
    sessions: bool = True
    """Whether requests carry their session id, if the workload has sessions."""
    kv_moves: bool = False
    """Whether an engine may pull a session's KV from the engine of the session's last request."""
    continues: bool = False
    """Whether a stream that its engine cuts continues on another engine, without a prefill pool."""
    store: StoreConfig | None = None
    """The KV store that the engines share; None for no store."""
    believed_tokens_per_s: float | None = None
    """Prefill speed in the pool's object for every member. None uses the real speed of ``engine``."""
    kv_tokens_known: bool = True
    """Whether the pool's object contains the engines' KV memory (``spec.engine.kvTokens``)."""
    discovery: bool = False
    """Whether the routers read the engines' memory and load, as they do by default.

    The pool's object then does not contain the size of the engines' caches.
    """
    events: tuple[Event, ...] = ()
    """What happens to the members, other than requests, without a prefill pool."""
    sample_s: float | None = 1.0
    """Virtual seconds between two samples of the engines' loads. None takes no samples, and the result has no CV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of an experiment.

    ``records`` and ``samples`` cover the full run; ``summary`` excludes the warm-up. If ``gave_up`` is true, the run
    ended early because it could no longer attain the share. The figures of such a run cover the time until its end.
    """

    summary: Summary
    records: tuple[Record, ...]
    samples: tuple[LoadSample, ...]
    gave_up: bool


def run_experiment(
    experiment: Experiment, *, stop_below: float | None = None, on_answer: Callable[[], None] | None = None
) -> Outcome:
    """Replay an experiment to its end.

    With ``stop_below``, a run ends as soon as its counted requests can no longer attain that share. The run calls
    ``on_answer`` at each first token or rejection, to show progress. Raises UnknownWorkload or TraceError if the
    workload cannot be loaded. Raises ValueError if the warm-up leaves no requests to count, or if an oracle gets
    engines that differ.
    """
    trace = load_trace(experiment)
    if not 0 <= experiment.warmup < len(trace.requests):
        raise ValueError(f"warmup={experiment.warmup}: the trace has only {len(trace.requests)} requests")
    asked = _arrivals(experiment, trace)
    lost = None
    if stop_below is not None:
        lost = LostRun(
            asked,
            warmup=experiment.warmup,
            slo_ttft_s=experiment.slo_ttft_s,
            attainment=stop_below,
            in_order=not trace.closed_loop,
        )

    def answered(record: Record) -> bool:
        if on_answer is not None:
            on_answer()
        return lost is not None and lost.gives_up(record)

    replay = _replay_oracle if experiment.policy in ORACLES else _replay
    records, samples, gave_up = replay(experiment, asked, answered)
    return Outcome(summary=_summarise(experiment, records, samples), records=records, samples=samples, gave_up=gave_up)


def load_trace(experiment: Experiment) -> Trace:
    """Return an experiment's trace with its prompts cut, at its recorded rate. Raises TraceError or RecordingError."""
    return _trace(experiment.workload, experiment.engine.input_tokens_max)


def load_workload(workload: Workload) -> Trace:
    """Return a workload's unchanged trace, loaded once per process.

    Raises UnknownWorkload, TraceError or RecordingError.
    """
    return _loaded(workload)


@lru_cache(maxsize=_KEPT)
def load_traffic(recording: Path, pool: str) -> Traffic:
    """Return the traffic of a pool of a recording, read once per process. Raises RecordingError."""
    return read_traffic(recording, pool)


def member_ids(instances: int) -> tuple[str, ...]:
    """Return the member ids of a pool with that number of instances."""
    return tuple(f"qwen-{number}" for number in range(instances))


_Replayed = tuple[tuple[Record, ...], tuple[LoadSample, ...], bool]


def _replay(experiment: Experiment, asked: Sequence[Arrival], gives_up: Callable[[Record], bool]) -> _Replayed:
    if experiment.prefillers:
        return _replay_split(experiment, asked, gives_up)
    engine, decode_side = _with_store(experiment, experiment.engine), None
    if experiment.decoders:
        engine, decode_side = split(engine, decoders=experiment.decoders)
    cluster = Cluster(
        ClusterConfig(
            pool=pool_of(experiment),
            engine=engine,
            decode_side=decode_side,
            engines={name: _with_store(experiment, each) for name, each in experiment.engines},
            replicas=(Replica(),) * experiment.routers,
            exchange=_exchange(experiment),
            hop_delay_s=experiment.hop_delay_s if experiment.routers > 1 and experiment.owner_decides else None,
            feedback_delay_s=experiment.feedback_delay_s,
            report_loss=experiment.report_loss,
            kv_moves=experiment.kv_moves,
            continues=experiment.continues,
            discovery=experiment.discovery,
            events=experiment.events,
            sample_s=experiment.sample_s,
            gives_up=gives_up,
        )
    )
    records = cluster.run(asked)
    return records, tuple(cluster.samples), cluster.gave_up


def _with_store(experiment: Experiment, engine: EngineConfig) -> EngineConfig:
    """Return an engine that fetches from the experiment's store."""
    store = experiment.store
    return engine if store is None else replace(engine, pull_tokens_per_s=store.tokens_per_s)


def _replay_split(experiment: Experiment, asked: Sequence[Arrival], gives_up: Callable[[Record], bool]) -> _Replayed:
    """Replay with a prefill pool, one router without delays, and no samples of the load."""
    engine = experiment.engine
    if experiment.routers > 1 or experiment.engines or experiment.decoders or experiment.kv_moves:
        raise ValueError("a prefill pool requires one router, equal engines and no sessions that move their KV")
    if experiment.store is not None:
        raise ValueError("a prefill pool has no KV store")
    if engine.decode is None or engine.pull_tokens_per_s is None:
        raise ValueError("a prefill pool requires an engine that decodes, with pull_tokens_per_s")
    pool = replace(pool_of(experiment), prefill_min_tokens=experiment.prefill_min_tokens)
    decode, prefill = split_pools(pool, prefillers=experiment.prefillers)
    if experiment.decode_policy is not None:
        decode = replace(decode, routing=replace(decode.routing, policy=experiment.decode_policy))
    cluster = SplitCluster(
        SplitConfig(
            decode=decode,
            prefill=prefill,
            engine=engine,
            transfer_tokens_per_s=engine.pull_tokens_per_s,
            gives_up=gives_up,
        )
    )
    return cluster.run(asked), (), cluster.gave_up


def _replay_oracle(experiment: Experiment, asked: Sequence[Arrival], gives_up: Callable[[Record], bool]) -> _Replayed:
    """Replay without routers: an oracle has no reports and no delays."""
    if experiment.engines or experiment.decoders or experiment.prefillers:
        raise ValueError(f"the bound {experiment.policy} requires equal engines")
    run = run_oracle(
        experiment.policy,
        engine=experiment.engine,
        instances=experiment.instances,
        arrivals=asked,
        slo_ttft_s=experiment.slo_ttft_s,
        gives_up=gives_up,
        sample_s=experiment.sample_s,
    )
    return run.records, run.samples, run.gave_up


def _summarise(experiment: Experiment, records: Sequence[Record], samples: Sequence[LoadSample]) -> Summary:
    """Return the figures of the counted requests, and of the load between the first and last of their arrivals.

    Samples after the last arrival are excluded, because the load is then uneven under every policy. A run that stopped
    before its first counted request is measured over all its requests.
    """
    counted = [record for record in records if int(record.arrival.request_id) >= experiment.warmup] or records
    first_s, last_s = counted[0].arrival.at_s, counted[-1].arrival.at_s
    return summarise(
        counted,
        slo_ttft_s=experiment.slo_ttft_s,
        samples=[sample for sample in samples if first_s <= sample.at_s <= last_s],
    )


def _exchange(experiment: Experiment) -> ReplicationConfig | None:
    """Return the replication settings for several routers, or None for one router.

    ``view_delay_s`` is the mean age of a router's data about the other routers. The mean age equals the delay plus half
    a period, the mean wait until the next update. So the period is ``view_delay_s``, and the delay is half of it.
    """
    if experiment.routers == 1:
        return None
    return ReplicationConfig(period_s=experiment.view_delay_s, delay_s=experiment.view_delay_s / 2)


def pool_of(experiment: Experiment) -> Pool:
    """Return an experiment's pool, at the beginning of the run."""
    trace = load_trace(experiment)
    block_tokens = experiment.block_tokens or trace.block_tokens
    return Pool(
        namespace="simulation",
        name="qwen",
        model=Model(name="qwen"),
        engine=_pool_engine(experiment),
        slo=Slo(ttft_s=experiment.slo_ttft_s),
        kv_store=KvStore() if experiment.store is None else experiment.store.spec(),
        routing=replace(
            experiment.routing,
            policy=experiment.policy,
            prefix=replace(experiment.routing.prefix, block_tokens=block_tokens),
        ),
        members=_members(experiment.instances - experiment.decoders)
        if experiment.members is None
        else experiment.members,
    )


def _members(instances: int) -> tuple[Member, ...]:
    return tuple(
        Member(id=name, address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", port=8000)
        for number, name in enumerate(member_ids(instances))
    )


def _pool_engine(experiment: Experiment) -> Engine:
    believed_tokens_per_s = experiment.believed_tokens_per_s
    if experiment.pool_engine is not None:
        known = experiment.pool_engine
        return replace(known, prefill_tokens_per_second=believed_tokens_per_s or known.prefill_tokens_per_second)
    return Engine(
        prefill_tokens_per_second=believed_tokens_per_s or experiment.engine.prefill.tokens_per_s,
        cache_tokens=Engine().cache_tokens if experiment.discovery else experiment.engine.cache_tokens,
        kv_tokens=experiment.engine.kv_memory_tokens if experiment.kv_tokens_known else None,
    )


def _arrivals(experiment: Experiment, trace: Trace) -> tuple[Arrival, ...]:
    """Return the requests with their arrival times at the experiment's rate."""
    paced = trace.at_rate(experiment.requests_per_s)
    router_block_tokens = experiment.block_tokens or trace.block_tokens
    engine_block_tokens = experiment.engine.block_tokens
    if trace.closed_loop:
        if not experiment.sessions:
            paced = paced.without_sessions()
        # Another rate may change the order of the requests, and so their numbers.
        return arrivals(paced, router_block_tokens=router_block_tokens, engine_block_tokens=engine_block_tokens)
    prompts = _prompts(
        experiment.workload,
        experiment.engine.input_tokens_max,
        router_block_tokens,
        engine_block_tokens,
        experiment.sessions,
    )
    return tuple(
        replace(prompt, at_s=request.arrival_s) for prompt, request in zip(prompts, paced.requests, strict=True)
    )


@lru_cache(maxsize=_KEPT)
def _loaded(workload: Workload) -> Trace:
    if workload.recording is None:
        return workload.load()
    trace = load_traffic(workload.recording, workload.recorded_pool).trace
    window = replace(trace, requests=trace.requests[workload.start :][: workload.requests])
    return window if workload.scale == 1 else scaled_sessions(window, workload.scale)


@lru_cache(maxsize=_KEPT)
def _trace(workload: Workload, input_tokens_max: int) -> Trace:
    return _loaded(workload).capped(input_tokens_max)


@lru_cache(maxsize=_KEPT)
def _prompts(
    workload: Workload, input_tokens_max: int, router_block_tokens: int, engine_block_tokens: int, sessions: bool
) -> tuple[Arrival, ...]:
    """Return the trace's requests with their block hashes, which take longer to compute than arrival times."""
    trace = _trace(workload, input_tokens_max)
    if not sessions:
        trace = trace.without_sessions()
    return arrivals(trace, router_block_tokens=router_block_tokens, engine_block_tokens=engine_block_tokens)
