"""The engine's prefix cache: which prompt blocks have cached KV, and the order of their eviction.

This is the true content of an instance's cache. ``engine.py`` fills it as prefills end. The router's own estimate (the
core's prefix index) is separate on purpose, so that both can differ as in production.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """LRU over chained block hashes, bounded in blocks or not, leaves evicted before the blocks they hang on.

    A chain is refreshed from its last block to its first, so every block is older than the one before it in
    its chain. The oldest block of all therefore never has a descendant in the cache: plain LRU order *is*
    leaf-first order, without a tree.

    Several engines may share one; then each sees the others' blocks.
    """

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def match(self, chain: Sequence[int]) -> int:
        """Return how many blocks from the chain's first on are cached, without refreshing them."""
        cached = self._blocks
        for index, block in enumerate(chain):
            if block not in cached:
                return index
        return len(chain)

    def insert(self, chain: Sequence[int]) -> None:
        """Store a chain or refresh its stored blocks, then evict down to the capacity.

        Of a chain longer than the whole cache only its beginning is kept: the rest could not be reached
        without it.
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
