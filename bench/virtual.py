"""Code shared by the benchmarks in virtual time: two workloads, runs in two processes, and figures with their spread.

Times are model times, so the machine and its load affect only the duration of a benchmark.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from bench.known_times import known_times

from dualmap.pools.pool import Engine, Member, Model, Pool, Routing
from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.cluster import Cluster, ClusterConfig, Record, Replica, ReplicationConfig
from dualmap_sim.presets import PRESETS
from dualmap_sim.summary import Summary, summarise
from dualmap_sim.workloads.catalog import WORKLOADS
from dualmap_sim.workloads.mooncake import read_mooncake
from dualmap_sim.workloads.sessions import label_sessions
from dualmap_sim.workloads.trace import Trace

CONVERSATION = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
ENGINE = PRESETS["7b"]
ENGINES = 8
SLO_TTFT_S = 5.0
REQUESTS = 2000
QUICK_REQUESTS = 1000
WARMUP = 500
PROCESSES = 2

Input = TypeVar("Input")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. ``sample`` is the window of the Conversation trace (0 to 5), or the seed of a generated workload."""

    workload: str
    sample: int
    rate: float
    routing: Routing = field(default_factory=Routing)
    replicas: tuple[Replica, ...] = (Replica(),)
    exchange: ReplicationConfig | None = None
    hop_delay_s: float | None = None
    """Delay of a message between two routers, if the pool's owner decides. None: each router decides by itself."""
    late_hops: float = 0.0
    feedback_delay_s: float = 0.0
    sessions: bool = False
    requests: int = REQUESTS
    discovery: bool = False
    kv_tokens_known: bool = True
    """Whether the pool's object contains the engines' KV memory."""
    times_known: bool = False
    """Whether the routers know every prefill time exactly, and learn none."""


def workloads() -> tuple[str, ...]:
    """Return the available workloads, and print the missing ones."""
    if CONVERSATION.exists():
        return ("conversation", "default")
    print(f"conversation is skipped: there is no {CONVERSATION}\n")
    return ("default",)


def run(case: Case) -> tuple[Record, ...]:
    """Run a case; return a record of every request, including the warm-up requests."""
    trace = trace_of(case.workload, case.sample, case.requests)
    replayed = _arrivals(case.workload, case.sample, case.requests, case.rate, case.sessions)
    gc.collect()
    routing = replace(case.routing, prefix=replace(case.routing.prefix, block_tokens=trace.block_tokens))
    pool = pool_of(routing)
    if not case.kv_tokens_known:
        pool = replace(pool, engine=replace(pool.engine, kv_tokens=None))
    cluster = Cluster(
        ClusterConfig(
            pool=pool,
            engine=ENGINE,
            replicas=case.replicas,
            exchange=case.exchange,
            hop_delay_s=case.hop_delay_s,
            late_hops=case.late_hops,
            feedback_delay_s=case.feedback_delay_s,
            discovery=case.discovery,
        )
    )
    with known_times(ENGINE.prefill) if case.times_known else nullcontext():
        return cluster.run(replayed)


def measure(case: Case) -> Summary:
    """Run a case and return its figures without the warm-up."""
    return summarise(run(case)[WARMUP:], slo_ttft_s=SLO_TTFT_S)


def run_all(of: Callable[[Input], Result], cases: Sequence[Input]) -> list[Result]:
    """Apply a measurement to every case, in two processes, with the progress on stderr."""
    results = []
    # Garbage collection is off, because a run's objects stay in use until its end.
    with get_context("fork").Pool(PROCESSES, initializer=gc.disable) as pool:
        for number, result in enumerate(pool.imap(of, cases), start=1):
            results.append(result)
            print(f"\r{number} of {len(cases)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def percent(values: Iterable[float]) -> str:
    """Format the mean of some shares in percent, with the lowest and the highest value."""
    return _spread([100 * value for value in values], digits=1)


def seconds(values: Iterable[float]) -> str:
    """Format the mean of some times in seconds, with the lowest and the highest value."""
    return _spread(list(values), digits=2)


def _spread(values: list[float], *, digits: int) -> str:
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def pool_of(routing: Routing) -> Pool:
    """Return a pool of ENGINES members."""
    return Pool(
        namespace="bench",
        name="qwen",
        model=Model(name="qwen"),
        engine=Engine(
            prefill_tokens_per_second=ENGINE.prefill.tokens_per_s,
            cache_tokens=ENGINE.cache_tokens,
            kv_tokens=ENGINE.kv_memory_tokens,
        ),
        routing=routing,
        members=tuple(Member(id=f"qwen-{n}", address=f"10.0.0.{n + 1}", port=8000) for n in range(ENGINES)),
    )


@cache
def trace_of(workload: str, sample: int, requests: int) -> Trace:
    """Return a sample of a workload, with prompts that fit into the engines."""
    if workload == "conversation":
        trace = label_sessions(read_mooncake(CONVERSATION, start=sample * REQUESTS, limit=requests))
    else:
        trace = WORKLOADS[workload](requests, seed=sample)
    return trace.capped(ENGINE.input_tokens_max)


@cache
def _arrivals(workload: str, sample: int, requests: int, rate: float, sessions: bool) -> tuple[Arrival, ...]:
    trace = trace_of(workload, sample, requests).at_rate(rate)
    if not sessions:
        trace = trace.without_sessions()
    return arrivals(trace, router_block_tokens=trace.block_tokens, engine_block_tokens=ENGINE.block_tokens)
