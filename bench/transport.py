"""Measures the HTTP/2 server without sockets: the bytes of Envoy's calls are replayed, beside python-hyper's ``h2``.

A no-wait call has five messages and five answers, and the server ends it after the first chunk of the response; Envoy
then sends one more chunk and RST_STREAM. A FULL_DUPLEX call sends the body and 50 chunks, each with an answer, and ends
by Envoy's half close. The handlers return constant answers, so that neither protobuf nor a decision is measured. The
windows, frames and header blocks have the sizes that Envoy 1.40 uses. Rounds alternate between the two servers, and
the tenth percentile of the CPU time of each counts.
"""

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import quantiles

import click
import h2.config
import h2.connection
import h2.events
import h2.settings

from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.calls import Call
from dualmap_extproc.transport.http2.connection import Http2Connection
from dualmap_extproc.transport.http2.limits import Http2Counters, Http2Limits

PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHUNKS = 50
# The sizes of Envoy's messages beside the body, and of a picker's answers.
HEADERS_BYTES, END_BYTES, RESPONSE_HEADERS_BYTES, CHUNK_BYTES = 600, 8, 300, 220
LIMITS = Http2Limits()
PICK, ACK = bytes(230), bytes(8)
ENVOY_STREAM_WINDOW, ENVOY_CONNECTION_WINDOW = 16 << 20, 24 << 20
# A block of ten fields with incremental indexing, as the first one of a connection; later blocks are ten indexes.
FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", PATH),
    (b":authority", b"dualmap"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"x-envoy-internal", b"true"),
    (b"x-forwarded-for", b"10.0.0.1"),
    (b"x-envoy-expected-rq-timeout-ms", b"200"),
    (b"user-agent", b"envoy"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of call: the size of its body, and whether each chunk of the response passes the server."""

    name: str
    body_bytes: int
    full_duplex: bool
    calls: int
    calls_of_read: int
    reads_of_chunks: bool = False


KINDS = (
    Kind(name="no-wait, 1 KB", body_bytes=1024, full_duplex=False, calls=300, calls_of_read=3),
    Kind(name="no-wait, 64 KB", body_bytes=64 << 10, full_duplex=False, calls=60, calls_of_read=1),
    Kind(name="no-wait, 220 KB", body_bytes=220 << 10, full_duplex=False, calls=20, calls_of_read=1),
    Kind(name="FULL_DUPLEX, 50 chunks in one read", body_bytes=1024, full_duplex=True, calls=60, calls_of_read=1),
    Kind(
        name="FULL_DUPLEX, a read for each chunk",
        body_bytes=1024,
        full_duplex=True,
        calls=60,
        calls_of_read=1,
        reads_of_chunks=True,
    ),
)


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return a frame."""
    return frames.HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def message(stream_id: int, size: int) -> bytes:
    """Return the DATA frames of a message."""
    data = b"\0" + struct.pack(">I", size) + bytes(size)
    pieces = range(0, len(data), frames.FRAME_BYTES)
    return b"".join(frame(frames.DATA, 0, stream_id, data[at : at + frames.FRAME_BYTES]) for at in pieces)


def block(first: bool) -> bytes:
    """Return the header block of a connection's first call, or of a later one."""
    if not first:
        return bytes(0x80 | 61 + at for at in range(len(FIELDS), 0, -1))
    literals = [b"\x40%c%s%c%s" % (len(name), name, len(value), value) for name, value in FIELDS]
    return b"".join(literals)


def beginning() -> bytes:
    """Return the first bytes of Envoy's connection."""
    settings = frames.settings([(1, 4096), (2, 0), (3, 1024), (4, ENVOY_STREAM_WINDOW)])
    return frames.PREFACE + settings + frames.window_update(0, ENVOY_CONNECTION_WINDOW)


def reads(kind: Kind) -> Iterator[bytes]:
    """Return Envoy's bytes, read by read."""
    joined, late = [], []
    for number in range(kind.calls):
        stream_id = 2 * number + 1
        parts = [frame(frames.HEADERS, frames.END_HEADERS, stream_id, block(number == 0))]
        for size in (HEADERS_BYTES, kind.body_bytes, END_BYTES, RESPONSE_HEADERS_BYTES):
            parts.append(message(stream_id, size))
        if kind.full_duplex:
            chunks = [message(stream_id, CHUNK_BYTES) for _ in range(CHUNKS)]
            if kind.reads_of_chunks:
                yield b"".join(parts)
                yield from chunks
                parts = []
            else:
                parts += chunks
            parts.append(frame(frames.DATA, frames.END_STREAM, stream_id, b""))
        else:
            parts.append(message(stream_id, CHUNK_BYTES))
            late += [message(stream_id, CHUNK_BYTES), frames.rst_stream(stream_id, 2)]
        joined.append(b"".join(parts))
        if (number + 1) % kind.calls_of_read == 0:
            yield b"".join(joined)
            # Frames of ended calls come with the next read.
            joined, late = late, []


class Answers:
    """The picker's answers to the messages of a call."""

    def __init__(self, kind: Kind) -> None:
        self._received = 0
        self._last = None if kind.full_duplex else 5

    def answer(self) -> tuple[tuple[bytes, ...], bool]:
        """Return the answers to the next message, and whether they end the call."""
        self._received += 1
        if self._received < 3:
            return (), False
        return (PICK, ACK, ACK) if self._received == 3 else (ACK,), self._received == self._last


class Handler:
    """A call's handler in the server of this project."""

    def __init__(self, call: Call, kind: Kind) -> None:
        self._call = call
        self._answers = Answers(kind)

    def message(self, now: float, data: memoryview | bytes) -> None:
        answers, last = self._answers.answer()
        for each in answers:
            self._call.send(each)
        if last:
            self._call.finish()

    def half_closed(self, now: float) -> None:
        self._call.finish()

    def cancelled(self, now: float) -> None:
        raise AssertionError("cancelled")

    def drained(self) -> None:
        pass


def ours(kind: Kind) -> Callable[[bytes], bytes]:
    """Return a function that passes a read to this project's server and returns the output."""
    connection = Http2Connection(
        {PATH: lambda call: Handler(call, kind)},
        LIMITS,
        0.0,
        peer="envoy",
        counters=Http2Counters(),
        on_output=lambda: None,
        on_failure=_raise,
    )

    def read(data: bytes) -> bytes:
        connection.receive(0.0, data)
        return connection.take_output()

    return read


def _raise(call: Call, error: Exception) -> None:
    raise error


class HyperServer:
    """The least gRPC server on ``h2``: it serves the same calls with the same answers."""

    def __init__(self, kind: Kind) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self._h2 = h2.connection.H2Connection(config)
        self._h2.local_settings = h2.settings.Settings(
            client=False, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: LIMITS.stream_window_bytes}
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(LIMITS.connection_window_bytes - frames.WINDOW_INITIAL)
        self._kind = kind
        self._calls: dict[int, tuple[bytearray, Answers]] = {}

    def read(self, data: bytes) -> bytes:
        """Process a read and return the output."""
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self._data(event.stream_id, event.data)
                if event.flow_controlled_length:
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.RequestReceived):
                self._calls[event.stream_id] = (bytearray(), Answers(self._kind))
                self._h2.send_headers(event.stream_id, [(b":status", b"200"), (b"content-type", b"application/grpc")])
            elif isinstance(event, h2.events.StreamEnded):
                self._finish(event.stream_id)
        return bytes(self._h2.data_to_send())

    def _data(self, stream_id: int, data: bytes) -> None:
        if stream_id not in self._calls:
            return
        buffer, answers = self._calls[stream_id]
        buffer += data
        while len(buffer) >= 5 and len(buffer) >= 5 + (size := int.from_bytes(buffer[1:5], "big")):
            del buffer[: 5 + size]
            sent, last = answers.answer()
            for each in sent:
                self._h2.send_data(stream_id, b"\0" + struct.pack(">I", len(each)) + each)
            if last:
                self._finish(stream_id)
                return

    def _finish(self, stream_id: int) -> None:
        if self._calls.pop(stream_id, None) is not None:
            self._h2.send_headers(stream_id, [(b"grpc-status", b"0")], end_stream=True)


def cpu_us(server: Callable[[Kind], Callable[[bytes], bytes]], kind: Kind, pieces: list[bytes]) -> float:
    """Return the CPU time of one call, from one connection that serves all of them."""
    read = server(kind)
    read(beginning())
    started_ns = time.process_time_ns()
    for piece in pieces:
        read(piece)
    return (time.process_time_ns() - started_ns) / kind.calls / 1000


SERVERS: dict[str, Callable[[Kind], Callable[[bytes], bytes]]] = {
    "this server": ours,
    "h2": lambda kind: HyperServer(kind).read,
}


@click.command()
@click.option("--rounds", type=click.IntRange(2), default=40, show_default=True, help="Rounds of each kind of call.")
def transport(rounds: int) -> None:
    """Replay the bytes of Envoy's calls without sockets, through this project's HTTP/2 server and python-hyper's h2."""
    click.echo("| call | us | us, h2 | ratio |\n|---|---|---|---|")
    for kind in KINDS:
        pieces = list(reads(kind))
        times_us: dict[str, list[float]] = {name: [] for name in SERVERS}
        for _ in range(rounds):
            for name, server in SERVERS.items():
                times_us[name].append(cpu_us(server, kind, pieces))
        own_us, other_us = (quantiles(times, n=10)[0] for times in times_us.values())
        click.echo(f"| {kind.name} | {own_us:.1f} | {other_us:.1f} | 1/{other_us / own_us:.1f} |")
