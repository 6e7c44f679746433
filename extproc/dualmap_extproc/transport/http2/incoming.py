"""The bytes of the peer before they are frames: the preface, frames that arrive in pieces, and padding."""

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.faults import protocol_error
from dualmap_extproc.transport.http2.frames import FRAME_BYTES, HEADER_BYTES

_NOTHING = memoryview(b"")


class Incomplete:
    """The bytes of a connection that do not complete the preface or a frame yet: ``rest``.

    ``prefaced`` says whether the preface is complete.
    """

    __slots__ = ("prefaced", "rest")

    def __init__(self) -> None:
        self.prefaced = False
        self.rest = bytearray()

    def complete(self, view: memoryview) -> tuple[memoryview, memoryview]:
        """Add the next bytes of the peer to the preface, or to the frame whose beginning has arrived.

        Return the frame, empty unless it is complete, and the bytes behind it. Of a frame above FRAME_BYTES, the header
        is enough. Raises ConnectionFault for an invalid preface.
        """
        rest = self.rest
        if not self.prefaced:
            view = self._fill(len(frames.PREFACE), view)
            if rest != frames.PREFACE[: len(rest)]:
                raise protocol_error("invalid preface")
            if len(rest) == len(frames.PREFACE):
                self.prefaced = True
                rest.clear()
            return _NOTHING, view
        view = self._fill(HEADER_BYTES, view)
        if len(rest) < HEADER_BYTES:
            return _NOTHING, view
        length = frames.HEADER.unpack_from(rest)[0] >> 8
        if length <= FRAME_BYTES:
            view = self._fill(HEADER_BYTES + length, view)
            if len(rest) < HEADER_BYTES + length:
                return _NOTHING, view
        self.rest = bytearray()
        return memoryview(rest), view

    def _fill(self, size: int, view: memoryview) -> memoryview:
        """Move bytes to the rest until it has ``size``; return the others."""
        missing = size - len(self.rest)
        if missing <= 0:
            return view
        self.rest += view[:missing]
        return view[missing:]


def without_padding(flags: int, payload: memoryview) -> memoryview:
    """Return the payload of HEADERS or DATA without its padding. Raises ConnectionFault."""
    if not flags & frames.PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise protocol_error("padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]
