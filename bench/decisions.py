"""Measures the time of one decision by policy, number of members and prompt length.

The times exclude reading and hashing the prompt. Each time is the tenth percentile, because other processes on the
machine disturb the slower samples. The dispatch window is unlimited, so no request is queued in the router. Each prompt
was sent a few times before and aborted. So the hotness tree contains the prompt's key, and the pair is known, as in a
conversation. The unique half of the prompt is in no member's cache. The benchmark ``rings`` shows the cost of a new
key.
"""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import quantiles

import orjson

from dualmap.policies.registry import POLICIES
from dualmap.pools.pool import Engine, Member, Model, Pool, Queue, Routing
from dualmap.prompts.blocks import BlockChain, chain_blocks, chain_root
from dualmap.prompts.prompt import Prompt, read_prompt
from dualmap.requests import Decision, Request
from dualmap.router import PoolRouter

SIZES = (8, 32, 256, 1024)
PROMPT_BYTES = {"2 KB": 2_000, "64 KB": 64_000, "220 KB": 220_000, "1 MB": 1_000_000}
BLOCK_TOKENS = 128
SYSTEM_PROMPTS = 8
REQUESTS = 200
REHEARSALS = 5
# The rules that examine every member for a decision.
SEARCHED = ("spill", "pair-marginal", "pair-cold", "min-ttft", "least-loaded")


# The policies that run at all sizes. The other policies run only at 256 members, where examining every member is slow.
IN_FULL = ("dualmap", "dualmap_paper", "min_ttft", "cache_affinity", "least_loaded", "round_robin")


def pool_of(members: int, policy: str) -> Pool:
    return Pool(
        namespace="bench",
        name="qwen",
        model=Model(name="m"),
        engine=Engine(),
        routing=Routing(policy=policy, queue=Queue(dispatch_window_s=float("inf"))),
        members=tuple(
            Member(id=f"qwen-{n}", address=f"10.0.{n // 250}.{n % 250 + 1}", port=8000) for n in range(members)
        ),
    )


def chain_of(hashes: list[int]) -> BlockChain:
    return BlockChain(hashes=tuple(hashes), block_tokens=BLOCK_TOKENS, tokens=len(hashes) * BLOCK_TOKENS)


def prompts(prompt_bytes: int) -> list[BlockChain]:
    """Return prompts of one length: the first half is one of eight system prompts, the second half is unique."""
    chance, blocks = random.Random(2), -(-prompt_bytes // (4 * BLOCK_TOKENS))
    systems = [[chance.getrandbits(64) for _ in range(blocks // 2)] for _ in range(SYSTEM_PROMPTS)]
    return [
        chain_of(chance.choice(systems) + [chance.getrandbits(64) for _ in range(blocks - blocks // 2)])
        for _ in range(REQUESTS)
    ]


def load_up(router: PoolRouter, chance: random.Random) -> None:
    """Give every member a random backlog of up to two SLOs."""
    for member in router.pool.members:
        left_s = chance.uniform(0.0, 2 * router.pool.slo.ttft_s)
        while left_s > 0.0:
            chain = chain_of([chance.getrandbits(64) for _ in range(chance.randint(10, 60))])
            name = f"{member.id} {left_s}"
            router.on_request(0.0, Request(id=name, chain=chain, arrived_s=0.0, subset=frozenset({member.endpoint})))
            left_s -= chain.tokens / router.pool.engine.prefill_tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The microseconds of a decision, and of a first token together with the request's end.

    If any decisions examined every member, only those decisions count.
    """

    decide_us: float
    events_us: float
    searched_share: float


def cost(members: int, policy: str, chains: list[BlockChain], *, loaded: bool) -> Cost:
    router = PoolRouter(pool_of(members, policy))
    if loaded:
        load_up(router, random.Random(3))
    for n, chain in enumerate(REHEARSALS * chains):
        router.on_request(n * 1e-3, Request(id=str(n), chain=chain, arrived_s=n * 1e-3))
        router.on_aborted(n * 1e-3, str(n))
    decide_s, events_s, searched_s = [], [], []
    for n, chain in enumerate(chains, start=REHEARSALS * len(chains)):
        now, name = n * 1e-3, str(n)
        request = Request(id=name, chain=chain, arrived_s=now)
        began_s = time.perf_counter()
        decision = router.on_request(now, request).answer
        chosen_s = time.perf_counter()
        if not loaded:
            # A first token would show that the earlier requests were lost, and would clear the backlog.
            router.on_first_token(now, name)
        router.on_finished(now, name)
        events_s.append(time.perf_counter() - chosen_s)
        decide_s.append(chosen_s - began_s)
        assert isinstance(decision, Decision)
        if decision.receipt.rule in SEARCHED:
            searched_s.append(chosen_s - began_s)
    return Cost(
        decide_us=undisturbed_us(searched_s or decide_s),
        events_us=undisturbed_us(events_s),
        searched_share=len(searched_s) / len(chains),
    )


def undisturbed_us(times_s: Iterable[float]) -> float:
    return quantiles(times_s, n=10)[0] * 1e6


def time_us(action: Callable[[], object], times: int = 100) -> float:
    clock = [time.perf_counter()]
    for _ in range(times):
        action()
        clock.append(time.perf_counter())
    return undisturbed_us(after - before for before, after in pairwise(clock))


def parse(body: bytes) -> Prompt:
    return read_prompt(orjson.loads(body))


def read_and_hash() -> None:
    print("reading and hashing: microseconds")
    print("| prompt | parse | hash |")
    print("|---|---|---|")
    for name, prompt_bytes in PROMPT_BYTES.items():
        text = "".join(random.Random(4).choices("abcdefghij klmnop\n", k=prompt_bytes))
        body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
        canonical = read_prompt(orjson.loads(body)).text
        parse_us = time_us(partial(parse, body))
        hash_us = time_us(partial(chain_blocks, canonical, root=chain_root(model="m"), block_tokens=BLOCK_TOKENS))
        print(f"| {name} | {parse_us:.0f} | {hash_us:.0f} |")
    print()


def decisions(*, loaded: bool) -> None:
    state = "every member is loaded with up to twice the SLO" if loaded else "idle members"
    print(f"decisions, {state}: microseconds per decision ({'end' if loaded else 'first token and end together'})")
    print(f"| policy | members | {' | '.join(PROMPT_BYTES)} | {'searched' if loaded else '1 MB / 2 KB'} |")
    print(f"|---|---|{'---|' * len(PROMPT_BYTES)}---|")
    chains = {name: prompts(prompt_bytes) for name, prompt_bytes in PROMPT_BYTES.items()}
    for policy in POLICIES:
        for members in SIZES if policy in IN_FULL else (256,):
            costs = [cost(members, policy, each, loaded=loaded) for each in chains.values()]
            row = " | ".join(f"{each.decide_us:.0f} ({each.events_us:.0f})" for each in costs)
            share = " ".join(f"{each.searched_share:.0%}" for each in costs)
            last = share if loaded else f"{costs[-1].decide_us / costs[0].decide_us:.1f}"
            print(f"| {policy} | {members} | {row} | {last} |")
    print()


def main() -> None:
    read_and_hash()
    decisions(loaded=False)
    decisions(loaded=True)
