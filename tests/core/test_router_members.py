"""Tests of pool changes: members that join, drain, restart or leave, and changed engine settings."""

from dataclasses import replace

import pytest

from builders import pool, text_of
from core.routers import decide
from dualmap.pools.pool import Engine, Member, MemberState, Prefix, Routing
from dualmap.router import PoolRouter


def test_added_member_gets_its_key_share_and_others_keep_caches() -> None:
    router = PoolRouter(pool(8))
    texts = [text_of(400, f"prompt {n}") for n in range(300)]
    before = [decide(router, str(n), text).receipt.pair for n, text in enumerate(texts)]
    router.on_pool(0.0, replace(pool(9), ring_version=2))
    after = [decide(router, f"again {n}", text).receipt for n, text in enumerate(texts)]
    moved = [(old, new.pair) for old, new in zip(before, after, strict=True) if old != new.pair]
    assert all("m-8" in new for _, new in moved)
    assert 0.1 < len(moved) / len(texts) < 0.35
    assert sum(receipt.matched_tokens == 384 for receipt in after) > 200


@pytest.mark.parametrize("restarted", ["elsewhere", "in place"])
def test_restarted_member_has_an_empty_index(restarted: str) -> None:
    router = PoolRouter(pool(2))
    decide(router, "1", text_of(512, "x"))
    again = tuple(
        replace(each, address=f"10.7.0.{n}") if restarted == "elsewhere" else replace(each, incarnation="2")
        for n, each in enumerate(router.pool.members)
    )
    router.on_pool(1.0, replace(router.pool, members=again))
    assert decide(router, "2", text_of(512, "x"), 1.0).receipt.matched_tokens == 0


def test_draining_member_keeps_its_load_and_gets_no_keys() -> None:
    router = PoolRouter(pool(2))
    chosen = decide(router, "1", text_of(512, "x")).receipt.chosen
    state = tuple(
        replace(each, state=MemberState.DRAINING) if each.id == chosen else each for each in router.pool.members
    )
    router.on_pool(1.0, replace(router.pool, members=state))
    assert chosen not in decide(router, "2", text_of(512, "x"), 1.0).endpoints
    assert next(each.in_flight for each in router.status().endpoints if each.id == chosen) == 1
    router.on_finished(2.0, "1")
    assert next(each.in_flight for each in router.status().endpoints if each.id == chosen) == 0


def test_changed_cache_size_keeps_entries_that_fit() -> None:
    router = PoolRouter(pool(1))
    decide(router, "1", text_of(128 * 20, "x"))
    router.on_pool(1.0, pool(1, engine=Engine(cache_tokens=128 * 40)))
    assert router.status().endpoints[0].indexed_blocks == 20
    router.on_pool(2.0, pool(1, engine=Engine(cache_tokens=128 * 4)))
    assert router.status().endpoints[0].indexed_blocks <= 4


def test_changed_speed_prior_applies_to_every_member() -> None:
    router = PoolRouter(pool(2))
    router.on_pool(1.0, pool(3, engine=Engine(prefill_tokens_per_second=100_000)))
    assert {round(each.prefill_tokens_per_second) for each in router.status().endpoints} == {100_000}


def test_accounts_of_a_removed_member_are_dropped() -> None:
    router = PoolRouter(pool(0))
    for n in range(50):
        member = Member(id=f"pod-{n}", address="10.0.0.1", port=8000)
        router.on_pool(float(n), replace(pool(0), members=(member,)))
        decide(router, str(n), "hello", float(n))
        router.on_finished(float(n), str(n))
    assert len(router._fleet._ledger.loads) <= 2


def test_member_change_keeps_the_hotness() -> None:
    router = PoolRouter(pool(8))
    for n in range(100):
        decide(router, str(n), text_of(1500, "tool") + text_of(400, f"question {n}"), 1.0)
    before = decide(router, "before", text_of(1500, "tool") + text_of(400, "before"), 1.0).receipt.key.blocks
    router.on_pool(1.0, pool(7))
    after = decide(router, "after", text_of(1500, "tool") + text_of(400, "after"), 1.0).receipt.key.blocks
    assert before == after > 10


def test_changed_block_length_clears_the_indexes() -> None:
    router = PoolRouter(pool(2))
    decide(router, "1", text_of(512, "x"))
    router.on_pool(1.0, pool(2, routing=Routing(prefix=Prefix(block_tokens=64))))
    assert sum(each.indexed_blocks for each in router.status().endpoints) == 0
