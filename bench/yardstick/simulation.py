"""Runs this project's router on the simulator, with the engine of the yardstick."""

import gc
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from bench.virtual import pool_of
from bench.yardstick.setting import BLOCK_TOKENS, KV_TOKENS, Costs, Served, engine

from dualmap.pools.pool import KvEvents, Pool, Prefix, Routing, Slo
from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.block_pool import EventBatch
from dualmap_sim.cluster import Cluster, ClusterConfig
from dualmap_sim.workloads.trace import Trace

SLO_TTFT_S: Final = 5.0
"""The pool's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy, and what differs from the shipped defaults: no queue in the router, or KV events of the engines."""

    policy: str
    queues: bool = True
    kv_events: bool = False


def simulate(trace: Trace, variant: Variant, costs: Costs) -> list[Served]:
    """Replay a paced trace; return the requests in order of arrival."""
    gc.collect()
    pool = _pool(variant, costs)
    cluster = Cluster(ClusterConfig(pool=pool, engine=engine(costs), on_kv_events=_ignore))
    workers = {member.endpoint: number for number, member in enumerate(pool.members)}
    served = []
    for record in cluster.run(router_requests(trace)):
        assert record.ttft_s is not None, f"{record.arrival.request_id} was not served"
        assert record.endpoint is not None, f"{record.arrival.request_id} was not sent"
        served.append(
            Served(
                number=int(record.arrival.request_id),
                worker=workers[record.endpoint],
                arrival_s=record.arrival.at_s,
                ttft_s=record.ttft_s,
                prompt_tokens=record.arrival.work.prompt_tokens,
                cached_tokens=record.cached_tokens,
            )
        )
    return served


def _ignore(_member: str, _batch: EventBatch) -> None:
    """With a reader of KV events, the simulated engines have physical blocks, as the mocker has."""


def _pool(variant: Variant, costs: Costs) -> Pool:
    pool = pool_of(Routing(policy=variant.policy, prefix=Prefix(block_tokens=BLOCK_TOKENS)))
    pool = replace(
        pool,
        slo=Slo(ttft_s=SLO_TTFT_S),
        engine=replace(
            pool.engine,
            prefill_tokens_per_second=engine(costs).prefill.tokens_per_s,
            cache_tokens=KV_TOKENS,
            kv_tokens=KV_TOKENS - BLOCK_TOKENS,
            kv_events=KvEvents(enabled=variant.kv_events),
        ),
    )
    return pool if variant.queues else pool.never_queueing()


@lru_cache(maxsize=1)
def router_requests(trace: Trace) -> tuple[Arrival, ...]:
    """Return a trace's requests as this project's router receives them."""
    return arrivals(trace, router_block_tokens=BLOCK_TOKENS, engine_block_tokens=BLOCK_TOKENS)
