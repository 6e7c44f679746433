"""Measures the router's whole work for a request without sockets: the bytes of Envoy's calls are replayed.

The bytes pass the HTTP/2 server, the ext_proc service, the stream's state machine and a picker of eight members with
the subscribers that a router has (metrics, demand, dashboard). Messages have the fields that Envoy 1.40 sends. Seven of
eight prompts extend an earlier one, as in ``gateway``. In no-wait mode, the access log reports the end of a request;
this is not measured.

Rounds alternate between the kinds of calls, and the tenth percentile of the CPU time of each counts.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import quantiles
from typing import Final

import click
from bench.decisions import pool_of
from bench.gateway.prompts import MODEL, bodies
from bench.transport import CHUNKS, LIMITS, PATH, beginning, block, frame

from dualmap_extproc.app.observers import Observers, observers_of
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits, Settings
from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.calls import Call
from dualmap_extproc.transport.http2.connection import Http2Connection
from dualmap_extproc.transport.http2.limits import Http2Counters
from dualmap_extproc.transport.http2_processor import http2_method
from dualmap_extproc.transport.processor import ExternalProcessor
from dualmap_extproc.wire import base_pb2 as base
from dualmap_extproc.wire import ext_proc_pb2 as wire

MEMBERS: Final = 8
EVENT: Final = (
    b'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " word"}}]}\n\n'
)
"""An event of a stream, as the gateway benchmark's engines send it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of call. ``chunk_reads`` is true if each chunk of the response arrives in a read of its own."""

    name: str
    body_kb: int
    full_duplex: bool = False
    calls: int
    chunk_reads: bool = False


KINDS: Final = (
    Kind(name="no-wait, 1 KB", body_kb=1, calls=96),
    Kind(name="no-wait, 64 KB", body_kb=64, calls=32),
    Kind(name="no-wait, 220 KB", body_kb=220, calls=16),
    Kind(name="FULL_DUPLEX, 1 KB, 50 chunks in one read", body_kb=1, full_duplex=True, calls=32),
    Kind(name="FULL_DUPLEX, 1 KB, a read for each chunk", body_kb=1, full_duplex=True, calls=32, chunk_reads=True),
)


def headers(**values: str) -> base.HeaderMap:
    """Return headers; ``_`` at the begin of a name stands for a colon, another one for a hyphen."""
    names = ((":" if key[0] == "_" else "") + key.strip("_").replace("_", "-") for key in values)
    pairs = zip(names, values.values(), strict=True)
    return base.HeaderMap(headers=[base.HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs])


def data_frames(stream_id: int, encoded: bytes) -> bytes:
    """Return a message in DATA frames."""
    data = b"\0" + len(encoded).to_bytes(4, "big") + encoded
    pieces = range(0, len(data), frames.FRAME_BYTES)
    return b"".join(frame(frames.DATA, 0, stream_id, data[at : at + frames.FRAME_BYTES]) for at in pieces)


def messages(kind: Kind, body: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return Envoy's messages of one call, and those of them that are chunks of the response."""
    mode = wire.FULL_DUPLEX_STREAMED if kind.full_duplex else wire.STREAMED
    config = wire.ProtocolConfiguration(
        request_body_mode=mode,
        response_body_mode=mode,
        send_body_without_waiting_for_header_response=not kind.full_duplex,
    )
    empty, served = base.Metadata(), base.Metadata()
    fields = served.filter_metadata["envoy.lb"].fields
    fields["x-gateway-destination-endpoint"].string_value = "10.0.0.1:8000,10.0.0.2:8000"
    asked = headers(
        _authority="bench",
        _path="/v1/chat/completions",
        _method="POST",
        _scheme="http",
        content_type="application/json",
        content_length=str(len(body)),
        user_agent="bench",
        x_forwarded_for="10.244.255.254",
        x_forwarded_proto="http",
        x_envoy_external_address="10.244.255.254",
        x_request_id="68760a15-4243-45d4-b2a9-14cd532728f7",
    )
    answered = headers(
        _status="200",
        content_type="text/event-stream",
        date="Tue, 24 Nov 2026 02:16:45 GMT",
        server="uvicorn",
        x_envoy_upstream_service_time="1",
    )
    first = wire.ProcessingRequest(
        request_headers=wire.HttpHeaders(headers=asked), metadata_context=empty, protocol_config=config
    )
    request = (
        first,
        wire.ProcessingRequest(request_body=wire.HttpBody(body=body), metadata_context=empty),
        wire.ProcessingRequest(request_body=wire.HttpBody(end_of_stream=True), metadata_context=empty),
        wire.ProcessingRequest(response_headers=wire.HttpHeaders(headers=answered), metadata_context=served),
    )
    chunk = wire.ProcessingRequest(response_body=wire.HttpBody(body=EVENT), metadata_context=served)
    end = wire.ProcessingRequest(response_body=wire.HttpBody(end_of_stream=True), metadata_context=served)
    chunks = [chunk] * CHUNKS + [end] if kind.full_duplex else [chunk]
    return [each.SerializeToString() for each in request], [each.SerializeToString() for each in chunks]


def reads(kind: Kind) -> Iterator[list[bytes]]:
    """Return Envoy's bytes, call by call and read by read."""
    late: list[bytes] = []
    asked = islice(bodies(kind.body_kb * 1024, streamed=True, first=0), kind.calls)
    for number, pieces in enumerate(asked):
        stream_id = 2 * number + 1
        parts, chunks = messages(kind, b"".join(pieces))
        opened = frame(frames.HEADERS, frames.END_HEADERS, stream_id, block(number == 0))
        request = [opened, *(data_frames(stream_id, each) for each in parts)]
        response = [data_frames(stream_id, each) for each in chunks]
        if kind.full_duplex:
            response.append(frame(frames.DATA, frames.END_STREAM, stream_id, b""))
        if kind.chunk_reads:
            yield [b"".join(request), *response]
        else:
            yield [b"".join((*late, *request, *response))]
        if not kind.full_duplex:
            # Envoy sends a late chunk and resets the ended call.
            late = [response[0], frames.rst_stream(stream_id, 2)]


class Picking:
    """A picker and its subscribers; it reports the requests that no response ended."""

    def __init__(self) -> None:
        self.observers: Observers = observers_of(Settings(replica_id="bench"))
        pool = pool_of(MEMBERS, "dualmap")
        pool = replace(pool, model=replace(pool.model, name=MODEL))
        self.picker = Picker(Limits(), self.observers.observations.report, id_prefix="bench-0123abcd")
        self.observers.metrics.set_pools([pool])
        self.observers.demand.set_pools([pool])
        self.picker.set_pools(0.0, [pool])

    def end_all(self, now: float) -> None:
        """Report the end of the requests that the access log would end."""
        for request_id in tuple(self.picker._owners):
            self.picker.finished(now, request_id, None)


def connected(picking: Picking) -> tuple[Http2Connection, ExternalProcessor]:
    """Return a new connection of Envoy's, and the service behind it."""
    processor = ExternalProcessor(picking.picker, picking.observers.observations.report, Limits())
    connection = Http2Connection(
        {PATH: http2_method(processor)},
        LIMITS,
        asyncio.get_running_loop().time(),
        peer="envoy",
        counters=Http2Counters(),
        on_output=lambda: None,
        on_failure=_raise,
    )
    connection.receive(connection.now, beginning())
    connection.take_output()
    return connection, processor


def served(picking: Picking) -> Callable[[bytes], bytes]:
    """Return a function that passes a read to a router and returns its output."""
    connection, _ = connected(picking)
    clock = asyncio.get_running_loop().time

    def read(data: bytes) -> bytes:
        connection.receive(clock(), data)
        return connection.take_output()

    return read


def _raise(call: Call, error: Exception) -> None:
    raise error


def cpu_us(picking: Picking, calls: Sequence[Sequence[bytes]]) -> float:
    """Return the CPU time of one call, from one connection that serves all of them."""
    read = served(picking)
    clock = asyncio.get_running_loop().time
    spent_ns = 0
    for call in calls:
        started_ns = time.thread_time_ns()
        for data in call:
            read(data)
        spent_ns += time.thread_time_ns() - started_ns
        picking.end_all(clock())
    return spent_ns / len(calls) / 1000


async def measure(rounds: int) -> None:
    """Print the table."""
    click.echo("| call | us CPU a call |\n|---|---|")
    calls = {kind: list(reads(kind)) for kind in KINDS}
    pickings = {kind: Picking() for kind in KINDS}
    times_us: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            times_us[kind].append(cpu_us(pickings[kind], calls[kind]))
    for kind in KINDS:
        click.echo(f"| {kind.name} | {quantiles(times_us[kind], n=10)[0]:.1f} |")


@click.command()
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True, help="Rounds of each kind of call.")
def replay(rounds: int) -> None:
    """Replay the bytes of Envoy's calls through the router without its sockets."""
    asyncio.run(measure(rounds))
