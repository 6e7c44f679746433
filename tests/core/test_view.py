"""Tests that the columns of a pool's members equal their definitions, for pools in many states."""

import random
from dataclasses import replace
from functools import partial

import pytest

from dualmap.fleet.load import MemberLoad
from dualmap.policies.registry import POLICIES
from dualmap.policies.situation import Situation, Weights
from dualmap.pools.pool import Engine, Member, MemberState, Model, Pool, Queue, Rebalance, Routing
from dualmap.prompts.blocks import BlockChain
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedLoad
from dualmap.requests import Request
from dualmap.router import PoolRouter

BLOCK_TOKENS = 128
STALL_S = 0.5
WEIGHTS = (Weights(compute=1.0), Weights(compute=3.0, active_kv=0.2), Weights(compute=0.0, active_kv=1.0))
MEMBERS = tuple(
    Member(id=f"m{n}", address="10.0.0.1", port=8000 + n, state=MemberState.DRAINING if n == 6 else MemberState.ACTIVE)
    for n in range(7)
)


def pool_of(policy: str, window_s: float) -> Pool:
    return Pool(
        namespace="ns",
        name="p",
        model=Model(name="m"),
        engine=Engine(cache_tokens=40 * BLOCK_TOKENS),
        routing=Routing(
            policy=policy, queue=Queue(dispatch_window_s=window_s), rebalance=Rebalance(decode_stall_s=STALL_S)
        ),
        members=MEMBERS,
    )


def chain_of(chance: random.Random) -> BlockChain:
    """Prompts of up to 15 blocks with shared first blocks; the last block may be partial."""
    group, shared, length = chance.randrange(3), chance.randrange(6), chance.randrange(16)
    own = chance.getrandbits(30)
    missing = chance.choice([0, 0, 50])
    full = length - (missing > 0)
    hashes = tuple((group + 1) * 10**6 + n if n < min(shared, full) else (own << 20) + n for n in range(length))
    tokens = max(0, length * BLOCK_TOKENS - missing)
    return BlockChain(hashes=hashes, block_tokens=BLOCK_TOKENS, tokens=tokens)


def update(chance: random.Random) -> ReplicaUpdate:
    loads = {
        member.id: SharedLoad(
            pending_prefill_tokens=chance.randrange(5000),
            backlog_s=chance.choice([0.0, chance.random()]),
            held_s=chance.choice([0.0, chance.random()]),
            in_flight=chance.randrange(4),
            active_kv_tokens=chance.randrange(9000),
        )
        for member in MEMBERS
        if chance.random() < 0.5
    }
    return ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads=loads)


def step(router: PoolRouter, chance: random.Random, now: float, number: int, live: list[str]) -> None:
    """Apply one event to a router."""
    event = chance.random()
    if event < 0.5 or not live:
        streamed, chain = chance.random() < 0.7, chain_of(chance)
        live.append(str(number))
        router.on_request(now, Request(id=str(number), chain=chain, arrived_s=now, streamed=streamed))
    elif event < 0.7:
        router.on_first_token(now, chance.choice(live))
    elif event < 0.9:
        end = chance.choice([router.on_finished, router.on_aborted, router.on_failed])
        end(now, live.pop(chance.randrange(len(live))))
    elif event < 0.97:
        router.on_update(now, chance.choice("ab"), update(chance), 0.0)
    elif event < 0.98:
        stall_s = chance.choice([0.2, STALL_S])
        changed = replace(router.pool.routing, rebalance=Rebalance(decode_stall_s=stall_s))
        router.on_pool(now, replace(router.pool, routing=changed))
    else:
        engine = replace(router.pool.engine, prefill_tokens_per_second=chance.choice([3000.0, 7000.0]))
        router.on_pool(now, replace(router.pool, engine=engine))
    router.on_deadline(now)


def distinct_of(load: MemberLoad, chain: BlockChain) -> int:
    """Return the tokens of the distinct blocks of a member's requests in flight and of a prompt."""
    chains = [each.chain for each in (*load.prefills.pending.values(), *load.kv.decoding.values())]
    tokens = {
        block: each.tokens_of(number) - each.tokens_of(number - 1)
        for each in (chain, *chains)
        for number, block in enumerate(each.hashes, start=1)
    }
    return sum(tokens.values())


def check(router: PoolRouter, now: float, chain: BlockChain) -> None:
    """Compare a view's values for each member with the values of the underlying objects."""
    candidates = router._fleet.candidates
    view = candidates.view(now, chain)
    everyone = candidates.everyone(view, candidates.ring(None))
    pending_tokens, in_flight = everyone.pending_tokens(), everyone.in_flight()
    requests, placed_tokens = everyone.requests(), everyone.placed_tokens()
    matched_tokens, distinct_tokens = everyone.matched_tokens(), everyone.distinct_tokens()
    columns = [everyone.costs_s(weights) for weights in WEIGHTS]
    members = candidates.ring(None).members
    assert len(everyone) == len(members)
    for position, member in enumerate(members):
        load, index = candidates._ledger.loads[member.id], candidates._caches.index(member.id)
        load.end_overdue(now)
        cached_tokens = min(index.matched_blocks(chain.hashes) * BLOCK_TOKENS, chain.tokens)
        queue_s = load.queue_s(now, router.pool.routing.rebalance.decode_stall_s)
        compute_s = load.speed.current.compute_s(chain.tokens - cached_tokens, cached_tokens)
        kv_tokens = load.kv.tokens + load.others.load.active_kv_tokens
        candidate = everyone[position]
        assert (candidate.id, candidate.matched_tokens) == (member.id, cached_tokens)
        assert candidate.queue_s == pytest.approx(queue_s, abs=1e-9)
        assert candidate.compute_s == compute_s
        assert candidate.active_kv_tokens == kv_tokens
        assert candidate.pending_tokens == pending_tokens[position]
        assert candidate.in_flight == in_flight[position]
        assert pending_tokens[position] == (
            load.prefills.tokens + load.queue.tokens + load.others.load.pending_prefill_tokens
        )
        assert in_flight[position] == load.working + load.others.load.in_flight
        assert requests[position] == in_flight[position] + len(load.queue)
        assert placed_tokens[position] == kv_tokens + load.queue.tokens
        assert distinct_tokens[position] == distinct_of(load, chain) + kv_tokens - load.kv.tokens + load.queue.tokens
        assert matched_tokens[position] == cached_tokens
        for weights, column in zip(WEIGHTS, columns, strict=True):
            active_s = kv_tokens * load.speed.current.linear_s
            cost_s = queue_s + weights.compute * compute_s + weights.active_kv * active_s
            assert column[position] == pytest.approx(cost_s, abs=1e-9)


@pytest.mark.parametrize("window_s", [0.1, float("inf")])
@pytest.mark.parametrize("seed", range(12))
def test_view_columns_equal_the_candidates(seed: int, window_s: float) -> None:
    chance, now, live = random.Random(seed), 0.0, list[str]()
    router = PoolRouter(pool_of("dualmap", window_s))
    for number in range(150):
        now += chance.choice([0.0, 0.01, 0.3])
        step(router, chance, now, number, live)
        # Loads also change with time: first prefills exceed their estimate, stall, or end without a report.
        for later_s in (0.0, 0.05, 0.4, 1.5)[: chance.randrange(5)]:
            now += later_s
            check(router, now, chain_of(chance))


@pytest.mark.parametrize("policy", ["dualmap", "min_ttft", "least_loaded"])
def test_view_cheapest_member_has_the_least_documented_cost(policy: str) -> None:
    chance, now, live, searched = random.Random(7), 0.0, list[str](), 0
    router = PoolRouter(pool_of(policy, float("inf")))
    costs = {
        "dualmap": lambda each: (
            each.queue_s + 3.0 * each.compute_s + 0.2 * each.active_kv_tokens / each.tokens_per_second
        ),
        "min_ttft": lambda each: each.ttft_s,
        "least_loaded": lambda each: each.pending_tokens,
    }
    for number in range(400):
        now += chance.choice([0.0, 0.01, 0.1])
        step(router, chance, now, number, live)
        chain, candidates = chain_of(chance), router._fleet.candidates
        view, ring = candidates.view(now, chain), candidates.ring(None)
        everyone = candidates.everyone(view, ring)
        situation = Situation(
            request_id=str(number),
            prompt_tokens=chain.tokens,
            waited_s=chance.choice([0.0, 5.0]),
            sequence=0,
            slo_ttft_s=5.0,
            spill=router.pool.routing.spill,
            pair=tuple(view.candidate(member) for member in ring.pair(number)),
            everyone=everyone,
            ring_walk=partial(ring.walk, number),
            room_tokens=router.pool.engine.cache_tokens,
        )
        choice = POLICIES[policy].choose(situation)
        if choice.rule.name.startswith("pair-") and choice.rule.name != "pair-marginal":
            continue
        searched += 1
        least = min(costs[policy](each) for each in everyone)
        assert costs[policy](choice.candidate) == pytest.approx(least, abs=1e-9)
    assert searched > 100
