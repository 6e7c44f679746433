"""Reads chunks of bodies without protobuf, and sends those of a response back.

A ``ProcessingRequest`` with a chunk has an ``HttpBody`` (``body = 1``, ``end_of_stream = 2``), and its answer has a
``StreamedBodyResponse`` with the same two fields. So the answer is a prefix, which depends on the length only, and a
copy of the encoded ``HttpBody``. Every output token of a gateway in FULL_DUPLEX_STREAMED passes this module.
"""

from functools import lru_cache
from typing import Final

# The first bytes of fields, by their numbers in ``ext_proc.proto``. All of them have a length.
_REQUEST_BODY_IN_REQUEST: Final = 4 << 3 | 2
_RESPONSE_BODY_IN_REQUEST: Final = 5 << 3 | 2
_METADATA_CONTEXT: Final = 8 << 3 | 2
_BODY: Final = 1 << 3 | 2
_END_OF_STREAM: Final = b"\x10\x01"
_NO_METADATA: Final = bytes((_METADATA_CONTEXT, 0))
# From the inside: streamed_response in BodyMutation, body_mutation in CommonResponse, response in BodyResponse, and
# response_body in ProcessingResponse.
_AROUND: Final = (3 << 3 | 2, 3 << 3 | 2, 1 << 3 | 2, 4 << 3 | 2)
# Lengths below this value take at most two bytes.
_TWO_BYTES: Final = 1 << 14
# The number of cached prefixes, of about 50 bytes each. Tokens have few different lengths.
_PREFIXES: Final = 4096


def request_chunk(message: bytes | memoryview) -> tuple[bytes, bool] | None:
    """Return the content of an encoded chunk of a request, and whether the chunk is the last one.

    The result is None for all other messages, for chunks with metadata, and for encodings that Envoy does not use.
    """
    end = len(message)
    if end < 2 or message[0] != _REQUEST_BODY_IN_REQUEST:
        return None
    try:
        size, at = _length(message, 1)
        stop = at + size
        if stop != end and message[stop:] != _NO_METADATA:
            return None
        body = b""
        if at < stop and message[at] == _BODY:
            size, start = _length(message, at + 1)
            at = start + size
            if at <= stop:
                body = bytes(message[start:at])
    except IndexError:
        return None
    if at == stop:
        return body, False
    return (body, True) if message[at:stop] == _END_OF_STREAM else None


def is_empty(message: bytes | memoryview) -> bool:
    """Return whether a chunk that ``echo`` answers has no content, because it only ends the body."""
    return message[1] == len(_END_OF_STREAM)


def echo(message: bytes | memoryview) -> tuple[bytes, bool] | None:
    """Return the encoded answer to an encoded chunk of a response, and whether the chunk is the last one.

    The result is None for all other messages, for chunks of 16 KB and more, and for encodings that Envoy does not use.
    The chunk's metadata is not examined.
    """
    end = len(message)
    # The shortest message is an empty last chunk.
    if end < 4 or message[0] != _RESPONSE_BODY_IN_REQUEST:
        return None
    size, start = message[1], 2
    if size > 0x7F:
        size, start = size & 0x7F | message[2] << 7, 3
        if size >= _TWO_BYTES:
            return None
    stop = start + size
    if stop > end or size < 2 or (stop < end and not _is_metadata(message, stop, end)):
        return None
    if message[start] == _BODY:
        size_of_body, at = message[start + 1], start + 2
        if size_of_body > 0x7F:
            if at == stop:
                return None
            size_of_body, at = size_of_body & 0x7F | message[at] << 7, at + 1
        at += size_of_body
    else:
        size_of_body, at = 0, start
    if at == stop:
        last = False
        if not size_of_body:
            return None
    elif message[at:stop] == _END_OF_STREAM:
        last = True
    else:
        return None
    return _prefix(size) + message[start:stop], last


def _length(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the length at a position and the position behind it. Raises IndexError if it is cut or above 256 MiB."""
    length = 0
    for shift in (0, 7, 14, 21):
        byte = message[at]
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return length, at
    raise IndexError("the length has more than four bytes")


def _is_metadata(message: bytes | memoryview, at: int, end: int) -> bool:
    """Return whether the rest of a message is one field of metadata."""
    if message[at] != _METADATA_CONTEXT or at + 2 > end:
        return False
    size, at = message[at + 1], at + 2
    if size > 0x7F:
        if at == end:
            return False
        size, at = size & 0x7F | message[at] << 7, at + 1
    return at + size == end and size < _TWO_BYTES


@lru_cache(maxsize=_PREFIXES)
def _prefix(size: int) -> bytes:
    """Return what precedes a ``StreamedBodyResponse`` of ``size`` bytes in an answer."""
    prefix = b""
    for tag in _AROUND:
        prefix = bytes((tag, *_varint(size + len(prefix)))) + prefix
    return prefix


def _varint(value: int) -> bytes:
    """Return a length in protobuf's encoding: seven bits in each byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
