"""The engine's prefix cache: the prompt blocks with cached KV, and the order of their eviction.

The module models the real cache of an instance. ``engine.py`` fills the cache when prefills end. The router's estimate,
core's prefix index, is separate on purpose: as in production, both can differ.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """LRU cache of chained block hashes, bounded in blocks or unlimited. A block is evicted before its parent block.

    A chain is refreshed from its last block to its first, so every block is older than its parent block. The least
    recently used block therefore never has a child in the cache. So plain LRU order evicts children first, without a
    tree.

    Several engines may share one cache; each engine then finds the other engines' blocks.
    """

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def match(self, chain: Sequence[int]) -> int:
        """Return how many leading blocks of the chain are cached, without refreshing them."""
        cached = self._blocks
        for index, block in enumerate(chain):
            if block not in cached:
                return index
        return len(chain)

    def clear(self) -> None:
        """Evict all blocks."""
        self._blocks.clear()

    def insert(self, chain: Sequence[int]) -> None:
        """Store a chain or refresh its stored blocks, then evict blocks down to the capacity.

        The cache keeps only the beginning of a chain that is longer than the cache, because a block without its parent
        cannot be found.
        """
        blocks = self._blocks
        for block in reversed(chain[: self._capacity_blocks]):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = None
        if self._capacity_blocks is not None:
            while len(blocks) > self._capacity_blocks:
                blocks.popitem(last=False)
