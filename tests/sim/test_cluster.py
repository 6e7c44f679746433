"""Tests of the simulated cluster: small cases with calculated results, and invariants of every run."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from clusters import (
    UNLIMITED,
    assert_books_empty,
    assert_each_ended_once,
    busy_config,
    busy_requests,
    config,
    first_tokens,
    one_block_prompts,
    small_pool,
)
from dualmap.pools.pool import Engine, Queue
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedBinding
from dualmap.requests import Decision, Effects, Queued, Reason, Rejection, Request
from dualmap.router import PoolRouter
from dualmap_sim import cluster as cluster_module
from dualmap_sim.cluster import Cluster, Record, Replica, ReplicationConfig
from dualmap_sim.summary import summarise
from engines import ROUND


def test_cluster_with_one_engine_reports_engine_times() -> None:
    records = Cluster(config(small_pool(1))).run(one_block_prompts(0.0, 1.0))
    assert first_tokens(records) == [1.5, 3.0]
    assert [record.finished_s for record in records] == [1.75 + 1.5, 3.25]
    assert [record.ttft_s for record in records] == [1.5, 2.0]


def test_router_index_updates_with_reported_events() -> None:
    records = Cluster(config(small_pool(4, policy="dualmap"))).run(one_block_prompts(0.0, 10.0, 20.0, same=True))
    assert len({record.endpoint for record in records}) == 1
    assert [record.cached_tokens for record in records] == [0, 90, 90]


def test_queued_request_is_dispatched_after_first_token() -> None:
    # The router's estimate of the engine's speed is ten times too low, so only the report of a first token opens the
    # window.
    slow = Engine(prefill_tokens_per_second=10.0)
    held = replace(small_pool(1, queue=Queue(dispatch_window_s=0.1)), engine=slow)
    first, second = Cluster(replace(config(held), feedback_delay_s=0.25)).run(one_block_prompts(0.0, 0.5))
    assert (first.held, second.held) == (False, True)
    assert second.dispatched_s == 1.75
    # The engine is idle at the dispatch, because the first request has ended at this moment.
    assert second.first_token_s == 1.75 + 1.5


def test_queued_request_is_dispatched_when_window_opens() -> None:
    known = replace(small_pool(1, queue=Queue(dispatch_window_s=0.1)), engine=Engine(prefill_tokens_per_second=100.0))
    _, second = Cluster(config(known)).run(one_block_prompts(0.0, 0.5))
    assert second.dispatched_s == pytest.approx(0.9, abs=0.01)


def test_rejected_request_is_never_sent_to_an_engine() -> None:
    queue = Queue(dispatch_window_s=0.1, max_held=1)
    records = Cluster(config(small_pool(1, queue=queue))).run(one_block_prompts(0.0, 0.1, 0.2))
    assert [record.refused for record in records] == [None, None, Reason.QUEUE_FULL]
    assert records[2].ttft_s is None
    summary = summarise(records, slo_ttft_s=10.0)
    assert (summary.requests, summary.refused) == (3, 1)
    assert summary.held_share == pytest.approx(1 / 3)
    assert summary.slo_attainment == pytest.approx(2 / 3)


def test_routers_without_replication_ignore_load_of_other_routers() -> None:
    """Two routers with the policy least_loaded and two engines. Without replication, both routers choose the same
    engine first.
    """
    asked = one_block_prompts(*[0.2 * number for number in range(20)])
    alone = Cluster(config(small_pool(2))).run(asked)
    blind = Cluster(config(small_pool(2), routers=2)).run(asked)
    told = Cluster(config(small_pool(2), routers=2, exchange=ReplicationConfig(period_s=0.01, delay_s=0.0))).run(asked)
    assert {record.router for record in told} == {0, 1}
    assert summarise(told, slo_ttft_s=1).ttft_p99_s == summarise(alone, slo_ttft_s=1).ttft_p99_s
    assert summarise(blind, slo_ttft_s=1).ttft_p99_s > summarise(alone, slo_ttft_s=1).ttft_p99_s


def test_late_replication_update_has_no_effect() -> None:
    asked = one_block_prompts(*[0.2 * number for number in range(15)])
    blind = Cluster(config(small_pool(2), routers=2)).run(asked)
    late = Cluster(config(small_pool(2), routers=2, exchange=ReplicationConfig(period_s=0.01, delay_s=2.9))).run(asked)
    assert first_tokens(late) == first_tokens(blind)


def placements_only(update: ReplicaUpdate) -> ReplicaUpdate:
    return ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads={}, placements=update.placements)


def test_routers_without_news_exchange_only_keep_alives() -> None:
    sent: list[ReplicaUpdate] = []

    def record(update: ReplicaUpdate) -> ReplicaUpdate:
        sent.append(update)
        return update

    exchange = ReplicationConfig(period_s=0.001, delay_s=0.0, carries=record)
    Cluster(config(small_pool(2), routers=2, exchange=exchange)).run(one_block_prompts(0.0, 10.0))
    assert sum(len(update.placements) for update in sent) == 2
    # About one update a second and router, and one for each event.
    assert len(sent) < 2 * 12 + 2 * 4


def test_replica_exchange_sends_only_the_selected_updates() -> None:
    exchange = ReplicationConfig(period_s=0.01, delay_s=0.0, carries=placements_only)
    cluster = Cluster(config(small_pool(2), routers=2, exchange=exchange))
    asked = one_block_prompts(*[0.2 * number for number in range(20)])
    records = cluster.run(asked)
    assert first_tokens(records) == first_tokens(Cluster(config(small_pool(2), routers=2)).run(asked))
    seen = [{each.id: each.indexed_blocks for each in router.status().endpoints} for router in cluster.routers]
    assert seen[0] == seen[1]
    assert sum(seen[0].values()) == 20 * 10


@pytest.mark.parametrize(("replay_s", "blocks"), [(0.0, 10), (3.0, 40), (100.0, 110)])
def test_joining_router_applies_stored_updates(replay_s: float, blocks: int) -> None:
    """One request arrives each second, and the second router joins at 9.5 s. This router also receives later updates of
    the first router.
    """
    joining = replace(
        config(small_pool(2), exchange=ReplicationConfig(period_s=0.1, delay_s=0.0)),
        # The third router joins after the end of the run, so that the cluster keeps all updates.
        replicas=(Replica(), Replica(at_s=9.5, replay_s=replay_s), Replica(at_s=1000.0, replay_s=1000.0)),
    )
    cluster = Cluster(joining)
    records = cluster.run(one_block_prompts(*range(11)))
    assert all(record.router == 0 for record in records[:10])
    assert sum(each.indexed_blocks for each in cluster.routers[1].status().endpoints) == blocks


def test_cluster_store_returns_session_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, SharedBinding]] = []

    class Listens(PoolRouter):
        def on_bindings(self, now: float, bindings: Sequence[SharedBinding]) -> None:
            told.extend((now, binding) for binding in bindings)
            super().on_bindings(now, bindings)

    monkeypatch.setattr(cluster_module, "PoolRouter", Listens)
    asked = one_block_prompts(*range(11))
    in_session = (replace(asked[0], session=7), *asked[1:10], replace(asked[10], session=7))
    joining = replace(
        config(small_pool(1), exchange=ReplicationConfig(period_s=0.1, delay_s=0.02)),
        replicas=(Replica(), Replica(at_s=9.5)),
    )
    records = Cluster(joining).run(in_session)
    assert records[10].router == 1
    (now, binding), *_ = told
    # The update is from the router's tick after the request at 10 s; the session's binding is from the first request.
    assert now == pytest.approx(10.05 + 0.02)
    assert (binding.session, binding.host, binding.version) == (7, joining.pool.members[0].id, 0)
    assert binding.moved_ago_s == pytest.approx(10.05)


@pytest.mark.parametrize("routers", [1, 3])
@pytest.mark.parametrize("queue", [UNLIMITED, Queue(dispatch_window_s=0.25), Queue(max_held=5, max_wait_s=1.0)])
def test_cluster_run_ends_each_request_once(routers: int, queue: Queue) -> None:
    asked, cluster = busy_requests(), Cluster(busy_config(routers, queue))
    records = cluster.run(asked)
    assert [record.arrival.request_id for record in records] == [str(number) for number in range(200)]
    assert_each_ended_once(asked, records)
    assert_books_empty(cluster)


def test_cluster_with_equal_config_gives_equal_records() -> None:
    runs = [Cluster(busy_config(2, Queue())).run(busy_requests()) for _ in range(2)]
    assert runs[0] == runs[1]


def test_lost_request_stops_the_cluster_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loses(PoolRouter):
        def on_request(self, now: float, request: Request) -> Effects[Decision | Queued | Rejection]:
            return Effects(Queued(request_id=request.id))

    monkeypatch.setattr(cluster_module, "PoolRouter", Loses)
    with pytest.raises(AssertionError, match="1 requests never end"):
        Cluster(config(small_pool(1), exchange=ReplicationConfig())).run(one_block_prompts(0.0))


def test_cluster_run_stops_at_first_token_if_callback_ends_the_run() -> None:
    seen: list[str] = []

    def gives_up(record: Record) -> bool:
        seen.append(record.arrival.request_id)
        return record.ttft_s is not None and record.ttft_s > 2.0

    cluster = Cluster(replace(config(small_pool(1)), gives_up=gives_up))
    records = cluster.run(one_block_prompts(0.0, 1.0, 1.1, 1.2, 100.0))
    assert cluster.gave_up
    # The third request waited for the first two. The fourth request arrived, but the run stopped before its end.
    assert seen == ["0", "1", "2"]
    assert [record.first_token_s for record in records] == [1.5, 3.0, 4.5, None]


def test_cluster_run_without_stop_rule_reports_rejections() -> None:
    asked: list[tuple[str, Reason | None]] = []

    def gives_up(record: Record) -> bool:
        asked.append((record.arrival.request_id, record.refused))
        return False

    queue = Queue(dispatch_window_s=0.1, max_held=1)
    cluster = Cluster(replace(config(small_pool(1, queue=queue)), gives_up=gives_up))
    cluster.run(one_block_prompts(0.0, 0.1, 0.2))
    assert asked == [("2", Reason.QUEUE_FULL), ("0", None), ("1", None)]
    assert not cluster.gave_up


def test_load_samples_count_in_flight_and_queued_prefill_tokens() -> None:
    held = small_pool(2, policy="round_robin", queue=Queue(dispatch_window_s=0.1))
    cluster = Cluster(replace(config(held), sample_s=1.0))
    # Each request takes 1.5 s; the third request is queued in the router until the first request's end.
    cluster.run(one_block_prompts(0.25, 0.3, 0.35))
    assert [tuple(each.pending_tokens.values()) for each in cluster.samples[:4]] == [
        (0, 0),
        (200, 100),
        (100, 0),
        (100, 0),
    ]
    assert [each.at_s for each in cluster.samples[:4]] == [0.0, 1.0, 2.0, 3.0]
    assert list(cluster.samples[0].pending_tokens) == ["m-0", "m-1"]


def test_load_samples_exclude_tokens_cached_at_dispatch() -> None:
    cluster = Cluster(replace(config(small_pool(1)), sample_s=0.5))
    cluster.run(one_block_prompts(0.25, 10.25, same=True))
    pending = {sample.at_s: sample.pending_tokens["m-0"] for sample in cluster.samples}
    assert (pending[0.5], pending[10.5]) == (100, 10)


def test_cluster_member_can_have_its_own_engine_config() -> None:
    fast = replace(ROUND, prefill=replace(ROUND.prefill, tokens_per_s=1000.0))
    of = replace(config(small_pool(2, policy="round_robin")), engines={"m-1": fast})
    assert [record.ttft_s for record in Cluster(of).run(one_block_prompts(0.0, 10.0))] == [1.5, pytest.approx(0.6)]
