"""Measures how many output chunks a second pass one router process, without Envoy.

This process replays Envoy's encoded frames over one loopback connection, in place of an Envoy whose both bodies are
FULL_DUPLEX_STREAMED. Calls begin at fixed times. A call sends a prompt of 1 KB. When the router has picked a member and
returned the prompt, the call sends the headers of the response and its first chunk at once, and then a chunk every 20
ms, 50 in all. The router is the product's command line in a process of its own, with eight members.

The first byte's time counts from the due time of the call until its first chunk comes back. Engines and Envoy need no
time here, so the router and the client's own delays are all of it. The table shows the cores that both used.
"""

import asyncio
import contextlib
import os
import selectors
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Final, cast

import click
from bench.gateway.load import cpu_s, quantile
from bench.gateway.prompts import bodies
from bench.gateway.stacks import ENGINES, HOST, START_S, module, router_command, write_pool
from bench.replay import KINDS, data_frames, messages
from bench.soak import Replayed
from bench.transport import CHUNKS, beginning, block, frame

from dualmap_cli.demo.children import Children
from dualmap_cli.demo.errors import ChildError
from dualmap_extproc.transport.http2 import frames

FULL_DUPLEX: Final = KINDS[3]
RATES: Final = (10_000, 20_000, 30_000, 40_000)
PROMPTS: Final = 2000
EVERY_S: Final = 0.02
TICK_S: Final = 0.001
RAMP_S: Final = 1.0 + EVERY_S * CHUNKS
PAUSE_S: Final = 1.0
# The answers before the chunks: the pick, the prompt, and the headers of the response.
PICKED: Final = 2
ANSWERS: Final = PICKED + 1
_GRANT_BYTES: Final = 1 << 20
_GRPC_PREFIX_BYTES: Final = 5
_CHUNK = data_frames(0, messages(FULL_DUPLEX, b"")[1][0])
# The parts of a chunk's frame before and after the number of its stream.
_CHUNK_HEAD, _CHUNK_TAIL = _CHUNK[:5], _CHUNK[frames.HEADER_BYTES :]


class ReplayError(Exception):
    """The router did not serve the calls; the message says what it did."""


@dataclass(slots=True, eq=False)
class ReplayedCall:
    """An open call. ``answers`` and ``sent`` count messages of the router and chunks of the client."""

    id: int
    due_s: float
    answers: int = 0
    sent: int = 0
    partial: bytearray = field(default_factory=bytearray)

    def received(self, payload: bytes) -> int:
        """Take the payload of a DATA frame; return the number of messages that it completes."""
        if not self.partial and _size(payload) == len(payload):
            return 1
        self.partial += payload
        count = 0
        while len(self.partial) >= _GRPC_PREFIX_BYTES and len(self.partial) >= (size := _size(self.partial)):
            del self.partial[:size]
            count += 1
        return count


class Replay(asyncio.Protocol):
    """The connection of an Envoy worker. ``chunks`` counts the chunks that came back."""

    def __init__(self) -> None:
        prompts, *others = encoded()
        self._prompts = cycle(prompts)
        self._response, self._end = others
        self._transport: asyncio.Transport
        self._open: dict[int, ReplayedCall] = {}
        self._next_id = 1
        self._chunks_due: deque[tuple[float, ReplayedCall]] = deque()
        self._out: list[bytes] = []
        self._rest = b""
        self._ungranted_bytes = 0
        self.chunks = 0
        self.first_bytes: list[tuple[float, float]] = []
        self._lost: ReplayError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # The first call's block fills the table of headers, which the blocks of the others refer to.
        opened = frame(frames.HEADERS, frames.END_HEADERS, 1, block(True))
        self._next_id = 3
        self._transport.write(beginning() + opened + frames.rst_stream(1, frames.ErrorCode.CANCEL))

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = ReplayError(f"the connection was lost ({error or 'closed by the router'})")

    async def run(self, rate: float) -> None:
        """Begin calls of ``rate`` chunks a second in total, until cancelled."""
        every_s, due_s = CHUNKS / rate, time.perf_counter()
        while True:
            now = time.perf_counter()
            while due_s <= now:
                self._begin(due_s)
                due_s += every_s
            await self._tick(now)

    async def _tick(self, now: float) -> None:
        """Send the chunks that are due, and everything else that waits, in one write."""
        due = self._chunks_due
        while due and due[0][0] <= now:
            self._send_chunk(*due.popleft())
        self._flush()
        await asyncio.sleep(TICK_S)
        if self._lost:
            raise self._lost

    def _begin(self, due_s: float) -> None:
        call = ReplayedCall(self._next_id, due_s)
        self._next_id += 2
        self._open[call.id] = call
        self._out.append(bytes(next(self._prompts).of(call.id)))

    def _send_chunk(self, due_s: float, call: ReplayedCall) -> None:
        self._out += (_CHUNK_HEAD, frames.NUMBER.pack(call.id), _CHUNK_TAIL)
        call.sent += 1
        if call.sent < CHUNKS:
            self._chunks_due.append((due_s + EVERY_S, call))
        else:
            self._out.append(bytes(self._end.of(call.id)))

    def data_received(self, data: bytes) -> None:
        now, at = time.perf_counter(), 0
        if self._rest:
            data = self._rest + data
        while len(data) - at >= frames.HEADER_BYTES:
            word, flags, stream_id = frames.HEADER.unpack_from(data, at)
            end = at + frames.HEADER_BYTES + (word >> 8)
            if end > len(data):
                break
            self._frame(now, word & 0xFF, flags, stream_id, data[at + frames.HEADER_BYTES : end])
            at = end
        self._rest = data[at:]
        if self._ungranted_bytes >= _GRANT_BYTES:
            self._out.append(frames.window_update(0, self._ungranted_bytes))
            self._ungranted_bytes = 0
        self._flush()

    def _frame(self, now: float, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.DATA:
            self._ungranted_bytes += len(payload)
            call = self._open[stream_id]
            for _ in range(call.received(payload)):
                self._answered(now, call)
        elif kind == frames.HEADERS and flags & frames.END_STREAM and stream_id in self._open:
            # The end of the body is the last answer.
            if self._open.pop(stream_id).answers != ANSWERS + CHUNKS + 1:
                raise ReplayError("a call ended early")
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._out.append(frames.SETTINGS_ACK)
        elif kind == frames.PING:
            self._out.append(frames.ping_ack(payload))
        elif kind == frames.GOAWAY:
            raise ReplayError(f"the router sent GOAWAY: {payload[8:].decode()}")

    def _answered(self, now: float, call: ReplayedCall) -> None:
        call.answers += 1
        if call.answers == PICKED:
            self._out.append(bytes(self._response.of(call.id)))
            self._send_chunk(now, call)
        elif ANSWERS < call.answers <= ANSWERS + CHUNKS:
            self.chunks += 1
            if call.answers == ANSWERS + 1:
                self.first_bytes.append((call.due_s, now - call.due_s))

    def _flush(self) -> None:
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()


def _size(data: bytes | bytearray) -> int:
    """Return the size of the gRPC message that begins here, with its prefix."""
    return _GRPC_PREFIX_BYTES + int.from_bytes(data[1:_GRPC_PREFIX_BYTES], "big")


def encoded() -> tuple[tuple[Replayed, ...], Replayed, Replayed]:
    """Return the frames of a call: the requests with their prompts, the headers of the response, and its end."""
    asked = []
    for pieces in islice(bodies(FULL_DUPLEX.body_kb * 1024, streamed=True, first=0), PROMPTS):
        (*request, headers), chunks = messages(FULL_DUPLEX, b"".join(pieces))
        opened = frame(frames.HEADERS, frames.END_HEADERS, 0, block(False))
        asked.append(Replayed([opened, *(data_frames(0, each) for each in request)]))
    end = Replayed([data_frames(0, chunks[-1]), frame(frames.DATA, frames.END_STREAM, 0, b"")])
    return tuple(asked), Replayed([data_frames(0, headers)]), end


async def row(port: int, router: int, rate: int, seconds: float) -> str:
    """Measure one rate with a connection of its own; return the table's row."""
    transport, replay = await asyncio.get_running_loop().create_connection(Replay, HOST, port)
    running = asyncio.create_task(replay.run(rate))
    pids = (router, os.getpid())
    await asyncio.wait([running], timeout=RAMP_S)
    began_s, chunks, before = time.perf_counter(), replay.chunks, [cpu_s(pid) for pid in pids]
    await asyncio.wait([running], timeout=seconds)
    ended_s, chunks = time.perf_counter(), replay.chunks - chunks
    router_s, client_s = (cpu_s(pid) - then for pid, then in zip(pids, before, strict=True))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    transport.abort()
    # The router ends the calls of the lost connection.
    await asyncio.sleep(PAUSE_S)
    passed_s = ended_s - began_s
    times_ms = [each * 1e3 for due_s, each in replay.first_bytes if began_s <= due_s]
    return (
        f"| {rate} | {chunks / passed_s:.0f} | {router_s / chunks * 1e6:.1f} | {router_s / passed_s:.2f} | "
        f"{client_s / passed_s:.2f} | {quantile(times_ms, 0.5):.2f} | {quantile(times_ms, 0.99):.2f} |"
    )


async def measure(rates: Sequence[int], seconds: float) -> None:
    """Print the table. Raises ChildError and ReplayError."""
    with tempfile.TemporaryDirectory(prefix="dualmap-chunks-") as temporary:
        folder = Path(temporary)
        async with Children(folder / "logs") as children:
            upstream = await children.start("upstream", module("bench.gateway.upstream", str(ENGINES)))
            engines = (await upstream.ready(within_s=START_S)).values()
            pool = write_pool(folder / "pool.json", tuple(engines))
            command = router_command(pool, "chunks", None, ("dualmap_cli",), "h2")
            child = await children.start("router", command)
            port = int((await child.ready(within_s=START_S))["grpc"].rpartition(":")[2])
            click.echo(
                "| offered chunks/s | chunks/s | router's CPU a chunk, us (request included) | router, cores | "
                "client, cores | first byte p50, ms | p99, ms |\n|---|---|---|---|---|---|---|"
            )
            # The first run warms up the router's caches.
            await row(port, child.process.pid, min(rates), 1.0)
            for rate in rates:
                click.echo(await row(port, child.process.pid, rate, seconds))


@click.command(context_settings={"show_default": True}, help=__doc__)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    default=RATES,
    type=click.IntRange(CHUNKS, 1_000_000),
    help="Chunks a second that the client offers; repeat for several.",
)
@click.option("--seconds", default=5.0, type=click.FloatRange(0.5, 600), help="Length of one measurement in seconds.")
def command(rates: tuple[int, ...], seconds: float) -> None:
    """Measure each rate."""
    before = os.getloadavg()
    try:
        # Only select's timeouts are shorter than a millisecond.
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
            runner.run(measure(rates, seconds))
    except (ReplayError, ChildError) as error:
        click.echo(f"bench chunks: {error}", err=True)
        sys.exit(1)
    loads = "; ".join(", ".join(f"{each:.1f}" for each in load) for load in (before, os.getloadavg()))
    click.echo(f"\nmachine: {os.cpu_count()} cores; load average before and after: {loads}")
