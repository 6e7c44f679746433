"""Converts KV events to vLLM's messages, before msgpack, and keeps the last messages for replays.

vLLM encodes each event as a map since 0.24, and as an array before. ``kv_publisher.py`` packs and sends the messages.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from dualmap.engines.events import Event, Removed, Stored
from dualmap_sim.tokenizer import unpack

_KIND: Final = "full_attention"
_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind"),
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")


def message_of(
    events: Iterable[Event], *, at_s: float, rank: int = 0, as_arrays: bool = False, adapters: Sequence[str] = ()
) -> list[object]:
    """Return the message of one engine step. ``adapters`` are the engine's adapters, whose position is their number."""
    encoded = [each for event in events for each in _encoded(event, as_arrays, adapters)]
    return [at_s, encoded, rank]


def _encoded(event: Event, as_arrays: bool, adapters: Sequence[str]) -> list[object]:
    if isinstance(event, Stored):
        return [_tagged("BlockStored", _STORED_FIELDS, _stored(event, adapters), as_arrays)]
    if isinstance(event, Removed):
        # vLLM sends one event for each removed block.
        return [
            _tagged("BlockRemoved", _REMOVED_FIELDS, ([block], "GPU", event.group), as_arrays) for block in event.hashes
        ]
    return [_tagged("AllBlocksCleared", (), (), as_arrays)]


def _tagged(tag: str, names: Sequence[str], values: Sequence[object], as_arrays: bool) -> object:
    return [tag, *values] if as_arrays else {"type": tag, **dict(zip(names, values, strict=True))}


def _stored(event: Stored, adapters: Sequence[str]) -> tuple[object, ...]:
    keys: list[list[str] | None] = [[event.adapter] if event.adapter else None for _ in event.hashes]
    if event.salt:
        keys[0] = [*(keys[0] or ()), event.salt]
    name = event.adapter or None
    number = adapters.index(event.adapter) + 1 if event.adapter in adapters else None
    ids = unpack(event.tokens)
    return (list(event.hashes), event.parent, ids, event.block_tokens, number, "GPU", name, keys, event.group, _KIND)


class MessageLog:
    """The last ``kept`` messages of one rank in one life of an engine, with their numbers."""

    def __init__(self, kept: int) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)

    def add(self, number: int, payload: bytes) -> None:
        """Keep a message, whose number is above all earlier ones."""
        self._kept.append((number, payload))

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """Return the kept messages from a number on."""
        kept = list(self._kept)
        return kept[bisect_left(kept, (number,)) :]
