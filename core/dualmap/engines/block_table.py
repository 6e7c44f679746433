"""A hash table from an engine's block hashes to what the router knows of each block, in arrays instead of objects.

A block takes 17 bytes, and a table is between one third and two thirds full. A dictionary with the same values takes
about 140 bytes per block. The position of a hash depends on a secret number. A publisher therefore cannot choose hashes
that all have the same position, which would make every search slow.
"""

from array import array
from collections.abc import Iterator
from typing import Final

COPIES_MAX: Final = 8
"""The most copies that a table counts for a block."""

_BITS: Final = (1 << 64) - 1
_SMALLEST: Final = 6
# The bits of a slot's state: the number of copies, and whether the block ends an index block.
_COPIES: Final = 0x0F
_ENDS: Final = 0x10


class BlockTable:
    """Open addressing with linear probing. A free slot has the state 0.

    ``links`` has each block's link in its chain (``dualmap.engines.token_chain``). ``tails`` has the packed token ids
    behind the last full index block, for blocks that are smaller than an index block. It is None while there are none.
    """

    def __init__(self, secret: int) -> None:
        # An odd factor: the upper bits of the product depend on all bits of the hash.
        self._factor = secret | 1
        self._blocks = 0
        self.copies = 0
        self.tail_bytes = 0
        self.tails: list[bytes] | None = None
        self._allocate(_SMALLEST)

    def __len__(self) -> int:
        return self._blocks

    def find(self, block: int) -> int:
        """Return a block's slot, or -1. The slot is valid until the next change of the table."""
        states, hashes, last = self._states, self._hashes, self._last
        slot = (block * self._factor & _BITS) >> self._shift
        while states[slot]:
            if hashes[slot] == block:
                return slot
            slot = slot + 1 & last
        return -1

    def place(self, slot: int) -> tuple[int, bytes]:
        """Return the link and the tail of the block in a slot."""
        return self.links[slot], b"" if self.tails is None else self.tails[slot]

    def ends(self, slot: int) -> bool:
        """Return whether the block in a slot ends an index block."""
        return bool(self._states[slot] & _ENDS)

    def add(self, block: int, link: int, tail: bytes, *, ends: bool) -> None:
        """Add one copy of a block that the table does not contain."""
        if 3 * self._blocks >= 2 * len(self._states):
            self._double()
        if tail and self.tails is None:
            self.tails = [b""] * len(self._states)
        self._insert(block, link, tail, 1 | (_ENDS if ends else 0))
        self._blocks += 1
        self.copies += 1
        self.tail_bytes += len(tail)

    def add_copy(self, slot: int) -> None:
        """Count another copy of the block in a slot, up to ``COPIES_MAX``."""
        if self._states[slot] & _COPIES < COPIES_MAX:
            self._states[slot] += 1
            self.copies += 1

    def remove_copy(self, slot: int) -> bool:
        """Remove one copy of the block in a slot; return whether it was the last one."""
        self.copies -= 1
        if self._states[slot] & _COPIES > 1:
            self._states[slot] -= 1
            return False
        self._blocks -= 1
        if self.tails is not None:
            self.tail_bytes -= len(self.tails[slot])
        self._free(slot)
        return True

    def forget_copies(self) -> None:
        """Count each block as one copy."""
        states = self._states
        for slot, state in enumerate(states):
            if state:
                states[slot] = state & _ENDS | 1
        self.copies = self._blocks

    def ending_links(self) -> Iterator[int]:
        """Yield the links of all blocks that end an index block, of a table that no longer changes."""
        return (link for link, state in zip(self.links, self._states, strict=True) if state & _ENDS)

    def _insert(self, block: int, link: int, tail: bytes, state: int) -> None:
        states, last = self._states, self._last
        slot = (block * self._factor & _BITS) >> self._shift
        while states[slot]:
            slot = slot + 1 & last
        states[slot] = state
        self._hashes[slot] = block
        self.links[slot] = link
        if self.tails is not None:
            self.tails[slot] = tail

    def _free(self, slot: int) -> None:
        """Free a slot; move later blocks forward whose search would otherwise end at the free slot."""
        states, hashes, links, tails, last = self._states, self._hashes, self.links, self.tails, self._last
        at = slot
        while True:
            at = at + 1 & last
            if not states[at]:
                break
            home = (hashes[at] * self._factor & _BITS) >> self._shift
            # The distances are from the home position, around the end of the table.
            if (at - home & last) >= (at - slot & last):
                states[slot], hashes[slot], links[slot] = states[at], hashes[at], links[at]
                if tails is not None:
                    tails[slot] = tails[at]
                slot = at
        states[slot] = 0
        if tails is not None:
            tails[slot] = b""

    def _allocate(self, bits: int) -> None:
        size = 1 << bits
        self._shift = 64 - bits
        self._last = size - 1
        self._states = bytearray(size)
        self._hashes = array("Q", bytes(8 * size))
        self.links = array("Q", bytes(8 * size))
        if self.tails is not None:
            self.tails = [b""] * size

    def _double(self) -> None:
        states, hashes, links, tails = self._states, self._hashes, self.links, self.tails
        self._allocate(65 - self._shift)
        for slot, state in enumerate(states):
            if state:
                self._insert(hashes[slot], links[slot], b"" if tails is None else tails[slot], state)
