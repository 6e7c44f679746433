"""The index blocks that the members of a pool hold, as a dictionary from a block's key to a mask of holders.

A holder is one rank of one member (more precisely one group of its blocks). One walk along a prompt's chain finds the
number of leading blocks of every holder. An engine may lack a block in the middle of a prompt. A holder's number
therefore ends at its first missing block, also if it holds later blocks.

The dictionary is divided into parts by the key. A dictionary that grows copies all its entries, which takes a quarter
of a second with three million blocks.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from dualmap.engines.token_chain import KEY_SHIFT, TokenChain

CLEAN_BLOCKS: Final = 1024
"""The most blocks of holders that left which one call removes. More blocks would delay requests."""
_PARTS: Final = 256


class HeldBlocks:
    """The blocks of all holders of a pool. A holder is the number of its bit in the masks.

    ``stored`` is the number of blocks in the tables of all holders, which the members of the pool keep up to date.
    """

    def __init__(self) -> None:
        self.stored = 0
        self._masks: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self._free: list[int] = []
        self._holders = 0
        # The masks of a single holder are shared objects, so that most values of the dictionary take no memory.
        self._bits: list[int] = []
        # The holders that left, with their blocks that are still in the masks.
        self._leaving: deque[tuple[int, Iterator[int]]] = deque()

    def __len__(self) -> int:
        """The number of different blocks."""
        return sum(map(len, self._masks))

    def join(self) -> int:
        """Return a new holder."""
        if self._free:
            holder = self._free.pop()
        else:
            holder = len(self._bits)
            self._bits.append(1 << holder)
        self._holders |= self._bits[holder]
        return holder

    def leave(self, holder: int, links: Iterable[int]) -> None:
        """Remove a holder at once, and its blocks by this and later calls of ``clean``; ``links`` must not change."""
        self._holders ^= self._bits[holder]
        self._leaving.append((holder, iter(links)))
        self.clean()

    def clean(self) -> None:
        """Remove some blocks of holders that left."""
        left = CLEAN_BLOCKS
        while self._leaving and left:
            holder, links = self._leaving[0]
            part = list(islice(links, left))
            left -= len(part)
            self.drop(holder, part)
            if left:
                self._leaving.popleft()
                self._free.append(holder)

    def hold(self, holder: int, links: Iterable[int]) -> None:
        """Add blocks to a holder."""
        bit = self._bits[holder]
        for link in links:
            key = link >> KEY_SHIFT
            masks = self._masks[key % _PARTS]
            mask = masks.get(key)
            if mask is None:
                masks[key] = bit
            elif not mask & bit:
                masks[key] = mask | bit

    def holds(self, holder: int, key: int) -> bool:
        """Return whether a holder has a block."""
        return bool(self._masks[key % _PARTS].get(key, 0) & self._bits[holder])

    def drop(self, holder: int, links: Iterable[int]) -> None:
        """Remove blocks from a holder; blocks that it does not hold are ignored."""
        bit = self._bits[holder]
        for link in links:
            key = link >> KEY_SHIFT
            masks = self._masks[key % _PARTS]
            mask = masks.get(key, 0)
            if mask == bit:
                del masks[key]
            elif mask & bit:
                rest = mask ^ bit
                masks[key] = rest if rest & (rest - 1) else self._bits[rest.bit_length() - 1]

    def leading_blocks(self, chain: TokenChain) -> Mapping[int, int]:
        """Return each holder's number of held blocks of a chain from block 0 on, without holders that hold none."""
        masks = self._masks
        held = self._holders
        blocks: dict[int, int] = {}
        number = 0
        for key in chain.keys:
            still = masks[key % _PARTS].get(key, 0) & held
            if still != held:
                if number:
                    _set_all(blocks, held ^ still, number)
                if not still:
                    return blocks
                held = still
            number += 1
        if number:
            _set_all(blocks, held, number)
        return blocks


def _set_all(blocks: dict[int, int], mask: int, number: int) -> None:
    """Set ``number`` for each holder of a mask."""
    while mask:
        bit = mask & -mask
        blocks[bit.bit_length() - 1] = number
        mask ^= bit
