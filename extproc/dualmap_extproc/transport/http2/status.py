"""gRPC status codes, and the encoding of a status message."""

from enum import IntEnum
from typing import Final

# The most bytes of a percent-encoded status message. Peers limit the size of trailers: Envoy to 60 KiB by default.
MESSAGE_BYTES: Final = 1024
# The characters that PROTOCOL-HTTP2 sends unchanged: printable ASCII without the percent sign.
_PLAIN: Final = bytes(set(range(0x20, 0x7F)) - {0x25})
_ENCODED: Final = tuple(bytes((each,)) if each in _PLAIN else b"%%%02X" % each for each in range(256))


class Status(IntEnum):
    """The status codes of gRPC, as in ``google.rpc.Code``."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


def encoded(message: str) -> bytes:
    """Return the value of ``grpc-message``: UTF-8, percent-encoded, cut to at most MESSAGE_BYTES at a character."""
    out: list[bytes] = []
    size = 0
    for character in message:
        piece = b"".join(_ENCODED[each] for each in character.encode("utf-8", "replace"))
        size += len(piece)
        if size > MESSAGE_BYTES:
            break
        out.append(piece)
    return b"".join(out)
