"""Reads KV cache events: converts unpacked msgpack messages of vLLM, SGLang and TensorRT-LLM to values.

A message is an array of time, events and rank, or a map. Older engines send each event as an array with the event's
name first (vLLM up to 0.23, SGLang up to 0.5.19), and newer ones as a map with ``type``. Block hashes are integers of
64 bits, signed or unsigned, or bytes of which the last eight count. Fields and events of later releases are counted and
ignored. An invalid event is counted and ignored; an invalid message is ``Unreadable``. No input raises an exception.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from dualmap.engines.token_chain import MediaId, pack_tokens

EVENTS_MAX: Final = 65536
"""The most events of a message; a message with more is unreadable."""
HASHES_MAX: Final = 16384
"""The most block hashes of an event; an event with more is invalid."""
TOKENS_MAX: Final = 1048576
"""The most token ids of an event; an event with more is invalid."""
BLOCK_TOKENS_MAX: Final = 16384
"""The largest block of an engine, in tokens; an event with larger blocks is invalid."""
NAME_CHARACTERS: Final = 4096
"""The longest name of an adapter, salt or medium; an event with a longer one is invalid."""
EXTRA_KEYS_MAX: Final = 256
"""The most extra keys of a block; an event with more is invalid."""

_HASH_BITS: Final = (1 << 64) - 1
_HASH_BYTES: Final = range(8, 65)
# The fields of vLLM 0.33 in the order of its arrays. Older releases and SGLang send the first of them.
_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"),
    *("lookahead_token_ids",),
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")
# Fields that only maps contain: of SGLang, of TensorRT-LLM, and one that is proposed for vLLM.
_MAP_FIELDS: Final = frozenset(("type", "cache_salt", "mm_keys", "origin"))
_KNOWN_STORED: Final = _MAP_FIELDS.union(_STORED_FIELDS)
_KNOWN_REMOVED: Final = _MAP_FIELDS.union(_REMOVED_FIELDS)
# Kinds of attention in which every block of a prompt stays in memory. The blocks of other kinds have no positions.
_DENSE_KINDS: Final = frozenset(("full_attention", "mla_attention", "sink_full_attention"))
# Stands for a token whose id is not a number: TensorRT-LLM sends the digest of an image instead.
_PLACEHOLDER: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An engine stored consecutive blocks of a sequence.

    ``parent`` is the hash of the block before, None at the start of a prompt. ``tokens`` are packed token ids.
    ``media`` contains the media of each block, and is empty if no block has any. ``new`` tells that each block is a
    further copy. Otherwise the event may also be a report of blocks that were stored before. For a part of a divided
    event, ``last`` is the last block of the whole event.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    block_tokens: int
    on_gpu: bool = True
    group: int | None = None
    dense: bool = True
    adapter: str = ""
    salt: str = ""
    media: tuple[tuple[MediaId, ...], ...] = ()
    new: bool = True
    last: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """An engine removed one copy of each of these blocks; a hash may occur several times."""

    hashes: tuple[int, ...]
    on_gpu: bool = True
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """An engine removed all blocks."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The events of a message, in order; consecutive removals are one event. ``sent_s`` is the engine's wall time."""

    events: tuple[Event, ...]
    sent_s: float | None = None
    unknown_events: int = 0
    unknown_fields: int = 0
    invalid_events: int = 0


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that is not a message of events, with the reason."""

    reason: str


class _InvalidEvent(Exception):
    """An event's field has a wrong type or is out of bounds."""


def read_batch(message: object) -> Batch | Unreadable:
    """Return the events of an unpacked message."""
    if isinstance(message, dict):
        sent, listed = message.get("ts"), message.get("events")
    elif isinstance(message, list | tuple) and len(message) >= 2:
        sent, listed = message[0], message[1]
    else:
        return Unreadable("the message is neither an array of time and events nor a map")
    if not isinstance(listed, list | tuple):
        return Unreadable("the message has no list of events")
    if len(listed) > EVENTS_MAX:
        return Unreadable(f"the message has more than {EVENTS_MAX} events")
    return _Reader().read(listed, sent)


class _Reader:
    """Reads the events of one message and counts what it ignores."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        # Consecutive removals. Engines send one event per removed block.
        self._removed: list[int] = []
        self._removed_from: tuple[bool, int | None] = (True, None)
        self._unknown_events = self._unknown_fields = self._invalid_events = 0

    def read(self, listed: Sequence[object], sent: object) -> Batch:
        for each in listed:
            try:
                self._read_event(each)
            except _InvalidEvent:
                self._invalid_events += 1
        self._end_removals()
        is_time = isinstance(sent, int | float) and abs(sent) < 1e15 and isfinite(sent)
        return Batch(
            events=tuple(self._events),
            sent_s=float(sent) if is_time else None,  # type: ignore[arg-type]
            unknown_events=self._unknown_events,
            unknown_fields=self._unknown_fields,
            invalid_events=self._invalid_events,
        )

    def _read_event(self, event: object) -> None:
        as_map = isinstance(event, dict)
        if isinstance(event, dict):
            tag = event.get("type")
        elif isinstance(event, list | tuple) and event:
            tag = event[0]
        else:
            raise _InvalidEvent
        if tag == "BlockRemoved":
            self._read_removed(self._fields(event, _REMOVED_FIELDS, _KNOWN_REMOVED))
        elif tag == "BlockStored":
            fields = self._fields(event, _STORED_FIELDS, _KNOWN_STORED)
            self._end_removals()
            event_stored = _read_stored(fields, as_map=as_map)
            if event_stored.hashes:
                # A chunk of which a sparse group keeps nothing has no hashes.
                self._events.append(event_stored)
        elif tag == "AllBlocksCleared":
            self._end_removals()
            self._events.append(Cleared())
        elif isinstance(tag, str):
            self._unknown_events += 1
        else:
            raise _InvalidEvent

    def _fields(self, event: Any, names: tuple[str, ...], known: frozenset[str]) -> Mapping[str, object]:
        """Return an event's fields by name, and count those without a name."""
        if isinstance(event, dict):
            if not event.keys() <= known:
                self._unknown_fields += len(event.keys() - known)
            return event
        self._unknown_fields += max(0, len(event) - 1 - len(names))
        return dict(zip(names, event[1:], strict=False))

    def _read_removed(self, fields: Mapping[str, object]) -> None:
        source = (_is_on_gpu(fields), _group(fields))
        hashes = _hashes(fields)
        if source != self._removed_from:
            self._end_removals()
            self._removed_from = source
        self._removed += hashes

    def _end_removals(self) -> None:
        if self._removed:
            on_gpu, group = self._removed_from
            self._events.append(Removed(hashes=tuple(self._removed), on_gpu=on_gpu, group=group))
            self._removed.clear()


def _read_stored(fields: Mapping[str, object], *, as_map: bool) -> Stored:
    hashes = _hashes(fields)
    parent = fields.get("parent_block_hash")
    if parent == 0 and not as_map:
        # llm-d-inference-sim sends 0 at the start of a prompt. Hashes of real blocks are practically never 0.
        parent = None
    block_tokens = _integer(fields.get("block_size"), 1, BLOCK_TOKENS_MAX)
    ids = fields.get("token_ids")
    if not isinstance(ids, list | tuple) or len(ids) > TOKENS_MAX:
        raise _InvalidEvent
    tokens, named = _packed(ids, block_tokens)
    group = _group(fields)
    kind = _name(fields.get("kv_cache_spec_kind"))
    adapter = _adapter(fields)
    salt, media = _read_extra_keys(fields.get("extra_keys"), len(hashes), adapter, at_start=parent is None)
    if named:
        listed = media or ((),) * len(hashes)
        media = tuple((*each, *named.get(block, ())) for block, each in enumerate(listed))
    origin = fields.get("origin")
    return Stored(
        hashes=tuple(hashes),
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_tokens=block_tokens,
        on_gpu=_is_on_gpu(fields),
        group=group,
        # Engines that do not name the kind have one group, or their first group is dense.
        dense=(kind in _DENSE_KINDS if kind else group in (None, 0)) and len(ids) == block_tokens * len(hashes),
        adapter=adapter,
        salt=_name(fields.get("cache_salt")) or salt,
        media=media,
        # Only vLLM's reports are maps from the start of a prompt.
        new=origin != "REUSED" and (origin == "NEW" or parent is not None or not as_map),
    )


def _packed(ids: Sequence[object], block_tokens: int) -> tuple[bytes, dict[int, list[MediaId]]]:
    """Return packed token ids, and the names of tokens without an id by block.

    SGLang sends pairs with speculative decoding: a token and the next one. TensorRT-LLM sends a digest for a token of
    an image.
    """
    try:
        # A single call, because an event may have a million ids.
        return pack_tokens(ids), {}  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        pass
    numbers: list[object] = []
    named: dict[int, list[MediaId]] = {}
    for at, each in enumerate(ids):
        if isinstance(each, str):
            digests = named.setdefault(at // block_tokens, [])
            if not digests or digests[-1] != each:
                digests.append(_name(each))
            numbers.append(_PLACEHOLDER)
        else:
            numbers.append(each[0] if isinstance(each, list | tuple) and each else each)
    try:
        return pack_tokens(numbers), named  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        raise _InvalidEvent from None


def _read_extra_keys(
    value: object, blocks: int, adapter: str, *, at_start: bool
) -> tuple[str, tuple[tuple[MediaId, ...], ...]]:
    """Return the salt and the media of each block.

    vLLM's keys of a block are, without names: the adapter, the media, the salt (in a prompt's first block only), and
    the digest of embeddings (bytes). Media are pairs of identifier and offset, or in older releases identifiers alone.
    The last plain string of a prompt's first block is therefore the salt, unless it is the identifier of a medium that
    continues in the next block. An older release's medium that ends in the first block is thus read as a salt. The
    router then finds no match, but never a match of another salt.
    """
    if value is None:
        return "", ()
    if not isinstance(value, list | tuple) or len(value) > HASHES_MAX:
        raise _InvalidEvent
    if not any(value):
        return "", ()
    keys = [_read_block_keys(each, adapter) for each in value[:blocks]]
    keys += [_BlockKeys()] * (blocks - len(keys))
    salt = ""
    if at_start and keys and keys[0].plain:
        last = keys[0].plain[-1]
        if len(keys) < 2 or last not in keys[1].plain:
            salt = last
            keys[0] = _BlockKeys(plain=keys[0].plain[:-1], pairs=keys[0].pairs, digests=keys[0].digests)
    media: tuple[tuple[MediaId, ...], ...] = tuple((*each.plain, *each.pairs, *each.digests) for each in keys)
    return salt, media if any(media) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockKeys:
    """A block's extra keys without the adapter: plain strings, the identifiers of pairs, and digests."""

    plain: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    digests: tuple[bytes, ...] = ()


def _read_block_keys(keys: object, adapter: str) -> _BlockKeys:
    if keys is None:
        return _BlockKeys()
    if not isinstance(keys, list | tuple) or len(keys) > EXTRA_KEYS_MAX:
        raise _InvalidEvent
    plain: list[str] = []
    pairs: list[str] = []
    digests: list[bytes] = []
    for each in keys:
        if isinstance(each, str):
            plain.append(_name(each))
        elif isinstance(each, bytes) and len(each) <= NAME_CHARACTERS:
            digests.append(each)
        elif isinstance(each, list | tuple) and each and isinstance(each[0], str):
            pairs.append(_name(each[0]))
        else:
            raise _InvalidEvent
    if adapter in plain:
        plain.remove(adapter)
    return _BlockKeys(plain=tuple(plain), pairs=tuple(pairs), digests=tuple(digests))


def _adapter(fields: Mapping[str, object]) -> str:
    """Return the adapter's name; older engines send only a number, which no name of a request equals."""
    name = _name(fields.get("lora_name"))
    number = fields.get("lora_id")
    if name or number is None:
        return name
    if isinstance(number, str):
        return _name(f"\0{number}")
    return f"\0{_integer(number, -_HASH_BITS, _HASH_BITS)}"


def _is_on_gpu(fields: Mapping[str, object]) -> bool:
    """Return whether the blocks are in the engine's own GPU memory; engines without tiers do not name the medium."""
    if fields.get("locality") == "REMOTE":
        return False
    medium = fields.get("medium")
    return medium == "GPU" or _name(medium).upper() in ("", "GPU")


def _group(fields: Mapping[str, object]) -> int | None:
    value = fields.get("group_idx")
    return None if value is None else _integer(value, 0, 65535)


def _hashes(fields: Mapping[str, object]) -> list[int]:
    value = fields.get("block_hashes")
    if not isinstance(value, list | tuple) or len(value) > HASHES_MAX:
        raise _InvalidEvent
    return [each if type(each) is int and 0 <= each <= _HASH_BITS else _hash(each) for each in value]


def _hash(value: object) -> int:
    if type(value) is int and -(1 << 63) <= value <= _HASH_BITS:
        return value & _HASH_BITS
    if isinstance(value, bytes) and len(value) in _HASH_BYTES:
        return int.from_bytes(value[-8:], "big")
    raise _InvalidEvent


def _integer(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _InvalidEvent
    return value


def _name(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > NAME_CHARACTERS:
        raise _InvalidEvent
    return value
