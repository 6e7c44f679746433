"""Tests of the distinct blocks in flight against counts of single blocks, and of the steps that they take."""

import random
from collections.abc import Iterator
from typing import SupportsIndex

from dualmap.fleet.distinct_blocks import DistinctBlocks
from dualmap.prompts.blocks import MAX_BLOCKS, BlockChain


class Counts:
    """The number of prompts and of tokens of every single block."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, int]] = {}
        self._tails: list[int] = []

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self._blocks.values()) + sum(self._tails)

    def add(self, chain: BlockChain) -> None:
        for number, block in enumerate(chain.hashes, start=1):
            prompts, tokens = self._blocks.get(block, (0, chain.tokens_of(number) - chain.tokens_of(number - 1)))
            self._blocks[block] = prompts + 1, tokens
        self._tails.append(chain.tokens - chain.tokens_of(len(chain.hashes)))

    def remove(self, chain: BlockChain) -> None:
        for block in chain.hashes:
            prompts, tokens = self._blocks.pop(block)
            if prompts > 1:
                self._blocks[block] = prompts - 1, tokens
        self._tails.remove(chain.tokens - chain.tokens_of(len(chain.hashes)))

    def shared_blocks(self, chain: BlockChain) -> int:
        return sum(block in self._blocks for block in chain.hashes)


def random_chain(chance: random.Random, earlier: list[tuple[int, ...]]) -> BlockChain:
    """Return a prompt that continues a part of an earlier one, with blocks of any length; it may have no block."""
    begin = chance.choice(earlier)
    begin = begin[: chance.randint(0, len(begin))]
    hashes = begin + tuple(chance.getrandbits(64) for _ in range(chance.randint(0, 6)))
    earlier.append(hashes)
    block_tokens = chance.choice((16, 32, 33))
    return BlockChain(hashes, block_tokens, max(0, block_tokens * len(hashes) - chance.randint(-40, block_tokens - 1)))


def test_distinct_tokens_for_random_prompts_are_those_of_the_counted_blocks() -> None:
    for seed in range(60):
        chance, distinct, counts = random.Random(seed), DistinctBlocks(()), Counts()
        earlier: list[tuple[int, ...]] = [()]
        live: list[BlockChain] = []
        for _ in range(150):
            chain = random_chain(chance, earlier)
            del earlier[:-30]
            shared = counts.shared_blocks(chain)
            assert distinct.shared_blocks(chain) == shared
            assert distinct.tokens_with(chain) == counts.tokens + chain.tokens - chain.tokens_of(shared)
            live.append(chain)
            distinct.add(chain)
            counts.add(chain)
            while live and chance.random() < 0.5:
                ended = live.pop(chance.randrange(len(live)))
                distinct.remove(ended)
                counts.remove(ended)
            assert distinct.tokens == counts.tokens
        for chain in live:
            distinct.remove(chain)
        assert distinct.tokens == 0
        assert not distinct.by_first


class Reads(tuple[int, ...]):
    """The blocks of a prompt, which count how often one is read."""

    number = 0

    def __getitem__(self, at: SupportsIndex | slice) -> int:  # type: ignore[override]
        assert not isinstance(at, slice), "a prompt was copied"
        Reads.number += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("every block of a prompt was read")


def test_distinct_blocks_of_the_longest_prompts_are_counted_by_reading_a_few_of_them() -> None:
    common = range(MAX_BLOCKS // 2)
    prompts = [Reads((*common, *range(n * MAX_BLOCKS, n * MAX_BLOCKS + MAX_BLOCKS // 2))) for n in range(1, 5)]
    chains = [BlockChain(hashes, 16, 16 * MAX_BLOCKS) for hashes in prompts]
    distinct = DistinctBlocks(())
    for chain in chains:
        distinct.add(chain)
    assert distinct.tokens == 16 * MAX_BLOCKS // 2 * (1 + len(chains))
    for chain in chains:
        distinct.remove(chain)
    assert 0 < Reads.number < 1000
