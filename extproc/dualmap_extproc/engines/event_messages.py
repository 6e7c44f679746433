"""Unpacks messages of KV events, a bounded part at a time.

A message can have thousands of events, and an event thousands of token ids. To read all of it at once would delay every
request. The events of a message are therefore separated first, without reading them, and then read in slices.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from dualmap.engines.events import EVENTS_MAX, Batch, Unreadable, read_batch

EVENT_BYTES_MAX: Final = 1048576
"""The largest event; a message with a larger one is unreadable."""
SLICE_EVENTS: Final = 128
"""The most events of a slice."""
SLICE_BYTES: Final = 65536
"""A slice ends with the event that exceeds this number of bytes."""
_FIELDS_MAX: Final = 16
_INVALID: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError)

_Outer = (
    Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_FIELDS_MAX)]
    | Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=_FIELDS_MAX)]
)
# The lengths are checked before the elements are read.
_OUTER: Final[Any] = msgspec.msgpack.Decoder(_Outer)
_EVENTS: Final = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)])
_ANY: Final = msgspec.msgpack.Decoder()


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
                listed.append(_ANY.decode(event))
            except _INVALID:
                # ``read_batch`` counts it as an invalid event.
                listed.append(None)
            size += length
        start += len(listed)
        yield read_batch([None, listed])


def _events(payload: bytes) -> list[msgspec.Raw] | Unreadable:
    outer = _OUTER.decode(payload)
    listed = outer.get("events") if isinstance(outer, dict) else outer[1] if len(outer) > 1 else None
    if listed is None:
        return Unreadable("the message has no list of events")
    events: list[msgspec.Raw] = _EVENTS.decode(listed)
    return events


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
