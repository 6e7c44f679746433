"""Stored blocks whose parent is unknown. They wait, within a bound, until the engine reports the parent."""

from dataclasses import dataclass, replace
from typing import Final

from dualmap.engines.events import Stored
from dualmap.engines.token_chain import TOKEN_BYTES

PARKED_BYTES_MAX: Final = 1048576
"""About the most bytes that a member's waiting blocks take; above, the oldest blocks are dropped."""

# What a block, a medium and an event take beside their token ids and names.
_BLOCK_BYTES: Final = 192
_MEDIUM_BYTES: Final = 128
_EVENT_BYTES: Final = 512


@dataclass(slots=True)
class _Waiting:
    """An event that waits; only its first ``blocks`` blocks still exist in the engine."""

    event: Stored
    blocks: int
    size: int


class ParkedStores:
    """The waiting events of a member by their group and parent, the oldest parent first.

    ``group`` is any number that differs between the groups.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], list[_Waiting]] = {}
        # The event of each waiting block, and the block's number in it, so that a removal finds it.
        self._blocks: dict[tuple[int, int], tuple[_Waiting, int]] = {}
        self._size = 0

    def __len__(self) -> int:
        """The number of blocks that wait."""
        return sum(number < waiting.blocks for waiting, number in self._blocks.values())

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, group: int, event: Stored, parent: int) -> bool:
        """Park an event; return whether blocks were dropped because of the bound."""
        size = size_of(event)
        if size > PARKED_BYTES_MAX:
            return True
        dropped = False
        while self._size + size > PARKED_BYTES_MAX:
            self.take(*next(iter(self._waiting)))
            dropped = True
        waiting = _Waiting(event, len(event.hashes), size)
        self._waiting.setdefault((group, parent), []).append(waiting)
        for number, block in enumerate(event.hashes):
            found = self._blocks.get((group, block))
            if found is None or found[1] >= found[0].blocks:
                self._blocks[group, block] = (waiting, number)
        self._size += size
        return dropped

    def take(self, group: int, parent: int) -> list[Stored]:
        """Remove and return the events that wait for a parent, without the blocks that were removed."""
        taken = self._waiting.pop((group, parent), [])
        for waiting in taken:
            self._size -= waiting.size
            for block in waiting.event.hashes:
                found = self._blocks.get((group, block))
                if found is not None and found[0] is waiting:
                    del self._blocks[group, block]
        return [_first(each.event, each.blocks) for each in taken if each.blocks]

    def remove(self, group: int, block: int) -> bool:
        """Remove a waiting block and those behind it in its event; return whether the block waited."""
        found = self._blocks.get((group, block))
        if found is None:
            return False
        waiting, number = found
        if number >= waiting.blocks:
            return False
        waiting.blocks = number
        return True

    def clear(self, group: int) -> None:
        """Drop the events of a group."""
        for each, parent in [key for key in self._waiting if key[0] == group]:
            self.take(each, parent)


def size_of(event: Stored) -> int:
    """Return about how many bytes a waiting event takes."""
    # A character takes up to four bytes.
    media = sum(_MEDIUM_BYTES + 4 * len(each) for block in event.media for each in block)
    names = 4 * (len(event.adapter) + len(event.salt))
    return _EVENT_BYTES + _BLOCK_BYTES * len(event.hashes) + len(event.tokens) + names + media


def _first(event: Stored, blocks: int) -> Stored:
    """Return the first blocks of an event."""
    if blocks == len(event.hashes):
        return event
    tokens = event.tokens[: blocks * event.block_tokens * TOKEN_BYTES]
    return replace(event, hashes=event.hashes[:blocks], tokens=tokens, media=event.media[:blocks])
