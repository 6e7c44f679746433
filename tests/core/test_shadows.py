"""Tests of shadow policies: they change nothing, they see what a pool's own policy sees, and the sample is even."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar
from unittest.mock import patch

import pytest

import builders
from core.queue_pools import ask, slow_pool
from core.random_traffic import Traffic, pool_of
from core.routers import decide
from core.shared_routers import Routers, at
from dualmap.keys.hotness import HotnessRule
from dualmap.policies.registry import POLICIES
from dualmap.policies.single_signal.round_robin import RoundRobin
from dualmap.policies.situation import LONE, Choice, Situation
from dualmap.pools.pool import Engine, Pool
from dualmap.requests import Queued, ShadowStatus
from dualmap.router import PoolRouter

EVERY = tuple(POLICIES)


def shadowed(pool: Pool, *shadow: str, sample: float = 1.0) -> Pool:
    return replace(pool, routing=replace(pool.routing, shadow=shadow, shadow_sample=sample))


def of(router: PoolRouter) -> dict[str, ShadowStatus]:
    return {each.policy: each for each in router.status().shadows}


@contextmanager
def more_policies(*policies: type) -> Iterator[None]:
    """Have routers that are created within the context know further policies."""
    more = MappingProxyType({**POLICIES, **{each.name: each() for each in policies}})
    with patch("dualmap.chooser.POLICIES", more), patch("dualmap.shadows.POLICIES", more):
        yield


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("seed", range(2))
def test_router_with_shadows_decides_as_one_without(policy: str, seed: int) -> None:
    pool = pool_of(random.Random(f"{policy} {seed}"), policy)
    chance = random.Random(seed)
    shadow = tuple(chance.sample(EVERY, 4))
    routers = [PoolRouter(each, replicated=True) for each in (pool, shadowed(pool, *shadow, sample=0.5))]
    traffic = Traffic(random.Random(f"{policy} {seed}"), routers)
    traffic.run(300)
    statuses = [replace(each.status(), shadows=()) for each in routers]
    assert statuses[0] == statuses[1]
    sampled = of(routers[1])[policy].agreed
    assert 0.3 * traffic.sent < sampled < 0.7 * traffic.sent
    assert all(each.agreed + each.differed == sampled for each in routers[1].status().shadows)


@pytest.mark.parametrize("policy", EVERY)
def test_shadow_with_the_rule_of_the_own_policy_always_agrees(policy: str) -> None:
    class Twin(type(POLICIES[policy])):  # type: ignore[misc]
        name: ClassVar[str] = "twin"

    with more_policies(Twin):
        for seed in range(3):
            chance = random.Random(f"{policy} {seed}")
            router = PoolRouter(shadowed(pool_of(chance, policy), "twin"))
            Traffic(chance, [router], adapters=False).run(200)
            found = of(router)
            assert found["twin"].agreed > 50
            assert found["twin"] == found[policy]._replace(policy="twin")


def test_own_policy_among_the_shadows_counts_once() -> None:
    router = PoolRouter(shadowed(builders.pool(), "dualmap", "round_robin"))
    for n in range(40):
        decide(router, str(n), builders.text_of(500, str(n % 5)))
    found = of(router)
    assert list(found) == ["dualmap", "round_robin"]
    assert (found["dualmap"].agreed, found["dualmap"].differed) == (40, 0)
    assert found["round_robin"].agreed + found["round_robin"].differed == 40


def test_shadow_totals_of_the_own_policy_are_the_receipts_values() -> None:
    router = PoolRouter(shadowed(builders.pool(), "least_loaded"))
    receipts = [decide(router, str(n), builders.text_of(900, str(n % 3)), float(n)).receipt for n in range(30)]
    own = of(router)["dualmap"]
    assert own.predicted_cached_tokens == sum(each.matched_tokens for each in receipts) > 0
    assert own.predicted_ttft_s == pytest.approx(sum(each.predicted_ttft_s for each in receipts))
    assert of(router)["least_loaded"].predicted_cached_tokens < own.predicted_cached_tokens


def test_shadow_round_robin_takes_a_turn_for_each_request() -> None:
    pool = builders.pool(4, policy="random")
    router = PoolRouter(shadowed(pool, "round_robin", sample=0.5))
    chosen = [decide(router, str(n), builders.text_of(300, str(n))).receipt.chosen for n in range(200)]
    always = PoolRouter(shadowed(pool, "round_robin", sample=1.0))
    assert [decide(always, str(n), builders.text_of(300, str(n))).receipt.chosen for n in range(200)] == chosen
    turns = [pool.members[n % 4].id for n in range(200)]
    assert of(always)["round_robin"].agreed == sum(map(str.__eq__, turns, chosen))
    sample = [n for n in range(200) if is_sampled(pool, str(n), 0.5)]
    assert of(router)["round_robin"].agreed == sum(turns[n] == chosen[n] for n in sample)


def is_sampled(pool: Pool, request_id: str, share: float) -> bool:
    router = PoolRouter(shadowed(pool, "random", sample=share))
    decide(router, request_id, "prompt")
    return bool(router.status().shadows[0].agreed)


class FirstOfPair(RoundRobin):
    """Depends on the key only."""

    name: ClassVar[str] = "first_of_pair"
    hotness: ClassVar[HotnessRule | None] = HotnessRule(split=1.0, merge=0.5)

    def choose(self, situation: Situation) -> Choice:
        return Choice(situation.pair[0], LONE)


def test_shadow_with_another_hotness_rule_finds_hot_prefixes_itself() -> None:
    def chosen(router: PoolRouter) -> list[str]:
        hot = builders.text_of(600, "hot")
        return [decide(router, str(n), hot + builders.text_of(600, str(n)), n / 10).receipt.chosen for n in range(200)]

    with more_policies(FirstOfPair):
        hot, fixed = (chosen(PoolRouter(builders.pool(policy=each))) for each in ("first_of_pair", "cache_affinity"))
        router = PoolRouter(shadowed(builders.pool(policy="cache_affinity"), "first_of_pair"))
        assert chosen(router) == fixed
    found = of(router)["first_of_pair"]
    assert found.agreed == sum(map(str.__eq__, hot, fixed))
    assert found.differed > 50
    assert router.status().hotness_nodes == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_shadow_sample_has_its_share_of_the_requests(share: float) -> None:
    router = PoolRouter(shadowed(builders.pool(2), "random", sample=share))
    for n in range(2000):
        decide(router, f"router-0-{n}", "prompt")
    assert of(router)["dualmap"].agreed == pytest.approx(2000 * share, abs=60)


def test_request_that_gets_another_member_later_is_compared_once() -> None:
    pool = shadowed(slow_pool(2), "random")
    router = PoolRouter(pool)
    queued = [n for n in range(8) if isinstance(ask(router, str(n)), Queued)]
    assert queued
    left = {queue.id for queue in router.status().endpoints if queue.held}
    router.on_pool(1.0, replace(pool, members=tuple(each for each in pool.members if each.id not in sorted(left)[:1])))
    assert of(router)["dualmap"].agreed == 8


def test_shadow_totals_continue_while_the_policy_stays() -> None:
    pool = builders.pool()
    router = PoolRouter(shadowed(pool, "random", "min_ttft"))
    for n in range(5):
        decide(router, str(n), "prompt")
    router.on_pool(1.0, shadowed(pool, "random", "ear"))
    assert {name: each.agreed + each.differed for name, each in of(router).items()} == {
        "dualmap": 5,
        "random": 5,
        "ear": 0,
    }
    router.on_pool(2.0, pool)
    assert router.status().shadows == ()


def test_shadow_ends_no_silent_prefill_by_reading_its_member() -> None:
    """A prefill without streaming counts as ended when the router reads its member's load, not when a shadow does."""
    pool = builders.pool(6, policy="cache_affinity", engine=Engine(prefill_tokens_per_second=100.0))
    elsewhere = next(
        text
        for text in map(str, range(100))
        if "m-0" not in decide(PoolRouter(pool), "cold", builders.text_of(300, text)).receipt.pair
    )
    routers = [PoolRouter(each) for each in (pool, shadowed(pool, "min_ttft"))]
    only_m0 = frozenset({pool.members[0].endpoint})
    for router in routers:
        for n in range(2):
            sent = builders.request(f"slow {n}", builders.text_of(500, f"slow {n}"), subset=only_m0)
            router.on_request(0.0, sent._replace(streamed=False))
        decide(router, "elsewhere", builders.text_of(300, elsewhere), 6.0)
        router.on_finished(7.0, "slow 0")
    after = builders.request("after", builders.text_of(300, "after"), now=8.0, subset=only_m0)
    answers = [each.on_request(8.0, after).answer for each in routers]
    assert answers[0] == answers[1]


def test_shadows_of_several_routers_are_counted_once_by_the_owner() -> None:
    both = Routers(shadowed(builders.pool(), "random"))
    for n in range(20):
        both.ask(both.names[n % 2], at(f"r{n}", builders.text_of(500, str(n))))
        both.deliver()
    totals = {name: [each.agreed + each.differed for each in both[name].status().shadows] for name in both.names}
    assert totals == {both.owner: [20, 20], both.others[0]: [0, 0]}
