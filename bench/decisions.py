"""Time of one decision per policy and number of members, apart from reading and hashing the prompt."""

import random
import time

from dualmap.blocks import BlockChain, chain_blocks, chain_root
from dualmap.policies import POLICIES
from dualmap.pool import Engine, Member, Model, Pool, Routing
from dualmap.requests import Decision, Request
from dualmap.router import PoolRouter

SIZES = (8, 32, 256, 1024)
REQUESTS = 600


def pool(members: int, policy: str) -> Pool:
    return Pool(
        namespace="bench",
        name="qwen",
        model=Model(name="m"),
        engine=Engine(),
        routing=Routing(policy=policy),
        members=tuple(
            Member(id=f"qwen-{n}", address=f"10.0.{n // 250}.{n % 250 + 1}", port=8000) for n in range(members)
        ),
    )


def prompts(count: int) -> list[BlockChain]:
    """Conversations of 512 to 8000 tokens behind one of eight system prompts of 512 tokens."""
    chance, root = random.Random(2), chain_root(model="m")
    systems = [chance.randbytes(2048) for _ in range(8)]
    return [
        chain_blocks(
            chance.choice(systems) + chance.randbytes(chance.randrange(0, 30_000)), root=root, block_tokens=128
        )
        for _ in range(count)
    ]


def decision_us(members: int, policy: str, chains: list[BlockChain]) -> float:
    """Every member is kept about half busy, so that both the pair's and the whole pool's rules are exercised."""
    router, now, spent = PoolRouter(pool(members, policy)), 0.0, 0.0
    for n, chain in enumerate(chains):
        now += 1.0 / members
        request = Request(id=str(n), chain=chain, arrived_s=now)
        began = time.perf_counter()
        decision = router.on_request(now, request)
        spent += time.perf_counter() - began
        assert isinstance(decision, Decision)
        if n >= members:
            router.on_first_token(now, str(n - members))
            router.on_finished(now, str(n - members))
    return spent / len(chains) * 1e6


def main() -> None:
    print("decisions: microseconds per decision, parse and hash excluded")
    print(f"| policy | {' | '.join(f'{size} members' for size in SIZES)} |")
    print(f"|---|{'---|' * len(SIZES)}")
    chains = prompts(REQUESTS)
    for policy in POLICIES:
        row = " | ".join(f"{decision_us(size, policy, chains):.0f}" for size in SIZES)
        print(f"| {policy} | {row} |")
    print()
