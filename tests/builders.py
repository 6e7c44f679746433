"""Helpers that create core values for many tests."""

from math import inf

from dualmap.pools.pool import Engine, Member, MemberState, Model, Pool, Queue, Routing
from dualmap.prompts.blocks import BlockChain, chain_blocks, chain_root
from dualmap.requests import Request

MODEL = "m"
NEVER_HOLD = Queue(dispatch_window_s=inf)


def members(count: int, *, weight: int = 100, state: MemberState = MemberState.ACTIVE) -> tuple[Member, ...]:
    return tuple(
        Member(id=f"m-{n}", address=f"10.0.{n // 250}.{n % 250 + 1}", port=8000, weight=weight, state=state)
        for n in range(count)
    )


def pool(
    count: int = 8, *, policy: str = "dualmap", engine: Engine | None = None, routing: Routing | None = None
) -> Pool:
    """Return a pool that queues no requests by default; ``routing`` overrides its settings."""
    return Pool(
        namespace="llm",
        name="qwen",
        model=Model(name=MODEL),
        engine=engine or Engine(),
        routing=routing or Routing(policy=policy, queue=NEVER_HOLD),
        members=members(count),
        ring_version=1,
    )


def chain(text: str, *, block_tokens: int = 128, salt: str = "") -> BlockChain:
    return chain_blocks(text.encode(), root=chain_root(model=MODEL, cache_salt=salt), block_tokens=block_tokens)


def request(
    id: str,
    text: str,
    *,
    now: float = 0.0,
    block_tokens: int = 128,
    subset: frozenset[str] | None = None,
    client: int = 0,
) -> Request:
    return Request(id=id, chain=chain(text, block_tokens=block_tokens), arrived_s=now, subset=subset, client=client)


def text_of(tokens: int, seed: str) -> str:
    """Return a text of exactly ``tokens`` estimated tokens, with different blocks for each ``seed``."""
    return (f"{seed}|" * (tokens * 4 // (len(seed) + 1) + 1))[: tokens * 4]
