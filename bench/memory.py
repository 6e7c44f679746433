"""Measures the memory of the router's index per cached block, of a router, and of the blocks that engines report.

The baseline for the index is a dictionary with one entry per block.
"""

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from bench.decisions import BLOCK_TOKENS, chain_of, pool_of

from dualmap.engines.events import Batch, Stored
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.residency import Residency
from dualmap.engines.token_chain import pack_tokens
from dualmap.fleet.prefix_index import PrefixIndex, PrefixTree
from dualmap.requests import Request
from dualmap.router import PoolRouter

MEMBERS = 8
# The number of members whose engines report their blocks.
REPORTING = 3
# The capacity of the default cache of 1 000 000 tokens.
CAPACITY_BLOCKS = 1_000_000 // BLOCK_TOKENS

# Pairs of a member's number and the block hashes of a prompt sent to that member.
Prompts = Iterator[tuple[int, list[int]]]


def fresh(chance: random.Random, blocks: int) -> list[int]:
    return [chance.getrandbits(64) for _ in range(blocks)]


def private(chance: random.Random) -> Prompts:
    """4 to 60 blocks that no other prompt shares."""
    while True:
        yield chance.randrange(MEMBERS), fresh(chance, chance.randint(4, 60))


def system_prompts(chance: random.Random) -> Prompts:
    """One of 8 system prompts of 16 blocks, 1 to 30 own blocks, any member."""
    systems = [fresh(chance, 16) for _ in range(8)]
    while True:
        yield chance.randrange(MEMBERS), chance.choice(systems) + fresh(chance, chance.randint(1, 30))


def conversations(chance: random.Random) -> Prompts:
    """Sessions that grow by 1 to 4 blocks a turn at a pair of members, about 40 turns long."""
    systems = [fresh(chance, 4) for _ in range(8)]
    sessions: list[tuple[list[int], list[int]]] = []
    while True:
        if len(sessions) < 100 * MEMBERS:
            sessions.append((chance.sample(range(MEMBERS), 2), list(chance.choice(systems))))
        turn = chance.randrange(len(sessions))
        pair, blocks = sessions[turn]
        blocks += fresh(chance, chance.randint(1, 4))
        # Nine of ten turns go to the first member of the pair, which has the session's earlier blocks.
        yield pair[chance.random() < 0.1], list(blocks)
        if chance.random() < 1 / 40:
            sessions.pop(turn)


def single_blocks(chance: random.Random) -> Prompts:
    """The worst case: each prompt adds one block of its own to a system prompt of 4."""
    systems = [fresh(chance, 4) for _ in range(8)]
    while True:
        yield chance.randrange(MEMBERS), [*chance.choice(systems), *fresh(chance, 1)]


class Index(Protocol):
    def __len__(self) -> int: ...

    def add(self, hashes: Sequence[int]) -> None: ...


class FlatIndex:
    """The baseline: a dictionary with one entry per block for each member, least recently used first."""

    def __init__(self) -> None:
        self._held: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, hashes: Sequence[int]) -> None:
        for block in reversed(hashes):
            self._held.pop(block, None)
            self._held[block] = None
        for block in list(islice(self._held, max(0, len(self._held) - CAPACITY_BLOCKS))):
            del self._held[block]


def tree_indexes() -> list[Index]:
    tree = PrefixTree()
    return [PrefixIndex(CAPACITY_BLOCKS, tree) for _ in range(MEMBERS)]


def flat_indexes() -> list[Index]:
    return [FlatIndex() for _ in range(MEMBERS)]


def bytes_per_block(workload: Callable[[random.Random], Prompts], make: Callable[[], list[Index]]) -> float:
    """Fill every member and send as many requests again, so that eviction has run for some time."""
    prompts, filled = workload(random.Random(1)), 0
    gc.collect()
    tracemalloc.start()
    indexes = make()
    outside = tracemalloc.get_traced_memory()[0]
    for sent, (member, hashes) in enumerate(prompts, start=1):
        indexes[member].add(hashes)
        if not filled and min(map(len, indexes)) > 0.9 * CAPACITY_BLOCKS:
            filled = sent
        if filled and sent >= 2 * filled:
            break
    # Exclude the memory of the workload's own blocks.
    del hashes
    prompts.close()  # type: ignore[attr-defined]  # Every workload is a generator.
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - outside
    tracemalloc.stop()
    return used / sum(map(len, indexes))


def router_bytes(requests: int) -> tuple[float, float]:
    """Return a router's memory per member and per block, after the end of requests with 4 to 60 blocks."""
    chance = random.Random(5)
    gc.collect()
    tracemalloc.start()
    router = PoolRouter(pool_of(MEMBERS, "dualmap"))
    for n in range(requests):
        chain = chain_of(fresh(chance, chance.randint(4, 60)))
        router.on_request(n * 0.01, Request(id=str(n), chain=chain, arrived_s=n * 0.01))
        router.on_first_token(n * 0.01, str(n))
        router.on_finished(n * 0.01, str(n))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / MEMBERS, used / sum(each.indexed_blocks for each in router.status().endpoints)


def reported(block_tokens: int, shared: float) -> tuple[float, float]:
    """Return the bytes of a member with a million cached tokens, and the bytes per block.

    ``shared`` is the share of the tokens that all members hold.
    """
    chance = random.Random(7)
    tokens = 1_000_000
    blocks = 500

    def prompts(share: float) -> list[Stored]:
        return [
            Stored(
                hashes=tuple(fresh(chance, blocks)),
                parent=None,
                tokens=pack_tokens(chance.choices(range(150_000), k=blocks * block_tokens)),
                block_tokens=block_tokens,
            )
            for _ in range(round(tokens * share / block_tokens / blocks))
        ]

    common = prompts(shared)
    own = [prompts(1.0 - shared) for _ in range(REPORTING)]
    gc.collect()
    tracemalloc.start()
    held = HeldBlocks()
    members = [Residency(held, model="m") for _ in range(REPORTING)]
    outside = tracemalloc.get_traced_memory()[0]
    for member, events in zip(members, own, strict=True):
        for event in (*common, *events):
            member.apply(0, Batch(events=(event,)))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - outside
    tracemalloc.stop()
    return used / REPORTING, used / sum(member.blocks for member in members)


def main() -> None:
    print(f"memory: bytes per block held, {MEMBERS} members of {CAPACITY_BLOCKS} blocks, all full and evicting")
    print("| prompts | tree of runs | an entry a block | ratio |")
    print("|---|---|---|---|")
    for workload in (private, system_prompts, conversations, single_blocks):
        tree, flat = bytes_per_block(workload, tree_indexes), bytes_per_block(workload, flat_indexes)
        print(f"| {(workload.__doc__ or '').rstrip('.')} | {tree:.0f} | {flat:.0f} | {tree / flat:.2f} |")
    member_bytes, block_bytes = router_bytes(4000)
    print(f"\na whole router: {member_bytes / 1024:.0f} KiB per member, {block_bytes:.0f} bytes per block held\n")
    print(f"blocks that engines report: {REPORTING} members with a million cached tokens each")
    print("| tokens of a block | share of the tokens that all members hold | MB per member | bytes per block |")
    print("|---|---|---|---|")
    for block_tokens, shared in ((16, 0.0), (16, 1.0), (32, 0.0)):
        of_member, of_block = reported(block_tokens, shared)
        print(f"| {block_tokens} | {shared:.0%} | {of_member / 1e6:.1f} | {of_block:.0f} |")
    print()
