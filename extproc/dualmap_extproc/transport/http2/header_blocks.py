"""The header blocks of a peer: assembled from HEADERS and CONTINUATION, decoded, and stored if they may repeat."""

from typing import Final, NamedTuple

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.faults import ConnectionFault, above_limit, protocol_error, size_error
from dualmap_extproc.transport.http2.frames import ErrorCode
from dualmap_extproc.transport.http2.hpack import Header, HpackDecoder, HpackError
from dualmap_extproc.transport.http2.incoming import without_padding
from dualmap_extproc.transport.http2.limits import Http2Limits
from dualmap_extproc.transport.http2.opening import Opening

OPENINGS_MAX: Final = 64
"""The number of header blocks whose openings a connection stores. One Envoy sends few different ones."""
# The largest of these blocks.
_OPENING_BYTES: Final = 1024
DEPENDS_ON_ITSELF: Final = 0x100
"""A mark in the flags of a header block, beside the eight bits of the frame: an error of its stream."""


class Block(NamedTuple):
    """A whole header block and the flags of its HEADERS frame."""

    flags: int
    data: bytes


class HeaderBlocks:
    """The header blocks of one connection.

    ``openings`` has what the blocks of requests ask for, by block: an equal block need not be decoded again.
    ``stream_id`` is the stream whose block lacks CONTINUATION frames, or 0.
    """

    __slots__ = ("_block", "_decoder", "_flags", "_frames", "_limits", "openings", "stream_id")

    def __init__(self, limits: Http2Limits) -> None:
        self._limits: Final = limits
        self._decoder: Final = HpackDecoder(limits.header_list_bytes)
        self.openings: Final[dict[bytes, Opening]] = {}
        self.stream_id = 0
        self._block = bytearray()
        self._flags = 0
        self._frames = 0

    def begin(self, flags: int, stream_id: int, payload: memoryview) -> Block | None:
        """Process a HEADERS frame; return its block, None if CONTINUATION frames follow. Raises ConnectionFault."""
        payload = without_padding(flags, payload)
        depends_on = 0
        if flags & frames.PRIORITIZED:
            if len(payload) < 5:
                raise size_error("HEADERS without its priority")
            depends_on = frames.NUMBER.unpack_from(payload)[0] & frames.STREAM_MAX
            payload = payload[5:]
        if depends_on and depends_on == stream_id:
            flags |= DEPENDS_ON_ITSELF
        if flags & frames.END_HEADERS:
            return Block(flags, bytes(payload))
        if not stream_id:
            raise protocol_error("HEADERS on stream 0")
        self._block = bytearray(payload)
        self.stream_id = stream_id
        self._flags = flags
        self._frames = 0
        return None

    def extend(self, flags: int, payload: memoryview) -> Block | None:
        """Process a CONTINUATION frame; return the block, None if more frames follow. Raises ConnectionFault."""
        if not self.stream_id:
            raise protocol_error("CONTINUATION without HEADERS")
        self._block += payload
        self._frames += 1
        if self._frames > self._limits.continuations or len(self._block) > self._limits.header_block_bytes:
            raise above_limit("header_bytes")
        if not flags & frames.END_HEADERS:
            return None
        data, self._block = bytes(self._block), bytearray()
        self.stream_id = 0
        return Block(self._flags, data)

    def decode(self, block: bytes) -> tuple[list[Header], bool]:
        """Return the headers of a block, and whether they may be stored. Raises ConnectionFault.

        A block that changes the decoder's table may have other headers when it comes again. Such a block also ends the
        validity of all stored openings.
        """
        if len(block) > self._limits.header_block_bytes:
            raise above_limit("header_bytes")
        decoder = self._decoder
        changes = decoder.changes
        try:
            headers = decoder.decode(block)
        except HpackError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        if changes != decoder.changes:
            self.openings.clear()
            return headers, False
        return headers, len(block) <= _OPENING_BYTES

    def store(self, block: bytes, opening: Opening) -> None:
        """Store what a block asks for."""
        if len(self.openings) >= OPENINGS_MAX:
            self.openings.clear()
        self.openings[block] = opening
