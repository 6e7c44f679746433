"""HTTP/2 frames (RFC 9113 sections 4, 6 and 7): numbers, layouts, and the frames that a server sends."""

from collections.abc import Iterable
from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# The largest payload that every peer accepts. Both directions use it; Envoy sends no larger frames either.
FRAME_BYTES: Final = 16_384
WINDOW_MAX: Final = 2**31 - 1
# The windows before SETTINGS and WINDOW_UPDATE.
WINDOW_INITIAL: Final = 65_535
STREAM_MAX: Final = 2**31 - 1

# Frame types.
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

# Flags. ACK has the value of END_STREAM on other types.
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

# Settings.
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

# Length and type in one number, then flags, then the stream with a reserved bit.
HEADER: Final = Struct(">IBI")
HEADER_BYTES: Final = HEADER.size
NUMBER: Final = Struct(">I")
SETTING: Final = Struct(">HI")
_NUMBER_FRAME: Final = Struct(">IBII")
_GOAWAY_FRAME: Final = Struct(">IBIII")


class ErrorCode(IntEnum):
    """The error codes of RFC 9113 section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """Return a SETTINGS frame."""
    payload = b"".join(SETTING.pack(*each) for each in values)
    return HEADER.pack(len(payload) << 8 | SETTINGS, 0, 0) + payload


SETTINGS_ACK: Final = HEADER.pack(SETTINGS, ACK, 0)
_PING: Final = HEADER.pack(8 << 8 | PING, 0, 0)
_PING_ACK: Final = HEADER.pack(8 << 8 | PING, ACK, 0)


def ping(payload: bytes) -> bytes:
    """Return a PING frame with 8 bytes."""
    return _PING + payload


def ping_ack(payload: bytes) -> bytes:
    """Return the answer to a PING frame."""
    return _PING_ACK + payload


def window_update(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return _NUMBER_FRAME.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id, increment)


def rst_stream(stream_id: int, code: int) -> bytes:
    """Return a RST_STREAM frame."""
    return _NUMBER_FRAME.pack(4 << 8 | RST_STREAM, 0, stream_id, code)


def goaway(last_stream_id: int, code: int, text: bytes) -> bytes:
    """Return a GOAWAY frame with a text for the peer's log."""
    return _GOAWAY_FRAME.pack(8 + len(text) << 8 | GOAWAY, 0, 0, last_stream_id, code) + text


def headers(stream_id: int, block: bytes, flags: int) -> bytes:
    """Return a HEADERS frame with a whole block."""
    return HEADER.pack(len(block) << 8 | HEADERS, flags | END_HEADERS, stream_id) + block
