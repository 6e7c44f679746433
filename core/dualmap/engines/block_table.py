"""A hash table from an engine's block hashes to what the router knows of each block, in arrays instead of objects.

A block takes 17 bytes, and a table is about half full. A dictionary with the same values takes about 140 bytes per
block. The position of a hash depends on a secret number. A publisher therefore cannot choose hashes that all have the
same position, which would make every search slow.

The table grows in segments. A full segment is enlarged, and above ``SEGMENT_SLOTS`` it is split in two. One call thus
moves a few hundred blocks at most, so that a large table does not delay requests while it grows.
"""

from array import array
from collections.abc import Iterator
from typing import Final

COPIES_MAX: Final = 8
"""The most copies that a table counts for a block."""
SEGMENT_SLOTS: Final = 1024
"""The largest segment."""

_BITS: Final = (1 << 64) - 1
_SLOT_BITS: Final = SEGMENT_SLOTS.bit_length() - 1
_SMALLEST: Final = 6
# The bits of a slot's state: the number of copies, whether the block ends an index block, whether its copies were
# forgotten since it was stored, and whether the engine may have more copies of it than are counted.
_COPIES: Final = 0x0F
_ENDS: Final = 0x10
_FORGOTTEN: Final = 0x20
_MORE: Final = 0x40
# The state after the copies were forgotten, by the state before. A segment is translated a hundred times faster than by
# a loop.
_FORGET: Final = bytes(
    0 if not state else state & (_ENDS | _MORE) | _FORGOTTEN | 1 | (_MORE if state & _COPIES > 1 else 0)
    for state in range(256)
)


class BlockTable:
    """Extendible hashing: the first bits of a position choose the segment, the next ones the slot in the segment.

    A slot is a number that contains the segment's number. ``copies`` is the sum of the counted copies of all blocks.
    ``may_remain`` tells whether the engine may still have the block whose last copy was removed last.
    """

    def __init__(self, secret: int) -> None:
        # An odd factor: the upper bits of the product depend on all bits of the hash.
        self._factor = secret | 1
        self._blocks = 0
        self.copies = 0
        self.may_remain = False
        # How often the copies were forgotten. A segment forgets them when it is used next.
        self._forgotten = 0
        self.tail_bytes = 0
        self._segments = [_Segment(0, _SMALLEST, 0)]
        # For each value of the first ``_depth`` bits, the number of its segment.
        self._directory = [0]
        self._depth = 0

    def __len__(self) -> int:
        return self._blocks

    def find(self, block: int) -> int:
        """Return a block's slot, or -1. The slot is valid until the next change of the table."""
        return max(self.seek(block), -1)

    def seek(self, block: int) -> int:
        """Return a block's slot; -2 - slot with the slot where ``add`` can place it if the table does not contain it.

        The slot is valid until the next change of the table.
        """
        position = block * self._factor & _BITS
        number = self._directory[position >> 64 - self._depth]
        segment = self._segments[number]
        states, hashes, last = segment.states, segment.hashes, segment.last
        slot = position >> segment.shift & last
        while states[slot]:
            if hashes[slot] == block:
                return number << _SLOT_BITS | slot
            slot = slot + 1 & last
        return -2 - (number << _SLOT_BITS | slot)

    def place(self, slot: int) -> tuple[int, bytes]:
        """Return the link and the tail of the block in a slot.

        The link is the block's place in its chain (``dualmap.engines.token_chain``). The tail has the packed token ids
        behind the last full index block, for blocks that are smaller than an index block.
        """
        segment, at = self._at(slot)
        return segment.links[at], b"" if segment.tails is None else segment.tails[at]

    def ends(self, slot: int) -> bool:
        """Return whether the block in a slot ends an index block."""
        segment, at = self._at(slot)
        return bool(segment.states[at] & _ENDS)

    def add(self, block: int, link: int, tail: bytes, *, ends: bool, sought: int | None = None) -> None:
        """Add one copy of a block that the table does not contain; ``sought`` is what ``seek`` has returned for it."""
        if sought is None:
            sought = self.seek(block)
        free = -2 - sought
        segment = self._segments[free >> _SLOT_BITS]
        while 3 * segment.blocks >= 2 * len(segment.states):
            self._grow(free >> _SLOT_BITS, block * self._factor & _BITS)
            free = -2 - self.seek(block)
            segment = self._segments[free >> _SLOT_BITS]
        if segment.forgotten != self._forgotten:
            segment.forget_copies(self._forgotten)
        segment.put(free & SEGMENT_SLOTS - 1, block, link, tail, 1 | (_ENDS if ends else 0))
        self._blocks += 1
        self.copies += 1
        self.tail_bytes += len(tail)

    def add_copy(self, slot: int) -> None:
        """Count another copy of the block in a slot, up to ``COPIES_MAX``.

        The first one after the copies were forgotten may be the one that is counted already.
        """
        segment, at = self._at(slot)
        state = segment.states[at]
        if state & _FORGOTTEN:
            segment.states[at] = state & ~_FORGOTTEN | _MORE
        elif state & _COPIES < COPIES_MAX:
            segment.states[at] += 1
            self.copies += 1
        else:
            segment.states[at] = state | _MORE

    def doubt(self, slot: int) -> None:
        """Mark the count of copies of the block in a slot as a lower bound."""
        segment, at = self._at(slot)
        segment.states[at] |= _MORE

    def remove(self, block: int) -> int | None:
        """Remove one copy of a block; None if the table does not contain it.

        Return the link of a block that ended an index block if it was the last copy, else -1.
        """
        slot = self.seek(block)
        if slot < 0:
            return None
        segment, at = self._at(slot)
        link = segment.links[at] if segment.states[at] & _ENDS else -1
        return link if self.remove_copy(slot) else -1

    def remove_copy(self, slot: int) -> bool:
        """Remove one copy of the block in a slot; return whether it was the last one."""
        segment, at = self._at(slot)
        self.copies -= 1
        if segment.states[at] & _COPIES > 1:
            segment.states[at] -= 1
            return False
        self._blocks -= 1
        self.may_remain = bool(segment.states[at] & _MORE)
        if segment.tails is not None:
            self.tail_bytes -= len(segment.tails[at])
        segment.free(at, self._factor)
        return True

    def forget_copies(self) -> None:
        """Count each block as one copy, and the next copy of each not at all."""
        self.copies = self._blocks
        self._forgotten += 1

    def ending_links(self) -> Iterator[int]:
        """Yield the links of all blocks that end an index block, of a table that no longer changes."""
        for segment in self._segments:
            for link, state in zip(segment.links, segment.states, strict=True):
                if state & _ENDS:
                    yield link

    def _at(self, slot: int) -> tuple["_Segment", int]:
        segment = self._segments[slot >> _SLOT_BITS]
        if segment.forgotten != self._forgotten:
            segment.forget_copies(self._forgotten)
        return segment, slot & SEGMENT_SLOTS - 1

    def _grow(self, number: int, position: int) -> None:
        """Enlarge the segment of a position, or split it."""
        segment = self._segments[number]
        segment.forget_copies(self._forgotten)
        if segment.bits < _SLOT_BITS:
            self._segments[number] = larger = _Segment(segment.depth, segment.bits + 1, self._forgotten)
            segment.move(self._factor, larger, larger)
            return
        if segment.depth == self._depth:
            self._directory = [each for each in self._directory for _ in range(2)]
            self._depth += 1
        depth = segment.depth + 1
        low, high = (_Segment(depth, _SLOT_BITS, self._forgotten) for _ in range(2))
        segment.move(self._factor, low, high)
        self._segments[number] = low
        self._segments.append(high)
        # The second half of the directory's entries for the segment.
        width = 1 << self._depth - depth
        start = (position >> 64 - segment.depth) * 2 * width + width
        self._directory[start : start + width] = [len(self._segments) - 1] * width


class _Segment:
    """Open addressing with linear probing. A free slot has the state 0.

    All positions of a segment begin with the same ``depth`` bits. ``tails`` is None while there are none. ``forgotten``
    is the table's number when the segment's copies were forgotten.
    """

    __slots__ = ("bits", "blocks", "depth", "forgotten", "hashes", "last", "links", "shift", "states", "tails")

    def __init__(self, depth: int, bits: int, forgotten: int) -> None:
        size = 1 << bits
        self.forgotten = forgotten
        self.depth = depth
        self.bits = bits
        self.shift = 64 - depth - bits
        self.last = size - 1
        self.blocks = 0
        self.states = bytearray(size)
        self.hashes = array("Q", bytes(8 * size))
        self.links = array("Q", bytes(8 * size))
        self.tails: list[bytes] | None = None

    def put(self, slot: int, block: int, link: int, tail: bytes, state: int) -> None:
        """Place a block in a free slot."""
        self.states[slot] = state
        self.hashes[slot] = block
        self.links[slot] = link
        if tail and self.tails is None:
            self.tails = [b""] * len(self.states)
        if self.tails is not None:
            self.tails[slot] = tail
        self.blocks += 1

    def forget_copies(self, forgotten: int) -> None:
        """Count each block as one copy, unless this was done for ``forgotten`` already."""
        if self.forgotten != forgotten:
            self.forgotten = forgotten
            self.states = self.states.translate(_FORGET)

    def move(self, factor: int, low: "_Segment", high: "_Segment") -> None:
        """Copy the blocks to other segments: to ``high`` those whose bit behind the segment's depth is set."""
        bit = 63 - self.depth
        for slot, state in enumerate(self.states):
            if state:
                block = self.hashes[slot]
                position = block * factor & _BITS
                to = high if position >> bit & 1 else low
                free = position >> to.shift & to.last
                while to.states[free]:
                    free = free + 1 & to.last
                to.put(free, block, self.links[slot], b"" if self.tails is None else self.tails[slot], state)

    def free(self, slot: int, factor: int) -> None:
        """Free a slot; move later blocks forward whose search would otherwise end at the free slot."""
        states, hashes, links, tails = self.states, self.hashes, self.links, self.tails
        shift, last = self.shift, self.last
        at = slot
        while True:
            at = at + 1 & last
            if not states[at]:
                break
            home = (hashes[at] * factor & _BITS) >> shift & last
            # The distances are from the home position, around the end of the segment.
            if (at - home & last) >= (at - slot & last):
                states[slot], hashes[slot], links[slot] = states[at], hashes[at], links[at]
                if tails is not None:
                    tails[slot] = tails[at]
                slot = at
        states[slot] = 0
        if tails is not None:
            tails[slot] = b""
        self.blocks -= 1
