"""Unpacks messages of KV events, a bounded part at a time.

A message can have thousands of events, and an event thousands of blocks and token ids. To read and apply all of it at
once would delay every request. The events of a message are therefore separated first, without reading them. Then they
are read in slices, and events of many blocks are divided.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec

from dualmap.engines.events import EVENTS_MAX, Batch, Cleared, Event, Removed, Unreadable, read_batch
from dualmap.engines.token_chain import TOKEN_BYTES

EVENT_BYTES_MAX: Final = 1048576
"""The largest event; a message with a larger one is unreadable."""
FIELD_BYTES_MAX: Final = 196608
"""The largest field of an event that is no list of numbers or byte strings; an event with a larger one is invalid."""
SLICE_BLOCKS: Final = 512
"""The most blocks of a slice."""
SLICE_EVENTS: Final = 128
"""The most events of a slice."""
SLICE_BYTES: Final = 65536
"""A slice ends with the event that exceeds this number of bytes."""
_FIELDS_MAX: Final = 16
_EVENT_FIELDS_MAX: Final = 64
_INVALID: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError)

_Outer = (
    Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_FIELDS_MAX)]
    | Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=_FIELDS_MAX)]
)
# The lengths are checked before the elements are read.
_OUTER: Final[Any] = msgspec.msgpack.Decoder(_Outer)
_EVENTS: Final = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)])
_ANY: Final = msgspec.msgpack.Decoder()
_FIELDS: Final[Any] = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_EVENT_FIELDS_MAX)]
    | Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=_EVENT_FIELDS_MAX)]
)
# Lists of lists take ten times longer to read than lists of numbers.
_NUMBERS: Final = msgspec.msgpack.Decoder(list[int | bytes])


def slices(payload: bytes) -> Iterator[Batch | Unreadable]:
    """Yield the events of a packed message in slices; Unreadable ends the message."""
    try:
        events = _events(payload)
    except _INVALID as error:
        yield Unreadable(f"the message is invalid: {_reason(error)}")
        return
    if isinstance(events, Unreadable):
        yield events
        return
    start = 0
    while start < len(events):
        listed: list[object] = []
        size = 0
        while start + len(listed) < len(events) and len(listed) < SLICE_EVENTS and size < SLICE_BYTES:
            event = events[start + len(listed)]
            length = len(memoryview(event))
            if length > EVENT_BYTES_MAX:
                yield Unreadable(f"an event has more than {EVENT_BYTES_MAX} bytes")
                return
            try:
                listed.append(_ANY.decode(event) if length <= FIELD_BYTES_MAX else _large_event(event))
            except _INVALID:
                # ``read_batch`` counts it as an invalid event.
                listed.append(None)
            size += length
        start += len(listed)
        read = read_batch([None, listed])
        yield from [read] if isinstance(read, Unreadable) else _parts(read)


def _events(payload: bytes) -> list[msgspec.Raw] | Unreadable:
    outer = _OUTER.decode(payload)
    listed = outer.get("events") if isinstance(outer, dict) else outer[1] if len(outer) > 1 else None
    if listed is None:
        return Unreadable("the message has no list of events")
    events: list[msgspec.Raw] = _EVENTS.decode(listed)
    return events


def _large_event(event: msgspec.Raw) -> object:
    """Return an event of which only lists of numbers may be large."""
    fields = _FIELDS.decode(event)
    if isinstance(fields, dict):
        return {name: _field(value) for name, value in fields.items()}
    return [_field(value) for value in fields]


def _field(value: msgspec.Raw) -> object:
    return _ANY.decode(value) if len(memoryview(value)) <= FIELD_BYTES_MAX else _NUMBERS.decode(value)


def _parts(batch: Batch) -> Iterator[Batch]:
    """Yield the events of a batch with a bounded number of blocks each."""
    events: list[Event] = []
    blocks = 0
    for event in batch.events:
        for part in _divided(event):
            more = 0 if isinstance(part, Cleared) else len(part.hashes)
            if events and blocks + more > SLICE_BLOCKS:
                yield Batch(events=tuple(events))
                events, blocks = [], 0
            events.append(part)
            blocks += more
    yield replace(batch, events=tuple(events))


def _divided(event: Event) -> Iterator[Event]:
    """Yield an event's blocks as several events; the first block of each follows the last one of the event before."""
    if isinstance(event, Cleared) or len(event.hashes) <= SLICE_BLOCKS:
        yield event
        return
    for start in range(0, len(event.hashes), SLICE_BLOCKS):
        end = start + SLICE_BLOCKS
        hashes = event.hashes[start:end]
        if isinstance(event, Removed):
            yield replace(event, hashes=hashes)
        elif not event.dense:
            # The tokens of sparse blocks have no positions, and are not read.
            yield replace(event, hashes=hashes, tokens=b"", media=())
        else:
            size = event.block_tokens * TOKEN_BYTES
            yield replace(
                event,
                hashes=hashes,
                parent=event.hashes[start - 1] if start else event.parent,
                tokens=event.tokens[start * size : end * size],
                media=event.media[start:end],
                last=event.hashes[-1],
            )


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
