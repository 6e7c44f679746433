"""Stored blocks whose parent is unknown. They wait, within a bound, until the engine reports the parent."""

from dataclasses import replace
from typing import Final

from dualmap.engines.events import Stored
from dualmap.engines.token_chain import TOKEN_BYTES

PARKED_TOKENS_MAX: Final = 131072
"""The most tokens of one group's blocks that wait for their parent; above, the oldest blocks are dropped."""


class ParkedStores:
    """The waiting events by their parent, the oldest parent first."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Stored]] = {}
        # The parent of each waiting block, so that a removal finds the block's event.
        self._parents: dict[int, int] = {}
        self._tokens = 0

    def __len__(self) -> int:
        """The number of blocks that wait."""
        return len(self._parents)

    def add(self, event: Stored, parent: int) -> bool:
        """Park an event; return whether blocks were dropped because of the bound."""
        tokens = _tokens_of(event)
        if tokens > PARKED_TOKENS_MAX:
            return True
        dropped = False
        while self._tokens + tokens > PARKED_TOKENS_MAX:
            self.take(next(iter(self._waiting)))
            dropped = True
        self._waiting.setdefault(parent, []).append(event)
        self._parents.update(dict.fromkeys(event.hashes, parent))
        self._tokens += tokens
        return dropped

    def take(self, parent: int) -> list[Stored]:
        """Remove and return the events that wait for a parent."""
        events = self._waiting.pop(parent, [])
        for event in events:
            self._forget(event)
        return events

    def remove(self, block: int) -> bool:
        """Remove a waiting block and the blocks behind it; return whether the block waited."""
        parent = self._parents.get(block)
        if parent is None:
            return False
        # The event may wait no more, if two events with the same block waited for different parents.
        for event in self.take(parent):
            if block in event.hashes:
                at = event.hashes.index(block)
                tokens = event.tokens[: at * event.block_tokens * TOKEN_BYTES]
                event = replace(event, hashes=event.hashes[:at], tokens=tokens, media=event.media[:at])
            if event.hashes:
                self.add(event, parent)
        return True

    def _forget(self, event: Stored) -> None:
        self._tokens -= _tokens_of(event)
        for block in event.hashes:
            self._parents.pop(block, None)


def _tokens_of(event: Stored) -> int:
    return len(event.tokens) // TOKEN_BYTES
