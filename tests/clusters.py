"""Small simulated clusters for several tests: pools of ROUND engines, and constructed requests."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from builders import pool
from dualmap.pools.pool import Engine, Pool, Prefix, Queue, Routing
from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.cluster import Cluster, ClusterConfig, Record, Replica, ReplicationConfig
from dualmap_sim.events import Event
from dualmap_sim.presets import PRESETS, EngineConfig
from dualmap_sim.workloads.synthetic import default_workload
from dualmap_sim.workloads.trace import Trace, TraceRequest
from engines import ROUND

UNLIMITED = Queue(dispatch_window_s=inf)
SEVEN_B = PRESETS["7b"]


def one_block_prompts(*at_s: float, same: bool = False) -> tuple[Arrival, ...]:
    """Return prompts of 100 tokens, each with 1.5 s of prefill on a ROUND engine and two output tokens (0.25 s)."""
    requests = tuple(
        TraceRequest(arrival_s=each, blocks=(0 if same else number,), input_tokens=100, output_tokens=2)
        for number, each in enumerate(at_s)
    )
    return arrivals(
        Trace(name="by hand", block_tokens=100, requests=requests), router_block_tokens=10, engine_block_tokens=10
    )


def small_pool(members: int, *, policy: str = "least_loaded", queue: Queue = UNLIMITED) -> Pool:
    routing = Routing(policy=policy, queue=queue, prefix=Prefix(block_tokens=10))
    return replace(pool(members), routing=routing, engine=Engine(prefill_tokens_per_second=100.0))


def config(
    of: Pool,
    *,
    engine: EngineConfig = ROUND,
    routers: int = 1,
    exchange: ReplicationConfig | None = None,
    events: tuple[Event, ...] = (),
) -> ClusterConfig:
    return ClusterConfig(pool=of, engine=engine, replicas=(Replica(),) * routers, exchange=exchange, events=events)


def busy_config(routers: int, queue: Queue = UNLIMITED, *, policy: str = "dualmap", members: int = 8) -> ClusterConfig:
    """Return engines of the 7B model, with replication between several routers and a feedback delay of 10 ms."""
    exchange = ReplicationConfig() if routers > 1 else None
    of = pool(members, routing=Routing(policy=policy, queue=queue))
    return replace(config(of, engine=SEVEN_B, routers=routers, exchange=exchange), feedback_delay_s=0.01)


def busy_requests(requests: int = 200, *, rate: float = 12.0, seed: int = 1) -> tuple[Arrival, ...]:
    """Return the default workload, with a default rate slightly above the capacity of eight 7B engines."""
    trace = default_workload(requests, seed=seed).at_rate(rate)
    return arrivals(trace, router_block_tokens=128, engine_block_tokens=512)


def first_tokens(records: Sequence[Record]) -> list[float | None]:
    return [record.first_token_s for record in records]


def assert_each_ended_once(asked: Sequence[Arrival], records: Sequence[Record]) -> None:
    """Assert that every request was either served, rejected or failed, and that the token counts are consistent."""
    assert sorted(each.request_id for each in asked) == sorted(record.arrival.request_id for record in records)
    for record in records:
        served, refused = record.finished_s is not None, record.refused is not None
        assert served + refused + record.failed == 1, record
        assert (record.dispatched_s is None) == refused
        assert record.cached_tokens + record.pulled_tokens <= record.arrival.work.prompt_tokens
        if served:
            assert record.dispatched_s is not None
            assert record.first_token_s is not None
            assert record.finished_s is not None
            assert record.arrival.at_s <= record.dispatched_s <= record.first_token_s <= record.finished_s


def assert_books_empty(cluster: Cluster) -> None:
    """Assert that no router has load of any request."""
    for router in cluster.routers:
        status = router.status()
        assert status.held == 0
        for endpoint in status.endpoints:
            assert (endpoint.in_flight, endpoint.pending_prefill_tokens, endpoint.active_kv_tokens) == (0, 0, 0)
