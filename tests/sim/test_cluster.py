"""The cluster in virtual time: by hand on small cases, and what must hold of every run."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from builders import pool
from dualmap.hotness import HotnessCounts
from dualmap.news import News, SharedBinding
from dualmap.pool import Engine, Pool, Prefix, Queue, Routing
from dualmap.requests import Decision, Held, Reason, Request
from dualmap_sim import cluster as cluster_module
from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.cluster import Cluster, ClusterConfig, Exchange, Record, Replica
from dualmap_sim.presets import PRESETS, EngineConfig
from dualmap_sim.summary import summarise
from dualmap_sim.workloads.synthetic import default_workload
from dualmap_sim.workloads.trace import Trace, TraceRequest
from engines import ROUND

UNLIMITED = Queue(dispatch_window_s=inf)
SEVEN_B = PRESETS["7b"]


def one_block_prompts(*at_s: float, same: bool = False) -> tuple[Arrival, ...]:
    """Prompts of 100 tokens, 1.5 s each on a ROUND engine, with two tokens of output (0.25 s)."""
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
    of: Pool, *, engine: EngineConfig = ROUND, routers: int = 1, exchange: Exchange | None = None
) -> ClusterConfig:
    return ClusterConfig(pool=of, engine=engine, replicas=(Replica(),) * routers, exchange=exchange)


def first_tokens(records: Sequence[Record]) -> list[float | None]:
    return [record.first_token_s for record in records]


def busy_run(routers: int, queue: Queue, *, exchange: Exchange | None = None) -> tuple[Cluster, tuple[Record, ...]]:
    """The default workload, faster than eight 7B engines can serve it for long."""
    asked = arrivals(default_workload(200, seed=1).at_rate(12.0), router_block_tokens=128, engine_block_tokens=512)
    cluster = Cluster(
        replace(
            config(pool(8, routing=Routing(queue=queue)), engine=SEVEN_B, routers=routers, exchange=exchange),
            feedback_delay_s=0.01,
        )
    )
    return cluster, cluster.run(asked)


def test_one_engine_serves_in_order_and_the_times_are_the_engines() -> None:
    records = Cluster(config(small_pool(1))).run(one_block_prompts(0.0, 1.0))
    assert first_tokens(records) == [1.5, 3.0]
    assert [record.finished_s for record in records] == [1.75 + 1.5, 3.25]
    assert [record.ttft_s for record in records] == [1.5, 2.0]


def test_the_routers_index_follows_what_it_was_told() -> None:
    records = Cluster(config(small_pool(4, policy="dualmap"))).run(one_block_prompts(0.0, 10.0, 20.0, same=True))
    assert len({record.endpoint for record in records}) == 1
    assert [record.cached_tokens for record in records] == [0, 90, 90]


def test_what_is_held_goes_out_when_the_first_token_was_heard_of() -> None:
    # The router takes the engine for ten times slower than it is, so only news of a first token opens the window.
    slow = Engine(prefill_tokens_per_second=10.0)
    held = replace(small_pool(1, queue=Queue(dispatch_window_s=0.1)), engine=slow)
    first, second = Cluster(replace(config(held), feedback_delay_s=0.25)).run(one_block_prompts(0.0, 0.5))
    assert (first.held, second.held) == (False, True)
    assert second.dispatched_s == 1.75
    # The engine had been idle since the first request's end at that very moment.
    assert second.first_token_s == 1.75 + 1.5


def test_what_is_held_goes_out_when_the_window_opens_by_time() -> None:
    known = replace(small_pool(1, queue=Queue(dispatch_window_s=0.1)), engine=Engine(prefill_tokens_per_second=100.0))
    _, second = Cluster(config(known)).run(one_block_prompts(0.0, 0.5))
    assert second.dispatched_s == pytest.approx(0.9, abs=0.01)


def test_a_refused_request_is_refused_once_and_never_served() -> None:
    queue = Queue(dispatch_window_s=0.1, max_held=1)
    records = Cluster(config(small_pool(1, queue=queue))).run(one_block_prompts(0.0, 0.1, 0.2))
    assert [record.refused for record in records] == [None, None, Reason.QUEUE_FULL]
    assert records[2].ttft_s is None
    summary = summarise(records, slo_ttft_s=10.0)
    assert (summary.requests, summary.refused, summary.held_share) == (3, 1, pytest.approx(1 / 3))
    assert summary.slo_attainment == pytest.approx(2 / 3)


def test_routers_that_share_nothing_do_not_see_each_others_load() -> None:
    """Two routers, two engines, the least loaded: blind to each other they both begin with the same engine."""
    asked = one_block_prompts(*[0.2 * number for number in range(20)])
    alone = Cluster(config(small_pool(2))).run(asked)
    blind = Cluster(config(small_pool(2), routers=2)).run(asked)
    told = Cluster(config(small_pool(2), routers=2, exchange=Exchange(period_s=0.01, delay_s=0.0))).run(asked)
    assert {record.router for record in told} == {0, 1}
    assert summarise(told, slo_ttft_s=1).ttft_p99_s == summarise(alone, slo_ttft_s=1).ttft_p99_s
    assert summarise(blind, slo_ttft_s=1).ttft_p99_s > summarise(alone, slo_ttft_s=1).ttft_p99_s


def test_news_that_comes_too_late_is_as_good_as_none() -> None:
    asked = one_block_prompts(*[0.2 * number for number in range(15)])
    blind = Cluster(config(small_pool(2), routers=2)).run(asked)
    late = Cluster(config(small_pool(2), routers=2, exchange=Exchange(period_s=0.01, delay_s=2.9))).run(asked)
    assert first_tokens(late) == first_tokens(blind)


def placements_only(news: News) -> News:
    return News(hotness=HotnessCounts(requests=0, nodes={}), loads={}, placements=news.placements)


def test_an_exchange_carries_what_it_is_said_to() -> None:
    exchange = Exchange(period_s=0.01, delay_s=0.0, carries=placements_only)
    cluster = Cluster(config(small_pool(2), routers=2, exchange=exchange))
    asked = one_block_prompts(*[0.2 * number for number in range(20)])
    records = cluster.run(asked)
    assert first_tokens(records) == first_tokens(Cluster(config(small_pool(2), routers=2)).run(asked))
    seen = [{each.id: each.indexed_blocks for each in router.status().endpoints} for router in cluster.routers]
    assert seen[0] == seen[1]
    assert sum(seen[0].values()) == 20 * 10


@pytest.mark.parametrize(("replay_s", "blocks"), [(0.0, 10), (3.0, 40), (100.0, 110)])
def test_a_router_that_joins_knows_what_was_replayed_to_it(replay_s: float, blocks: int) -> None:
    """One request a second; the second router joins at 9.5 s, and its own and the other's later ones it hears of."""
    joining = replace(
        config(small_pool(2), exchange=Exchange(period_s=0.1, delay_s=0.0)),
        # The third never comes, but has the cluster remember everything for it.
        replicas=(Replica(), Replica(at_s=9.5, replay_s=replay_s), Replica(at_s=1000.0, replay_s=1000.0)),
    )
    cluster = Cluster(joining)
    records = cluster.run(one_block_prompts(*range(11)))
    assert all(record.router == 0 for record in records[:10])
    assert sum(each.indexed_blocks for each in cluster.routers[1].status().endpoints) == blocks


def test_the_store_tells_a_router_what_it_wants_to_know_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, SharedBinding]] = []

    class Listens(cluster_module.PoolRouter):
        def on_bindings(self, now: float, bindings: Sequence[SharedBinding]) -> None:
            told.extend((now, binding) for binding in bindings)
            super().on_bindings(now, bindings)

    monkeypatch.setattr(cluster_module, "PoolRouter", Listens)
    asked = one_block_prompts(*range(11))
    in_session = (replace(asked[0], session=7), *asked[1:10], replace(asked[10], session=7))
    joining = replace(
        config(small_pool(1), exchange=Exchange(period_s=0.1, delay_s=0.02)),
        replicas=(Replica(), Replica(at_s=9.5)),
    )
    records = Cluster(joining).run(in_session)
    assert records[10].router == 1
    (now, binding), *_ = told
    # Asked at the router's tick after the request at 10 s; the session had been bound at the very beginning.
    assert now == pytest.approx(10.05 + 0.02)
    assert (binding.session, binding.host, binding.version) == (7, joining.pool.members[0].id, 0)
    assert binding.moved_ago_s == pytest.approx(10.05)


@pytest.mark.parametrize("routers", [1, 3])
@pytest.mark.parametrize("queue", [UNLIMITED, Queue(dispatch_window_s=0.25), Queue(max_held=5, max_wait_s=1.0)])
def test_every_request_ends_once_and_nothing_is_left_in_any_router(routers: int, queue: Queue) -> None:
    cluster, records = busy_run(routers, queue, exchange=Exchange() if routers > 1 else None)
    assert [record.arrival.request_id for record in records] == [str(number) for number in range(200)]
    for record in records:
        assert (record.finished_s is None) == (record.refused is not None)
        assert (record.dispatched_s is None) == (record.refused is not None)
    for router in cluster.routers:
        status = router.status()
        assert status.held == 0
        for endpoint in status.endpoints:
            assert (endpoint.in_flight, endpoint.pending_prefill_tokens, endpoint.active_kv_tokens) == (0, 0, 0)


def test_equal_configurations_give_equal_records() -> None:
    runs = [busy_run(2, Queue(), exchange=Exchange())[1] for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_request_that_a_router_loses_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loses(cluster_module.PoolRouter):
        def on_request(self, now: float, request: Request) -> Decision | Held:  # type: ignore[override]  # narrower
            return Held(request_id=request.id)

    monkeypatch.setattr(cluster_module, "PoolRouter", Loses)
    with pytest.raises(AssertionError, match="1 requests never end"):
        Cluster(config(small_pool(1), exchange=Exchange())).run(one_block_prompts(0.0))


def two_block_trace(input_tokens: int, blocks: tuple[int, ...]) -> Trace:
    request = TraceRequest(arrival_s=0.0, blocks=blocks, input_tokens=input_tokens, output_tokens=1)
    return Trace(name="t", block_tokens=128, requests=(request,))


def test_prompts_share_block_hashes_exactly_as_far_as_their_ids_agree() -> None:
    def hashes(input_tokens: int, *blocks: int) -> tuple[int, ...]:
        (arrival,) = arrivals(two_block_trace(input_tokens, blocks), router_block_tokens=64, engine_block_tokens=256)
        return arrival.chain.hashes

    assert len(hashes(256, 1, 2)) == 4
    assert hashes(256, 1, 2)[:2] == hashes(256, 1, 3)[:2]
    assert not set(hashes(256, 1, 2)[2:]) & set(hashes(256, 1, 3)[2:])
    assert hashes(200, 1, 2)[:3] == hashes(256, 1, 2)[:3]
    assert hashes(200, 1, 2)[3] != hashes(256, 1, 2)[3]


def test_router_and_engine_cut_the_same_prompt_at_their_own_lengths() -> None:
    (arrival,) = arrivals(two_block_trace(200, (1, 2)), router_block_tokens=50, engine_block_tokens=256)
    assert (len(arrival.chain.hashes), len(arrival.chain.cacheable), len(arrival.work.blocks)) == (4, 4, 1)
    assert arrival.chain.tokens == arrival.work.prompt_tokens == 200
