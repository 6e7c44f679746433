"""Defines the cases, the kinds of knowledge, and the simulated cluster of each run.

Several routers decide by themselves in these runs, as without a connection to the pool's owner. With an owner, one
router has all records, so this case would measure the same as a single router.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from bench.replicas import FEEDBACK_DELAY_S, USUAL_PERIOD_S, loads_and_hotness, no_bindings
from bench.virtual import ENGINE, ENGINES, pool_of, trace_of

from dualmap.pools.pool import KvEvents, Pool, Prefix, Routing
from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.block_pool import EventBatch
from dualmap_sim.cluster import ClusterConfig, Replica, ReplicationConfig
from dualmap_sim.events import Bypass, Event, Fail, PoolChange, Recover
from dualmap_sim.presets import EngineConfig

BLOCK_TOKENS: Final = 64
"""The engines' block. The router's block is the trace's: 512 tokens (conversation) or 128 (default)."""
RATES: Final[Mapping[str, float]] = MappingProxyType({"conversation": 2.0, "default": 5.0})
"""Requests per second that the routers receive. With ample caches, round robin is not overloaded at these rates."""
ROUTERS: Final = 4
SMALL_TOKENS: Final[Mapping[str, int]] = MappingProxyType({"conversation": 150_000, "default": 80_000})
"""The memory of an engine in the case of small caches, for cached prefixes and the requests in flight together."""
AMPLE_TOKENS: Final = 4_000_000
BYPASS_EVERY: Final = 3
"""In the case of foreign traffic, one of this many requests bypasses the router."""
RESTARTS: Final = (0.3, 0.9)
"""In the case of restarts, the first and the last restart, as parts of the run. Each engine restarts once."""
DOWN_S: Final = 0.1


class Knowledge(StrEnum):
    """What a router knows about its engines' caches."""

    NONE = "round robin"
    RECORDS = "records"
    USAGE = "records and usage"
    EVENTS = "KV events"
    REFERENCE = "reference"
    """Records with the router's own means against the case: shared placements, or notice of each restart."""


class Case(StrEnum):
    """A situation in which a router's records can differ from the engines' caches, or in which they agree."""

    ROUTERS = "routers"
    RESTARTS = "restarts"
    BYPASS = "bypass"
    SMALL = "small"
    AMPLE = "ample"


SAYS: Final[Mapping[Case, str]] = MappingProxyType(
    {
        Case.ROUTERS: f"{ROUTERS} routers that decide by themselves, and share loads and hotness, and no placements",
        Case.RESTARTS: "each engine restarts once with an empty cache, and no router is told",
        Case.BYPASS: f"one request of {BYPASS_EVERY} reaches an engine without passing the router",
        Case.SMALL: "caches of "
        + " or ".join(f"{tokens:,} ({workload})" for workload, tokens in SMALL_TOKENS.items())
        + " tokens, which requests in flight share",
        Case.AMPLE: f"one router, and caches of {AMPLE_TOKENS:,} tokens, which evict nothing",
    }
)
REFERENCES: Final[Mapping[Case, str]] = MappingProxyType(
    {
        Case.ROUTERS: "records and usage, shared placements",
        Case.RESTARTS: "records and usage, restarts announced",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. ``sample`` is the window of the Conversation trace, or the seed of the default workload."""

    case: Case
    knowledge: Knowledge
    workload: str
    sample: int
    requests: int
    rate: float


def kinds(case: Case) -> Sequence[Knowledge]:
    """Return the kinds of knowledge that a case compares."""
    return [each for each in Knowledge if each is not Knowledge.REFERENCE or case in REFERENCES]


def cluster_of(run: Run) -> tuple[ClusterConfig, Sequence[Arrival]]:
    """Return the cluster of a run and the requests that its routers receive."""
    asked, foreign = _requests(run.workload, run.sample, run.requests, run.rate, run.case is Case.BYPASS)
    engine = _engine(run)
    pool = _pool(run, engine)
    several = run.case is Case.ROUTERS
    shared = no_bindings if run.knowledge is Knowledge.REFERENCE else loads_and_hotness
    return (
        ClusterConfig(
            pool=pool,
            engine=engine,
            events=(*foreign, *(_restarts(run, pool, asked[-1].at_s) if run.case is Case.RESTARTS else ())),
            replicas=(Replica(),) * (ROUTERS if several else 1),
            exchange=ReplicationConfig(period_s=USUAL_PERIOD_S, delay_s=USUAL_PERIOD_S / 2, carries=shared)
            if several
            else None,
            feedback_delay_s=FEEDBACK_DELAY_S,
            reports_cached_tokens=run.knowledge is not Knowledge.RECORDS,
            # All runs have the same engines, with physical blocks.
            on_kv_events=_ignore,
        ),
        asked,
    )


def _ignore(_member: str, _batch: EventBatch) -> None:
    pass


def _engine(run: Run) -> EngineConfig:
    sizes = {Case.SMALL: SMALL_TOKENS[run.workload], Case.AMPLE: AMPLE_TOKENS}
    tokens = sizes.get(run.case, ENGINE.cache_tokens)
    return replace(ENGINE, block_tokens=BLOCK_TOKENS, cache_tokens=tokens)


def _pool(run: Run, engine: EngineConfig) -> Pool:
    policy = "round_robin" if run.knowledge is Knowledge.NONE else "dualmap"
    block_tokens = trace_of(run.workload, run.sample, run.requests).block_tokens
    pool = pool_of(Routing(policy=policy, prefix=Prefix(block_tokens=block_tokens)))
    return replace(
        pool,
        engine=replace(
            pool.engine,
            # The router knows the size of the caches, as from the engines' metrics.
            cache_tokens=engine.cache_tokens,
            kv_tokens=min(engine.kv_memory_tokens, engine.cache_tokens - engine.block_tokens),
            kv_events=KvEvents(enabled=run.knowledge is Knowledge.EVENTS),
        ),
    )


def _restarts(run: Run, pool: Pool, lasts_s: float) -> list[Event]:
    events: list[Event] = []
    first, last = RESTARTS
    for number, member in enumerate(pool.members):
        at_s = lasts_s * (first + (last - first) * number / (ENGINES - 1))
        events += [Fail(at_s=at_s, member=member.id), Recover(at_s=at_s + DOWN_S, member=member.id)]
        if run.knowledge is Knowledge.REFERENCE:
            restarted = replace(member, incarnation="2")
            members = tuple(restarted if each.id == member.id else each for each in pool.members)
            pool = replace(pool, members=members)
            events.append(PoolChange(at_s=at_s + DOWN_S, pool=pool))
    return events


@lru_cache(maxsize=2)
def _requests(
    workload: str, sample: int, requests: int, rate: float, bypass: bool
) -> tuple[tuple[Arrival, ...], tuple[Bypass, ...]]:
    """Return the requests to the routers, and the requests that reach engines in another way."""
    trace = trace_of(workload, sample, requests)
    faster = rate * BYPASS_EVERY / (BYPASS_EVERY - 1) if bypass else rate
    every = arrivals(
        trace.at_rate(faster).without_sessions(),
        router_block_tokens=trace.block_tokens,
        engine_block_tokens=BLOCK_TOKENS,
    )
    if not bypass:
        return every, ()
    members = [member.id for member in pool_of(Routing()).members]
    foreign = tuple(
        Bypass(
            at_s=each.at_s,
            member=members[number % ENGINES],
            blocks=tuple(each.work.blocks[: each.work.prompt_tokens // BLOCK_TOKENS]),
        )
        for number, each in enumerate(every[::BYPASS_EVERY])
    )
    return tuple(each for number, each in enumerate(every) if number % BYPASS_EVERY), foreign
