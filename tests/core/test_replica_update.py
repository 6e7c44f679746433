"""Tests of replication updates between the routers of one pool."""

from dataclasses import replace

import pytest

from builders import pool, request, text_of
from dualmap.pools.pool import Engine, Pool, Queue, Routing
from dualmap.replicas.peers import PEER_TTL_S
from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedLoad
from dualmap.requests import Decision, Outcome, Queued
from dualmap.router import PoolRouter

SPEED = 1000.0
NOTHING = HotnessCounts(requests=0, nodes={})


def slow_pool(count: int = 2, *, window_s: float = 1e9, policy: str = "dualmap") -> Pool:
    routing = Routing(policy=policy, queue=Queue(dispatch_window_s=window_s))
    return pool(count, routing=routing, engine=Engine(prefill_tokens_per_second=SPEED))


def replicas(of: Pool, count: int = 2) -> list[PoolRouter]:
    return [PoolRouter(of, replicated=True) for _ in range(count)]


def exchange(now: float, routers: list[PoolRouter], *, age_s: float = 0.0) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for number, speaker in enumerate(routers):
        update = speaker.take_update(now - age_s)
        for listener in routers:
            if listener is not speaker:
                outcomes += listener.on_update(now, f"replica {number}", update, age_s).outcomes
    return outcomes


def decide(router: PoolRouter, id: str, text: str, now: float = 0.0) -> Decision:
    outcome = router.on_request(now, request(id, text, now=now)).answer
    assert isinstance(outcome, Decision)
    return outcome


def candidates(decision: Decision) -> dict[str, int]:
    return {each.id: each.pending_tokens for each in decision.receipt.candidates}


def test_replication_update_without_changes_is_none() -> None:
    nothing = ReplicaUpdate(hotness=NOTHING, loads={})
    router = PoolRouter(pool(), replicated=True)
    assert router.take_update(0.0) == nothing
    decide(router, "1", text_of(500, "a"))
    assert router.take_update(1.0) != nothing
    router.on_finished(2.0, "1")
    assert router.take_update(3.0) == nothing


def test_update_without_an_event_is_empty() -> None:
    router = PoolRouter(slow_pool(), replicated=True)
    assert not router.take_update(0.0).is_empty
    assert router.take_update(0.1).is_empty
    decide(router, "1", text_of(50_000, "a"), now=0.2)
    update = router.take_update(0.2)
    assert update.loads is not None
    assert update.placements
    # Only the backlog falls with time.
    assert router.take_update(0.4).is_empty
    router.on_first_token(0.5, "1")
    assert router.take_update(0.5).loads is not None


def test_unchanged_loads_are_told_before_other_replicas_drop_them() -> None:
    mine, yours = replicas(slow_pool())
    decide(mine, "1", text_of(500_000, "a"))
    told_s = []
    for tenth in range(100):
        now = tenth / 10
        update = mine.take_update(now)
        if update.loads is not None:
            told_s.append(now)
            yours.on_update(now, "mine", update, 0.0)
        yours.on_deadline(now)
        assert yours.status().peers == 1
    assert told_s == [float(second) for second in range(10)]


def test_router_without_replication_collects_no_update() -> None:
    router = PoolRouter(pool())
    for n in range(10):
        decide(router, str(n), text_of(500, str(n)))
    assert router.take_update(1.0).placements == ()


class TestLoads:
    def test_peer_loads_are_summed(self) -> None:
        mine, yours, hers = routers = replicas(slow_pool(1), 3)
        decide(yours, "1", text_of(3000, "a"))
        decide(hers, "2", text_of(2000, "b"))
        exchange(0.1, routers)
        decision = decide(mine, "3", text_of(1000, "c"), 0.1)
        assert candidates(decision) == {"m-0": 5000}
        assert decision.receipt.candidates[0].in_flight == 2
        assert decision.receipt.predicted_ttft_s == pytest.approx(6.0, rel=0.1)

    def test_peer_loads_are_not_in_own_status(self) -> None:
        mine, yours = routers = replicas(slow_pool(1))
        decide(yours, "1", text_of(3000, "a"))
        exchange(0.1, routers)
        (endpoint,) = mine.status().endpoints
        assert (endpoint.in_flight, endpoint.pending_prefill_tokens) == (0, 0)
        assert mine.status().peers == 1

    def test_peer_loads_are_removed_after_requests_end_at_the_peer(self) -> None:
        mine, yours = routers = replicas(slow_pool(1))
        decide(yours, "1", text_of(3000, "a"))
        exchange(0.1, routers)
        yours.on_first_token(1.0, "1")
        yours.on_finished(1.0, "1")
        exchange(1.1, routers)
        assert candidates(decide(mine, "2", text_of(100, "b"), 1.1)) == {"m-0": 0}

    def test_peer_loads_are_kept_if_an_update_has_no_loads(self) -> None:
        (mine,) = replicas(slow_pool(1), 1)
        load = SharedLoad(pending_prefill_tokens=1000, backlog_s=1.0, in_flight=1)
        mine.on_update(10.0, "yours", ReplicaUpdate(hotness=NOTHING, loads={"m-0": load}), 0.0)
        mine.on_update(10.1, "yours", ReplicaUpdate(hotness=NOTHING), 0.0)
        assert candidates(decide(mine, "2", text_of(100, "b"), 10.2)) == {"m-0": 1000}

    def test_peer_loads_of_a_silent_replica_expire(self) -> None:
        mine, yours = routers = replicas(slow_pool(1))
        decide(yours, "1", text_of(3000, "a"))
        exchange(0.0, routers)
        assert mine.next_deadline() == PEER_TTL_S
        mine.on_deadline(PEER_TTL_S)
        assert mine.status().peers == 0
        assert candidates(decide(mine, "2", text_of(100, "b"), PEER_TTL_S)) == {"m-0": 0}

    def test_peer_loads_of_an_expired_update_are_ignored(self) -> None:
        mine, yours = replicas(slow_pool(1))
        decide(yours, "1", text_of(3000, "a"))
        mine.on_update(100.0, "yours", yours.take_update(10.0), 90.0)
        assert candidates(decide(mine, "2", text_of(100, "b"), 100.0)) == {"m-0": 0}

    def test_peer_loads_of_an_older_update_are_ignored(self) -> None:
        (mine,) = replicas(slow_pool(1), 1)
        for age_s, tokens in ((0.0, 1000), (0.5, 9000)):
            load = SharedLoad(pending_prefill_tokens=tokens, backlog_s=tokens / SPEED, in_flight=1)
            mine.on_update(10.0, "yours", ReplicaUpdate(hotness=NOTHING, loads={"m-0": load}), age_s)
        assert candidates(decide(mine, "2", text_of(100, "b"), 10.0)) == {"m-0": 1000}

    def test_peer_loads_of_an_unknown_member_are_kept(self) -> None:
        mine, yours = replicas(slow_pool(1))
        yours.on_pool(0.0, slow_pool(2))
        load = SharedLoad(pending_prefill_tokens=700, backlog_s=0.7, in_flight=1)
        mine.on_update(0.1, "yours", ReplicaUpdate(hotness=NOTHING, loads={"m-1": load}), 0.0)
        mine.on_pool(0.2, slow_pool(2))
        assert candidates(decide(mine, "1", text_of(100, "b"), 0.3))["m-1"] == 700

    def test_peer_loads_can_close_and_open_the_dispatch_window(self) -> None:
        mine, yours = routers = replicas(slow_pool(1, window_s=1.0))
        decide(yours, "1", text_of(3000, "a"))
        exchange(0.0, routers)
        assert mine.on_request(0.1, request("2", text_of(500, "b"), now=0.1)).answer == Queued(request_id="2")
        yours.on_first_token(2.0, "1")
        (outcome,) = exchange(2.1, routers)
        assert outcome.request_id == "2"

    def test_prefill_queued_behind_peer_loads_is_no_speed_sample(self) -> None:
        mine, yours = routers = replicas(slow_pool(1))
        before = mine.status().endpoints[0].prefill_tokens_per_second
        decide(yours, "1", text_of(8000, "a"))
        exchange(0.0, routers)
        decide(mine, "2", text_of(2000, "b"))
        mine.on_first_token(12.0, "2")
        assert mine.status().endpoints[0].prefill_tokens_per_second == before


class TestPlacements:
    def test_peer_placements_predict_cache_hits(self) -> None:
        mine, yours = routers = replicas(slow_pool(8))
        chosen = decide(yours, "1", text_of(1280, "a")).receipt.chosen
        exchange(0.1, routers)
        decision = decide(mine, "2", text_of(1280, "a") + "more", 0.2)
        assert (decision.receipt.chosen, decision.receipt.matched_tokens) == (chosen, 1280)

    def test_placement_of_a_cached_prompt_is_sent_again(self) -> None:
        (mine,) = replicas(slow_pool(8), 1)
        decide(mine, "1", text_of(1280, "a"))
        assert len(mine.take_update(0.1).placements) == 1
        decide(mine, "2", text_of(1280, "a"))
        assert len(mine.take_update(0.2).placements) == 1

    def test_peer_placements_at_an_unknown_member_are_ignored(self) -> None:
        (mine,) = replicas(slow_pool(1), 1)
        gone = Placement(endpoint="10.9.9.9:1", hashes=(1, 2, 3))
        mine.on_update(0.0, "yours", ReplicaUpdate(hotness=NOTHING, loads={}, placements=(gone,)), 0.0)
        assert mine.status().endpoints[0].indexed_blocks == 0


def test_replicas_agree_on_hot_key_lengths() -> None:
    routers = replicas(slow_pool(8), 3)
    lengths: list[set[int]] = []
    for n in range(240):
        now = n * 0.05
        router = routers[n % 3]
        decide(router, str(n), text_of(1024, "hot") + text_of(256, f"tail {n % 16}"), now)
        router.on_finished(now, str(n))
        if n % 2:
            exchange(now, routers)
        if n % 40 == 39:
            probes = [decide(each, f"probe {n} {k}", text_of(1536, "hot"), now) for k, each in enumerate(routers)]
            lengths.append({each.receipt.key.blocks for each in probes})
    assert all(len(each) == 1 for each in lengths), lengths
    assert max(lengths[-1]) > 2


def test_new_router_uses_older_counts_of_its_peers_at_once() -> None:
    warm = PoolRouter(slow_pool(8), replicated=True)
    told = []
    for n in range(200):
        now = n * 0.1
        decide(warm, str(n), text_of(1024, "hot") + text_of(256, f"tail {n % 16}"), now)
        warm.on_finished(now, str(n))
        told.append((now, warm.take_update(now)))
    cold = PoolRouter(slow_pool(8), replicated=True)
    for said_s, update in told:
        cold.on_update(1000.0, "warm", update, 20.0 - said_s)
    key = decide(cold, "probe", text_of(1024, "hot") + text_of(256, "tail 3"), 1000.0).receipt.key
    assert key == decide(warm, "probe", text_of(1024, "hot") + text_of(256, "tail 3"), 20.0).receipt.key
    assert key.blocks > 2


def test_changed_pool_settings_keep_the_updates_of_peers() -> None:
    mine, yours = routers = replicas(slow_pool(1))
    decide(yours, "1", text_of(3000, "a"))
    exchange(0.0, routers)
    mine.on_pool(0.1, replace(slow_pool(1), ring_version=9))
    assert candidates(decide(mine, "2", text_of(100, "b"), 0.2)) == {"m-0": 3000}


def ask_share(router: PoolRouter, hot: float, *, began: int, count: int, router_s: float) -> None:
    """Send ``count`` requests, one each 0.1 s; a share ``hot`` has the same prefix."""
    told = 0
    for n in range(began, began + count):
        now = router_s + (n - began) * 0.1
        is_hot = told < hot * (n - began + 1)
        told += is_hot
        text = text_of(1024, "hot") + text_of(256, f"tail {n % 16}") if is_hot else text_of(1024, f"cold {n}")
        decide(router, str(n), text, now)
        router.on_finished(now, str(n))


def key_blocks(router: PoolRouter, now: float, id: str) -> int:
    decision = decide(router, id, text_of(1024, "hot") + text_of(256, "tail 1"), now)
    router.on_finished(now, id)
    return decision.receipt.key.blocks


def test_replicas_agree_on_key_lengths_between_thresholds() -> None:
    # A key is split when hot, and stays split until cold. The key's state therefore depends on its history, and not
    # only on the current counts.
    warm, cold = replicas(slow_pool(8))
    ask_share(warm, 0.5, began=0, count=300, router_s=0.0)
    ask_share(warm, 0.09, began=1000, count=1200, router_s=30.0)
    cold.on_update(150.0, "warm", warm.take_update(150.0), 0.0)
    ask_share(warm, 0.09, began=3000, count=10, router_s=150.0)
    cold.on_update(151.0, "warm", warm.take_update(151.0), 0.0)
    assert key_blocks(warm, 151.0, "probe") > 2
    assert key_blocks(cold, 151.0, "probe") == key_blocks(warm, 151.0, "again")


def test_merged_key_is_not_split_by_old_replica_updates() -> None:
    warm, cold = replicas(slow_pool(8))
    ask_share(warm, 0.5, began=0, count=300, router_s=0.0)
    old = warm.take_update(30.0)
    cold.on_update(30.0, "warm", old, 0.0)
    ask_share(cold, 0.0, began=1000, count=1200, router_s=31.0)
    cold.on_update(151.0, "warm", old, 121.0)
    assert key_blocks(cold, 152.0, "probe") == 2
    cold.on_update(152.0, "warm", replace(old, hotness=replace(old.hotness, requests=0, nodes={})), 0.0)
    assert key_blocks(cold, 152.0, "again") == 2


def test_invalid_replica_counts_are_ignored() -> None:
    mine, _ = replicas(slow_pool(8))
    for n in range(40):
        mine.on_update(
            n * 5.0, "odd", ReplicaUpdate(hotness=HotnessCounts(requests=1, nodes={7: 0, 9: n % 2}), loads={}), 0.0
        )
    assert mine.status().hotness_nodes == 1


def test_late_replica_counts_expire_by_their_measurement_time() -> None:
    mine, yours = replicas(slow_pool(8))
    ask_share(yours, 1.0, began=0, count=100, router_s=0.0)
    told = yours.take_update(10.0)
    decide(mine, "own", text_of(1024, "own"), 55.0)
    mine.on_update(55.0, "yours", told, 50.0)
    assert mine.status().hotness_nodes > 1
    decide(mine, "later", text_of(1024, "own"), 75.0)
    assert mine.status().hotness_nodes <= 2


def test_silent_replica_expires_at_the_next_deadline() -> None:
    for tenth in range(200):
        mine, _ = replicas(slow_pool(1))
        mine.on_update(tenth * 0.1, "yours", ReplicaUpdate(hotness=NOTHING, loads={}), 0.037)
        deadline = mine.next_deadline()
        assert deadline is not None
        mine.on_deadline(deadline)
        assert mine.status().peers == 0
