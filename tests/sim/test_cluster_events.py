"""Tests of members that fail, recover, join, leave or slow down during a run; every request ends once."""

from collections import Counter
from dataclasses import replace

import pytest

from clusters import (
    SEVEN_B,
    assert_books_empty,
    assert_each_ended_once,
    busy_config,
    busy_requests,
    config,
    first_tokens,
    one_block_prompts,
    small_pool,
)
from dualmap.fleet.ledger import IN_FLIGHT_TTL_S
from dualmap.pools.pool import MemberState, Pool, Queue
from dualmap_sim.cluster import Cluster, Record
from dualmap_sim.events import Event, Fail, PoolChange, Recover, Speed
from dualmap_sim.presets import EngineConfig, slowed
from dualmap_sim.summary import summarise
from engines import ROUND


def in_state(pool: Pool, member: str, state: MemberState) -> Pool:
    members = tuple(replace(each, state=state) if each.id == member else each for each in pool.members)
    return replace(pool, members=members, ring_version=pool.ring_version + 1)


def shares(records: tuple[Record, ...]) -> Counter[str | None]:
    return Counter(record.endpoint for record in records)


def test_engine_failure_fails_only_its_own_requests() -> None:
    cluster = Cluster(config(small_pool(2, policy="round_robin"), events=(Fail(at_s=1.0, member="m-0"),)))
    records = cluster.run(one_block_prompts(0.0, 0.25, 0.5))
    assert [record.failed for record in records] == [True, False, True]
    assert first_tokens(records) == [None, 1.75, None]
    assert_books_empty(cluster)


def test_engine_failure_keeps_finished_requests() -> None:
    done = Cluster(config(small_pool(1), events=(Fail(at_s=1.75, member="m-0"),))).run(one_block_prompts(0.0))
    assert [(record.finished_s, record.failed) for record in done] == [(1.75, False)]
    (almost,) = Cluster(config(small_pool(1), events=(Fail(at_s=1.7, member="m-0"),))).run(one_block_prompts(0.0))
    assert (almost.first_token_s, almost.finished_s, almost.failed) == (1.5, None, True)


def test_request_to_failed_engine_fails_after_delay_without_retry() -> None:
    failed: list[Record] = []

    def note(record: Record) -> bool:
        failed.append(record)
        return False

    first, second = one_block_prompts(1.0, 2.0)
    asked = (first, replace(second, follows="0", pause_s=0.5))
    dead = replace(config(small_pool(1), events=(Fail(at_s=0.5, member="m-0"),)), feedback_delay_s=0.25, gives_up=note)
    records = Cluster(dead).run(asked)
    assert failed == list(records)
    assert [record.failed for record in records] == [True, True]
    # The client sends its next request after its pause, also after a failed request.
    assert records[1].arrival.at_s == 1.0 + 0.25 + 0.5


def test_engine_with_repeated_failures_is_suspended() -> None:
    dead = config(small_pool(2, policy="round_robin"), events=(Fail(at_s=0.5, member="m-0"),))
    records = Cluster(dead).run(one_block_prompts(*[1.0 + number / 100 for number in range(20)]))
    assert sum(record.failed for record in records) == 3


def test_recovered_engine_has_an_empty_cache() -> None:
    events = (Fail(at_s=20.0, member="m-0"), Recover(at_s=21.0, member="m-0"))
    records = Cluster(config(small_pool(1), events=events)).run(one_block_prompts(0.0, 10.0, 30.0, 40.0, same=True))
    assert [record.cached_tokens for record in records] == [0, 90, 0, 90]


def test_repeated_fail_or_recover_event_has_no_effect() -> None:
    events = (
        Recover(at_s=5.0, member="m-0"),
        Fail(at_s=20.5, member="m-0"),
        Fail(at_s=20.6, member="m-0"),
        Recover(at_s=21.0, member="m-0"),
    )
    records = Cluster(config(small_pool(1), events=events)).run(one_block_prompts(0.0, 10.0, 20.0, 30.0, same=True))
    assert [record.failed for record in records] == [False, False, True, False]
    assert [record.cached_tokens for record in records] == [0, 90, 0, 0]


def test_joining_member_gets_requests_and_starts_with_empty_cache() -> None:
    joins = PoolChange(at_s=15.0, pool=small_pool(2, policy="round_robin"))
    cluster = Cluster(config(small_pool(1, policy="round_robin"), events=(joins,)))
    records = cluster.run(one_block_prompts(0.0, 10.0, 20.0, 30.0, same=True))
    assert [record.endpoint for record in records] == ["10.0.0.1:8000"] * 3 + ["10.0.0.2:8000"]
    assert [record.cached_tokens for record in records] == [0, 90, 90, 0]


def test_leaving_member_finishes_requests_and_returns_with_empty_cache() -> None:
    two, one = small_pool(2, policy="round_robin"), small_pool(1, policy="round_robin")
    events = (PoolChange(at_s=0.75, pool=one), PoolChange(at_s=20.0, pool=two))
    cluster = Cluster(config(two, events=events))
    records = cluster.run(one_block_prompts(0.0, 0.5, 10.0, 30.0, 40.0, same=True))
    assert [record.endpoint for record in records] == [f"10.0.0.{each}:8000" for each in (1, 2, 1, 2, 1)]
    assert records[1].finished_s == 0.5 + 1.75
    assert [record.cached_tokens for record in records] == [0, 0, 90, 0, 90]
    assert_books_empty(cluster)


def test_draining_member_gets_no_request_and_keeps_cache() -> None:
    two = small_pool(2, policy="round_robin")
    draining = in_state(two, "m-1", MemberState.DRAINING)
    events = (PoolChange(at_s=5.0, pool=draining), PoolChange(at_s=35.0, pool=two))
    records = Cluster(config(two, events=events)).run(one_block_prompts(0.0, 1.0, 10.0, 20.0, 40.0, 50.0, same=True))
    assert [record.endpoint for record in records] == [f"10.0.0.{each}:8000" for each in (1, 2, 1, 1, 1, 2)]
    assert records[5].cached_tokens == 90


def test_speed_change_applies_from_the_next_prefill() -> None:
    slow = Speed(at_s=0.5, member="m-0", engine=slowed(ROUND, 2.0))
    records = Cluster(config(small_pool(1), events=(slow,))).run(one_block_prompts(0.0, 10.0))
    assert [record.ttft_s for record in records] == [1.5, 3.0]
    # Decode steps also become slower: a step takes half a second instead of a quarter.
    assert records[1].finished_s == 13.5


def test_recovered_engine_keeps_its_last_speed() -> None:
    events = (
        Speed(at_s=1.0, member="m-0", engine=slowed(ROUND, 2.0)),
        Fail(at_s=2.0, member="m-0"),
        Recover(at_s=3.0, member="m-0"),
    )
    (record,) = Cluster(config(small_pool(1), events=events)).run(one_block_prompts(10.0))
    assert record.ttft_s == 3.0


def test_engine_memory_change_is_rejected() -> None:
    other = Speed(at_s=0.5, member="m-0", engine=replace(ROUND, kv_memory_tokens=500))
    with pytest.raises(AssertionError, match="only speeds may change"):
        Cluster(config(small_pool(1), events=(other,))).run(one_block_prompts(0.0))


EIGHT = busy_config(1).pool
SEVEN = replace(EIGHT, members=EIGHT.members[:-1], ring_version=2)
EVENTS: dict[str, tuple[Event, ...]] = {
    "fail": (Fail(at_s=3.0, member="m-1"), Fail(at_s=4.0, member="m-2"), Recover(at_s=9.0, member="m-1")),
    "all fail": tuple(Fail(at_s=5.0, member=member.id) for member in EIGHT.members),
    "join": (PoolChange(at_s=4.0, pool=EIGHT),),
    "leave": (PoolChange(at_s=4.0, pool=SEVEN),),
    "nobody is left": (
        PoolChange(at_s=4.0, pool=replace(EIGHT, members=(), ring_version=2)),
        PoolChange(at_s=8.0, pool=replace(EIGHT, ring_version=3)),
    ),
    "drain, then leave dead": (
        PoolChange(at_s=4.0, pool=in_state(EIGHT, "m-7", MemberState.DRAINING)),
        Fail(at_s=4.5, member="m-7"),
        PoolChange(at_s=5.0, pool=SEVEN),
        PoolChange(at_s=9.0, pool=EIGHT),
    ),
    "slow": (Speed(at_s=3.0, member="m-3", engine=slowed(SEVEN_B, 5.0)),),
}


@pytest.mark.parametrize("report_loss", [0.0, 0.2])
@pytest.mark.parametrize("routers", [1, 4])
@pytest.mark.parametrize("happens", EVENTS)
def test_each_request_ends_once_despite_any_cluster_events(happens: str, routers: int, report_loss: float) -> None:
    asked = busy_requests()
    of = replace(
        busy_config(routers, Queue(dispatch_window_s=0.25, max_wait_s=5.0)),
        events=EVENTS[happens],
        report_loss=report_loss,
    )
    if happens == "join":
        of = replace(of, pool=SEVEN)
    cluster = Cluster(of)
    records = cluster.run(asked)
    assert_each_ended_once(asked, records)
    assert any(record.failed for record in records) == (happens in ("fail", "all fail", "drain, then leave dead"))
    for router in cluster.routers:
        # The load of requests without a report expires.
        router.on_deadline(1000.0 + IN_FLIGHT_TTL_S)
    assert_books_empty(cluster)


def test_slow_member_gets_fewer_requests_under_dualmap() -> None:
    asked = busy_requests(400, rate=8.0)
    even = Cluster(busy_config(1, Queue())).run(asked)
    slow = Cluster(replace(busy_config(1, Queue()), engines={"m-3": slowed(SEVEN_B, 4.0)})).run(asked)
    endpoint = EIGHT.members[3].endpoint
    assert shares(slow)[endpoint] < 0.6 * shares(even)[endpoint]


def test_scale_up_moves_only_keys_of_new_members() -> None:
    """With only ring 1, a fifth of the keys moves from four members to the fifth member, and no other key moves."""
    asked = busy_requests(600, rate=4.0)
    four, five = busy_config(1, policy="cache_affinity", members=4), busy_config(1, policy="cache_affinity", members=5)
    before = Cluster(four).run(asked)
    after = Cluster(replace(four, events=(PoolChange(at_s=50.0, pool=five.pool),))).run(asked)
    late = [pair for pair in zip(before, after, strict=True) if pair[0].arrival.at_s > 50.0]
    moved = [new.endpoint for old, new in late if old.endpoint != new.endpoint]
    assert len(late) > 300
    assert set(moved) == {five.pool.members[4].endpoint}
    assert 0.1 < len(moved) / len(late) < 0.35
    assert all(old.endpoint == new.endpoint for old, new in zip(before, after, strict=True) if new.arrival.at_s < 50.0)


def test_slo_attainment_changes_with_joining_and_leaving_members() -> None:
    asked = busy_requests(900, rate=7.5)
    # A short maximum wait ends the overload's requests, so that the backlog does not affect later phases.
    few = busy_config(1, Queue(max_wait_s=10.0), members=4)
    more = busy_config(1, Queue(max_wait_s=10.0), members=8).pool

    def attained(events: tuple[Event, ...], *, start: Pool) -> list[float]:
        records = Cluster(replace(few, pool=start, events=events)).run(asked)
        return [summarise(records[at : at + 300], slo_ttft_s=5.0).slo_attainment for at in (0, 300, 600)]

    up = attained((PoolChange(at_s=60.0, pool=more),), start=few.pool)
    stays = attained((), start=few.pool)
    down = attained((PoolChange(at_s=60.0, pool=few.pool),), start=more)
    assert up[2] > 0.95
    assert stays[2] < 0.7 * up[2]
    assert down[0] > 0.95
    assert down[2] < 0.6


PULLS = replace(ROUND, pull_tokens_per_s=500.0)


def in_turn(engine: EngineConfig, *, kv_moves: bool, events: tuple[Event, ...] = ()) -> tuple[Record, ...]:
    """Return three turns of one session with the same prompt, alternating between two members."""
    asked = [replace(each, session=5) for each in one_block_prompts(0.0, 10.0, 20.0, same=True)]
    of = config(small_pool(2, policy="round_robin"), engine=engine, events=events)
    return Cluster(replace(of, kv_moves=kv_moves)).run(asked)


def test_moved_session_pulls_kv_cache_from_its_last_engine() -> None:
    first, second, third = in_turn(PULLS, kv_moves=True)
    assert (first.pulled_tokens, first.ttft_s) == (0, 1.5)
    # The engine pulls 90 of the 100 tokens at 500 tokens/s and computes 10 tokens.
    assert (second.cached_tokens, second.pulled_tokens) == (0, 90)
    assert second.ttft_s == pytest.approx(0.5 + 0.1 + 90 / 500)
    # The first member still caches all blocks.
    assert (third.cached_tokens, third.pulled_tokens) == (90, 0)


@pytest.mark.parametrize(
    ("engine", "kv_moves", "events"),
    [(PULLS, False, ()), (ROUND, True, ()), (PULLS, True, (Fail(at_s=5.0, member="m-0"),))],
    ids=["not asked for", "engines cannot", "the last engine is dead"],
)
def test_cluster_without_pull_transfers_no_kv_cache(
    engine: EngineConfig, kv_moves: bool, events: tuple[Event, ...]
) -> None:
    records = in_turn(engine, kv_moves=kv_moves, events=events)
    assert [record.pulled_tokens for record in records] == [0, 0, 0]


def test_request_without_session_pulls_no_kv_cache() -> None:
    of = replace(config(small_pool(2, policy="round_robin"), engine=PULLS), kv_moves=True)
    records = Cluster(of).run(one_block_prompts(0.0, 10.0, same=True))
    assert [record.pulled_tokens for record in records] == [0, 0]


def test_pulled_tokens_are_not_pending_prefill_tokens() -> None:
    asked = [replace(each, session=5) for each in one_block_prompts(0.25, 10.25, same=True)]
    of = config(small_pool(2, policy="round_robin"), engine=PULLS)
    cluster = Cluster(replace(of, kv_moves=True, sample_s=0.5))
    cluster.run(asked)
    pending = {sample.at_s: tuple(sample.pending_tokens.values()) for sample in cluster.samples}
    assert (pending[0.5], pending[10.5]) == ((100, 0), (0, 10))
