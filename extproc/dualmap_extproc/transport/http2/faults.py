"""The faults of a peer that end its connection with GOAWAY (RFC 9113 section 5.4.1)."""

from dualmap_extproc.transport.http2.frames import ErrorCode


class ConnectionFault(Exception):
    """The peer's frames end the connection with GOAWAY. ``reason`` is the name in ``Http2Counters.goaways``."""

    def __init__(self, code: ErrorCode, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.reason = reason or code.name.lower()


def protocol_error(text: str) -> ConnectionFault:
    """Return the fault of frames that break a rule of the protocol."""
    return ConnectionFault(ErrorCode.PROTOCOL_ERROR, text)


def size_error(text: str) -> ConnectionFault:
    """Return the fault of a frame whose size its type does not permit."""
    return ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, text)


def above_limit(reason: str) -> ConnectionFault:
    """Return the fault of a peer above the limit that ``reason`` names."""
    return ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many " + reason.replace("_", " "), reason)
