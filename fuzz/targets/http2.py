"""Fuzzes the frames of an HTTP/2 connection. Any client that reaches the port can send these bytes."""

from random import Random
from typing import Final

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.calls import Call
from dualmap_extproc.transport.http2.connection import Http2Connection
from dualmap_extproc.transport.http2.hpack import encode
from dualmap_extproc.transport.http2.limits import Http2Counters, Http2Limits
from fuzz.choices import Choices

# Small limits, so that short inputs reach them.
_LIMITS: Final = Http2Limits(
    streams=4,
    message_bytes=200,
    unfinished_bytes=150,
    unsent_stream_bytes=400,
    unsent_connection_bytes=900,
    output_bytes=100,
    stream_window_bytes=1000,
    connection_window_bytes=70_000,
    reset_burst=6,
    control_burst=20,
    ended_ids=3,
)
_REQUEST: Final = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/m"),
    (b"content-type", b"application/grpc"),
)
_BLOCKS: Final = (
    encode(_REQUEST),
    encode((*_REQUEST, (b"grpc-timeout", b"1S"))),
    encode((*_REQUEST, (b"content-length", b"10"))),
    encode(_REQUEST) + b"\x40\x01a\x01b",
    encode(((b"a", b"b"),)),
)
_FLAGS: Final = (0, 1, 4, 5, 8, 12, 0x20, 0x25)
_NUMBERS: Final = (0, 1, 8, 100, 65_535, 2**31 - 1)


class _Handler:
    """Answers by the content of messages, and checks that the order of its calls is allowed."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._half_closed = False
        self.received: list[bytes] = []
        self.cancels = 0

    def message(self, now: float, data: memoryview | bytes) -> None:
        assert not self._call.ended
        assert not self._half_closed
        content = bytes(data)
        self.received.append(content)
        first = content[:1]
        if first == b"f":
            self._call.finish()
        elif first == b"r":
            raise ValueError("planted")
        elif first == b"s":
            self._call.send(content * 3)
        self._call.send(content[:5])

    def half_closed(self, now: float) -> None:
        assert not self._call.ended
        assert not self._half_closed
        self._half_closed = True
        if len(self.received) % 2:
            self._call.finish()

    def cancelled(self, now: float) -> None:
        assert self._call.ended
        self.cancels += 1
        assert self.cancels == 1

    def drained(self) -> None:
        assert not self._call.ended
        assert not self._call.unsent_bytes


class _Server:
    """A connection and its handlers."""

    def __init__(self) -> None:
        self.handlers: list[_Handler] = []
        self.connection = Http2Connection(
            {b"/m": self._begin},
            _LIMITS,
            0.0,
            peer="fuzz",
            counters=Http2Counters(),
            on_output=lambda: None,
            on_failure=_check_failure,
        )

    def _begin(self, call: Call) -> _Handler:
        self.handlers.append(_Handler(call))
        return self.handlers[-1]

    def receive(self, now: float, data: bytes) -> None:
        """Pass a read, and check the output and the bounds."""
        read = bytearray(data)
        self.connection.receive(now, memoryview(read))
        read[:] = bytes(len(read))
        while output := self.connection.take_output():
            while output:
                end = frames.HEADER_BYTES + (frames.HEADER.unpack_from(output)[0] >> 8)
                assert len(output) >= end
                output = output[end:]
        assert self.connection.open_calls <= _LIMITS.streams
        assert 0 <= self.connection.unfinished_bytes <= _LIMITS.unfinished_bytes + frames.FRAME_BYTES
        assert (self.connection.next_deadline() is None) == self.connection.closing

    def seen(self) -> tuple[object, ...]:
        """Return what must not depend on the splits of reads."""
        calls = [(handler.received, handler.cancels) for handler in self.handlers]
        return calls, self.connection.closing, self.connection.open_calls


def check(data: bytes) -> None:
    """Check that any bytes leave a connection within its bounds, and that the splits of reads change no call.

    The input is used as bytes behind the preface, and as choices that build frames, reads, deadlines and a drain.
    """
    opening = frames.PREFACE + frames.settings(())
    for start in (b"", opening):
        servers = []
        for size in (1 + len(data) // 5, 1 + len(data)):
            server = _Server()
            server.receive(0.0, start)
            for at in range(0, len(data), size):
                server.receive(0.0, data[at : at + size])
            servers.append(server)
        assert servers[0].seen() == servers[1].seen()
    _check_built(Choices(data), opening)


def mutate(data: bytes, random: Random) -> bytes | None:
    """Insert a whole frame."""
    payload = random.choice((*_BLOCKS, b"", bytes(4), bytes(8), b"\0\0\0\0\1s", b"\0\0\0\0\2f."))
    frame = frames.HEADER.pack(
        len(payload) << 8 | random.randrange(11), random.choice(_FLAGS), random.choice((0, 1, 1, 3, 5, 7))
    )
    at = random.randrange(len(data) + 1)
    return data[:at] + frame + payload + data[at:]


def _check_built(choices: Choices, opening: bytes) -> None:
    server = _Server()
    server.receive(0.0, opening)
    now = 0.0
    while choices.more:
        kind = choices.number() % 16
        stream_id = 2 * (choices.number() % 8) + 1
        if kind < 3:
            block = choices.pick(_BLOCKS)
            sent = frames.headers(stream_id, block, choices.number() % 2)
        elif kind < 8:
            content = choices.chunk()
            payload = b"\0" + len(content).to_bytes(4, "big") + content
            payload = payload[: len(payload) - choices.number() % 4]
            sent = frames.HEADER.pack(len(payload) << 8, choices.number() % 2, stream_id) + payload
        elif kind == 8:
            sent = frames.window_update(choices.pick((0, stream_id)), choices.pick(_NUMBERS))
        elif kind == 9:
            sent = frames.rst_stream(stream_id, 8)
        elif kind == 10:
            sent = frames.settings([(choices.number() % 7, choices.pick(_NUMBERS))])
        elif kind == 11:
            sent = frames.ping(choices.take(8).ljust(8, b"\0"))
        elif kind == 12:
            payload = choices.chunk()
            word = len(payload) << 8 | choices.number() % 12
            sent = frames.HEADER.pack(word, choices.pick(_FLAGS), stream_id) + payload
        elif kind == 13:
            now += choices.number() / 4
            server.connection.on_deadline(now)
            sent = b""
        elif kind == 14:
            server.connection.drain(now)
            sent = b""
        else:
            for handler in server.handlers[:2]:
                handler._call.send(choices.chunk())
            sent = b""
        server.receive(now, sent)
    server.connection.lost(now)
    assert server.connection.unfinished_bytes == 0
    assert all(handler._call.ended and not handler._call.unsent_bytes for handler in server.handlers)


def _check_failure(call: Call, error: Exception) -> None:
    if isinstance(error, AssertionError):
        raise error
    assert str(error) == "planted"
