"""The part of ZMTP 3.0 (https://rfc.zeromq.org/spec/23) that a subscriber needs, as a state machine without a socket.

libzmq does not bound the memory of a message with many frames. This module does: neither a message nor a command is
larger than its bound, and a message has a bounded number of frames. It speaks version 3.0 without encryption, which all
releases of libzmq since 4.0 understand.
"""

from collections.abc import Sequence
from typing import Final

COMMAND_BYTES_MAX: Final = 4096
"""The largest command; a connection with a larger one ends."""
FRAMES_MAX: Final = 8
"""The most frames of a message; a connection with a message of more frames ends."""

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = _SIGNATURE + b"\x03\x00" + _MECHANISM + bytes(32)
_MORE: Final = 1
_LONG: Final = 2
_COMMAND: Final = 4


class ProtocolError(Exception):
    """The peer breaks the protocol or one of its bounds."""


class ZmtpConnection:
    """One connection of a socket of ``kind`` (``SUB``, ``DEALER``) to a peer, which sends ``first`` when it is open.

    Pass all received bytes to ``receive``, call ``next_message`` until it has no more, and send what ``take_output``
    returns. Each call does a bounded amount of work.
    """

    def __init__(self, kind: bytes, first: Sequence[bytes], *, message_bytes: int) -> None:
        self.is_open = False
        """Whether the peer has answered the handshake."""
        self._ready = b"\x05READY" + _property(b"Socket-Type", kind) + _property(b"Identity", b"")
        self._first = tuple(first)
        self._message_bytes = message_bytes
        self._output = bytearray(_GREETING)
        self._greeted = False
        self._buffer = bytearray()
        # The frames of the unfinished message, and their bytes.
        self._frames: list[bytes] = []
        self._size = 0

    @property
    def waiting_bytes(self) -> int:
        """The bytes that were received and not returned."""
        return len(self._buffer) + self._size

    def receive(self, data: bytes | memoryview) -> None:
        """Take bytes from the peer."""
        self._buffer += data

    def take_output(self) -> bytes:
        """Return the bytes to send, and forget them."""
        output = bytes(self._output)
        self._output.clear()
        return output

    def next_message(self) -> Sequence[bytes] | None:
        """Return the frames of the next message, none if a command came first; None if more bytes are needed.

        Raises ProtocolError. Then the connection must be closed.
        """
        if not self._greeted and not self._read_greeting():
            return None
        buffer, at = self._buffer, 0
        try:
            while (header := _read_header(buffer, at)) is not None:
                flags, start, size = header
                self._check(flags, size)
                if start + size > len(buffer):
                    return None
                content = bytes(memoryview(buffer)[start : start + size])
                at = start + size
                if flags & _COMMAND:
                    self._on_command(content)
                    return ()
                self._frames.append(content)
                self._size += size
                if not flags & _MORE:
                    frames, self._frames, self._size = self._frames, [], 0
                    return frames
            return None
        finally:
            del buffer[:at]

    def _read_greeting(self) -> bool:
        """Read the peer's greeting; return whether it is complete. Its first bytes already show another protocol."""
        buffer = self._buffer
        if buffer[:1] not in (b"", _SIGNATURE[:1]) or (len(buffer) > 9 and buffer[9] != _SIGNATURE[9]):
            raise ProtocolError("the peer does not use ZMTP")
        if len(buffer) > 10 and buffer[10] < 3:
            raise ProtocolError("the peer uses a version of ZMTP before 3.0")
        if len(buffer) < len(_GREETING):
            return False
        if buffer[12:32] != _MECHANISM:
            raise ProtocolError("the peer requires authentication")
        del buffer[: len(_GREETING)]
        self._output += _frame(_COMMAND, self._ready)
        self._greeted = True
        return True

    def _check(self, flags: int, size: int) -> None:
        """Check a frame before its content is received."""
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise ProtocolError("a frame has unknown flags")
        if flags & _COMMAND:
            if size > COMMAND_BYTES_MAX:
                raise ProtocolError(f"a command has more than {COMMAND_BYTES_MAX} bytes")
        elif not self.is_open:
            raise ProtocolError("a message comes before the end of the handshake")
        elif size > self._message_bytes - self._size:
            raise ProtocolError(f"a message has more than {self._message_bytes} bytes")
        elif len(self._frames) == FRAMES_MAX:
            raise ProtocolError(f"a message has more than {FRAMES_MAX} frames")

    def _on_command(self, content: bytes) -> None:
        name, data = content[1 : 1 + content[0]] if content else b"", content[1 + content[0] :] if content else b""
        if not self.is_open:
            if name != b"READY":
                raise ProtocolError("the peer refuses the handshake")
            self.is_open = True
            last = len(self._first) - 1
            for number, frame in enumerate(self._first):
                self._output += _frame(_MORE if number < last else 0, frame)
        elif name == b"PING":
            # The first two bytes are a time, and the answer repeats the others.
            self._output += _frame(_COMMAND, b"\x04PONG" + data[2:18])


def _read_header(buffer: bytearray, at: int) -> tuple[int, int, int] | None:
    """Return a frame's flags, the start of its content and its size; None if the header is incomplete."""
    if len(buffer) < at + 2:
        return None
    flags = buffer[at]
    if not flags & _LONG:
        return flags, at + 2, buffer[at + 1]
    if len(buffer) < at + 9:
        return None
    return flags, at + 9, int.from_bytes(buffer[at + 1 : at + 9], "big")


def _frame(flags: int, content: bytes) -> bytes:
    if len(content) < 256:
        return bytes((flags, len(content))) + content
    return bytes((flags | _LONG,)) + len(content).to_bytes(8, "big") + content


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
