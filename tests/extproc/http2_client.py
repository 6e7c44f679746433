"""A client of ``Http2Connection`` for tests: writes frames one by one, and reads the frames of the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from struct import pack

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.calls import Call
from dualmap_extproc.transport.http2.connection import Http2Connection
from dualmap_extproc.transport.http2.frames import END_HEADERS, END_STREAM, ErrorCode
from dualmap_extproc.transport.http2.hpack import Header, HpackDecoder, encode
from dualmap_extproc.transport.http2.limits import Http2Counters, Http2Limits

METHOD = b"/test.Service/Method"
REQUEST: tuple[Header, ...] = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", METHOD),
    (b":authority", b"test"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)
# Header blocks whose path is a literal that enters the table, or the newest entry of the table.
STORE_A, STORE_B, NEWEST = b"\x44\x02/a", b"\x44\x02/b", b"\xbe"


def with_path(representation: bytes) -> bytes:
    """Return the header block of a request with this representation of its path."""
    return encode(REQUEST[:2]) + representation + encode(REQUEST[3:])


@dataclass(frozen=True)
class Frame:
    """A frame of the output."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def number(self) -> int:
        """The error code of RST_STREAM, or the increment of WINDOW_UPDATE."""
        return int.from_bytes(self.payload[:4], "big")


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    return frames.HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def headers(
    stream_id: int = 1,
    fields: Iterable[Header] = REQUEST,
    *,
    end: bool = False,
    without: bytes | None = None,
    flags: int = 0,
) -> bytes:
    """Return a HEADERS frame; ``without`` leaves a field out."""
    block = encode([each for each in fields if each[0] != without])
    return frame(frames.HEADERS, END_HEADERS | (END_STREAM if end else 0), stream_id, block)


def data(stream_id: int, payload: bytes = b"", *, end: bool = False) -> bytes:
    """Return a DATA frame."""
    return frame(frames.DATA, END_STREAM if end else 0, stream_id, payload)


def message(content: bytes) -> bytes:
    """Return a message with its prefix."""
    return b"\0" + pack(">I", len(content)) + content


def settings(*values: tuple[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frames.settings(values)


def parsed(output: bytes) -> list[Frame]:
    """Return the frames of an output, which has only whole frames."""
    out = []
    while output:
        word, flags, stream_id = frames.HEADER.unpack_from(output)
        end = frames.HEADER_BYTES + (word >> 8)
        assert len(output) >= end
        out.append(Frame(word & 0xFF, flags, stream_id, output[frames.HEADER_BYTES : end]))
        output = output[end:]
    return out


@dataclass(eq=False)
class Recorder:
    """A handler that records what it receives; ``on_message`` and ``on_half_closed`` may answer."""

    call: Call
    on_message: Callable[[Recorder, bytes], None]
    on_half_closed: Callable[[Recorder], None]
    received: list[bytes] = field(default_factory=list)
    half_closes: int = 0
    cancels: int = 0
    drains: int = 0

    def message(self, now: float, data: memoryview | bytes) -> None:
        assert not self.cancels
        self.received.append(bytes(data))
        self.on_message(self, self.received[-1])

    def half_closed(self, now: float) -> None:
        assert not self.cancels
        self.half_closes += 1
        self.on_half_closed(self)

    def cancelled(self, now: float) -> None:
        assert not self.cancels
        self.cancels += 1

    def drained(self) -> None:
        assert not self.cancels
        self.drains += 1


def nothing(*_: object) -> None:
    """Do nothing."""


def finish(handler: Recorder) -> None:
    """Finish the call at the half close."""
    handler.call.finish()


class Client:
    """The client's side of one connection. ``now`` is the time of each event."""

    def __init__(
        self,
        limits: Http2Limits | None = None,
        *,
        on_message: Callable[[Recorder, bytes], None] = nothing,
        on_half_closed: Callable[[Recorder], None] = finish,
        greet: bool = True,
        counters: Http2Counters | None = None,
    ) -> None:
        self.now = 0.0
        self.calls: list[Recorder] = []
        self.failures: list[Exception] = []
        self.outputs_signalled = 0
        self.counters = counters or Http2Counters()
        self.decoder = HpackDecoder(1 << 20)

        def begin(call: Call) -> Recorder:
            self.calls.append(Recorder(call, on_message, on_half_closed))
            return self.calls[-1]

        self.server = Http2Connection(
            dict.fromkeys((METHOD, b"/a", b"/b"), begin),
            limits or Http2Limits(),
            self.now,
            peer="192.0.2.1",
            counters=self.counters,
            on_output=self._signalled,
            on_failure=lambda call, error: self.failures.append(error),
        )
        if greet:
            self.send(frames.PREFACE, settings())
            self.taken()

    def _signalled(self) -> None:
        self.outputs_signalled += 1

    def send(self, *pieces: bytes) -> None:
        """Pass bytes to the server in one read."""
        self.server.receive(self.now, b"".join(pieces))

    def taken(self) -> list[Frame]:
        """Return the frames of the whole output."""
        out = []
        while output := self.server.take_output():
            out += parsed(output)
        return out

    def asked(self, *pieces: bytes) -> list[Frame]:
        """Pass bytes to the server in one read, and return the frames of the output."""
        self.send(*pieces)
        return self.taken()

    def decoded(self, frame: Frame) -> dict[bytes, bytes]:
        """Return the fields of a HEADERS frame. Frames must be decoded in their order."""
        assert frame.kind == frames.HEADERS
        assert frame.flags & END_HEADERS
        return dict(self.decoder.decode(frame.payload))


def status_of(client: Client, output: Sequence[Frame], stream_id: int = 1) -> tuple[int, str]:
    """Return the status and message of a stream's trailers."""
    fields = [client.decoded(each) for each in output if each.kind == frames.HEADERS and each.stream_id == stream_id]
    return int(fields[-1][b"grpc-status"]), fields[-1].get(b"grpc-message", b"").decode()


def goaway_of(output: Sequence[Frame]) -> ErrorCode:
    """Return the code of the only GOAWAY, which is the last frame."""
    assert [each.kind for each in output].count(frames.GOAWAY) == 1
    assert output[-1].kind == frames.GOAWAY
    return ErrorCode(int.from_bytes(output[-1].payload[4:8], "big"))


def resets_of(output: Sequence[Frame]) -> list[tuple[int, ErrorCode]]:
    """Return the streams and codes of all RST_STREAM frames."""
    return [(each.stream_id, ErrorCode(each.number)) for each in output if each.kind == frames.RST_STREAM]
