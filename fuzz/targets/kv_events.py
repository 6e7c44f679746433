"""Fuzzes KV events: any process behind an engine's address can publish any frames in any order."""

from collections.abc import Sequence
from random import Random
from typing import Final

import msgspec

from dualmap.engines.events import EVENTS_MAX, Batch, Cleared, Stored, Unreadable, read_batch
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.residency import BLOCKS_MAX, GROUPS_MAX, REMOVED_MAX, Residency
from dualmap.engines.source import (
    QUEUE_MESSAGES,
    Clear,
    Effect,
    EventSource,
    ForgetCopies,
    Message,
    ReplayEnd,
    SourceState,
    read_frames,
)
from dualmap.engines.token_chain import chain_tokens, pack_tokens, token_root
from dualmap_extproc.engines.event_messages import SLICE_BLOCKS, SLICE_EVENTS, slices
from dualmap_extproc.engines.zmtp import FRAMES_MAX, ProtocolError, ZmtpConnection
from fuzz import trees
from fuzz.choices import Choices

_WORDS: Final = (
    *("type", "BlockStored", "BlockRemoved", "AllBlocksCleared", "block_hashes", "parent_block_hash", "token_ids"),
    *("block_size", "lora_id", "lora_name", "medium", "extra_keys", "group_idx", "kv_cache_spec_kind", "locality"),
    *("GPU", "CPU", "REMOTE", "full_attention", "sliding_window", "origin", "NEW", "REUSED", "cache_salt", "tenant"),
)
# Small numbers, so that stores and removals often concern the same blocks.
_HASHES: Final = (0, 1, 2, 3, 4, 5, 6, 7, 2**64 - 1, -1, -(2**63), bytes(8), b"\xff" * 32)
_SIZES: Final = (1, 1, 4, 8, 16, 16, 32, 16384)
_KEYS: Final[tuple[object, ...]] = (None, None, None, ["tenant"], ["adapter"], [["image", 0]], [b"digest"], [None])
# Another tenant's prompt, with tokens that the events often contain.
_FOREIGN: Final = chain_tokens(
    pack_tokens([0] * 65), root=token_root(model="m", cache_salt="the salt of another tenant"), block_tokens=16
)
_CAPACITY: Final = 12
# A peer's handshake.
_OPENING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x06\x05READY"
_MESSAGE_BYTES: Final = 200
_STEPS_MAX: Final = 100
# A text in a message can have bytes that are not UTF-8, and a map can have a key that no dictionary accepts.
_UNPACK_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, OverflowError, ValueError)


def check(data: bytes) -> None:
    """Check that any events leave a consistent state within its bounds, and never match another tenant's salt.

    The input is used as bytes of a connection, as a packed message, and as choices that build messages, replays and
    lost messages.
    """
    _check_connection(data)
    for part in slices(data):
        assert part.reason if isinstance(part, Unreadable) else len(part.events) <= SLICE_EVENTS
        if isinstance(part, Batch):
            assert sum(len(event.hashes) for event in part.events if not isinstance(event, Cleared)) <= SLICE_BLOCKS
    batch = _read(data)
    residency = Residency(held := HeldBlocks(), model="m")
    for rank in (0, 1):
        residency.apply(rank, batch)
        _check_blocks(residency, held)
    _check_source(Choices(data))


def mutate(data: bytes, random: Random) -> bytes | None:
    """Mutate the fields of a message."""
    try:
        message = msgspec.msgpack.decode(data)
    except _UNPACK_ERRORS:
        return None
    try:
        return msgspec.msgpack.encode(trees.mutate(message, random, _WORDS))
    except (TypeError, OverflowError, RecursionError):
        return None


def _check_connection(data: bytes) -> None:
    """Check that any bytes give messages within the bounds or an error, whatever the parts in which they arrive."""
    for opening in (b"", _OPENING):
        found = []
        for size in (1 + len(data) // 7, 1 + len(data)):
            connection = ZmtpConnection(b"SUB", (b"\x01",), message_bytes=_MESSAGE_BYTES)
            connection.receive(opening)
            messages: list[Sequence[bytes]] = []
            try:
                for start in range(0, len(data), size):
                    connection.receive(data[start : start + size])
                    while (frames := connection.next_message()) is not None:
                        assert len(frames) <= FRAMES_MAX
                        assert sum(map(len, frames)) <= _MESSAGE_BYTES
                        messages += [frames] if frames else []
            except ProtocolError as error:
                assert str(error)  # noqa: PT017 - the target is no test
            assert connection.waiting_bytes <= max(_MESSAGE_BYTES, len(_OPENING)) + len(data)
            found.append(messages)
        assert found[0] == found[1]


def _read(payload: bytes) -> Batch:
    try:
        message = msgspec.msgpack.decode(payload)
    except _UNPACK_ERRORS:
        return Batch(events=())
    read = read_batch(message)
    if isinstance(read, Unreadable):
        assert read.reason
        return Batch(events=())
    assert len(read.events) + read.invalid_events + read.unknown_events <= EVENTS_MAX
    for event in read.events:
        if not isinstance(event, Cleared):
            assert all(0 <= block < 2**64 for block in event.hashes)
        if isinstance(event, Stored):
            assert not event.dense or len(event.tokens) == 4 * event.block_tokens * len(event.hashes)
            assert len(event.media) in (0, len(event.hashes))
    return read


def _check_blocks(residency: Residency, held: HeldBlocks) -> None:
    assert len(held) <= residency.blocks <= BLOCKS_MAX
    assert held.stored == residency.blocks
    assert len(residency._groups) <= GROUPS_MAX
    assert sum(len(group.removed) for group in residency._each()) <= REMOVED_MAX
    assert all(set(group.removed_keys.values()) <= group.removed.keys() for group in residency._each())
    assert residency.matched_tokens(_FOREIGN) == 0


def _check_source(choices: Choices) -> None:
    """Publish messages, lose some of them, and check the order in which the others are applied."""
    source = EventSource(replays=choices.flag())
    residency = Residency(held := HeldBlocks(), model="m", capacity_blocks=_CAPACITY)
    now = 0.0
    # The messages of the engine's life; the first ones are no longer replayed.
    life: list[bytes] = []
    applied = -1

    def act(effects: Sequence[Effect]) -> None:
        nonlocal applied
        for effect in effects:
            if isinstance(effect, Clear):
                residency.clear(0)
                applied = -1
                continue
            if isinstance(effect, ForgetCopies):
                residency.forget_copies(0)
                continue
            assert effect.message.number > applied, "an older message is applied after a newer one"
            applied = effect.message.number
            residency.apply(0, _read(effect.message.payload))

    source.start(now)
    for _ in range(_STEPS_MAX):
        if not choices.more:
            break
        match choices.number() % 8:
            case 0 | 1 | 2:
                life.append(msgspec.msgpack.encode([1.5, [_event(choices) for _ in range(choices.number() % 4)], 0]))
                message = Message(len(life) - 1, life[-1])
                assert read_frames((b"topic", message.number.to_bytes(8, "big"), message.payload)) == message
                if choices.number() % 4:
                    act(source.on_live(now, message))
            case 3 if source.replay_wanted_s is not None:
                now = max(now, source.replay_wanted_s)
                wanted = source.begin_replay(now)
                for number in range(wanted.start + choices.number() % 3, len(life)):
                    if choices.number() % 4 != 3:
                        act(source.on_replayed(now, wanted.attempt, Message(number, life[number])))
                if choices.flag():
                    act(source.on_replayed(now, wanted.attempt, ReplayEnd.END))
            case 4:
                life = []
                if choices.flag():
                    act(source.on_restart(now))
            case 5:
                now += choices.number()
                act(source.on_deadline(now))
            case 6:
                act(source.on_live(now, Message(choices.number(8) >> 1, choices.chunk())))
            case 7:
                source.on_failed("closed")
                assert source.on_live(now, Message(5, b"")) == []
                if choices.flag():
                    act(source.on_refused())
                source.start(now)
            case _:
                pass
        assert (source.state is SourceState.PARTIAL) <= bool(source.reason)
        assert len(source._queue) <= QUEUE_MESSAGES
        assert (source.next_deadline is None) == (source.attempt is None)
        _check_blocks(residency, held)
        assert residency.blocks <= _CAPACITY
    residency.clear()
    assert (len(held), residency.blocks, residency.parked) == (0, 0, 0)


def _event(choices: Choices) -> object:
    hashes = [choices.pick(_HASHES) for _ in range(1 + choices.number() % 3)]
    match choices.number() % 4:
        case 0 | 1:
            size = choices.pick(_SIZES[:-1])
            fields = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": choices.pick((None, *_HASHES)),
                "token_ids": [choices.number() % 2] * (size * len(hashes)),
                "block_size": choices.pick((size, size, size, *_SIZES)),
                "extra_keys": [choices.pick(_KEYS)],
                "group_idx": choices.number() % 2,
            }
            return fields if choices.flag() else list(fields.values())
        case 2:
            return ["BlockRemoved", hashes, choices.pick(("GPU", "GPU", "CPU")), choices.number() % 2]
        case _:
            return ["AllBlocksCleared"]
