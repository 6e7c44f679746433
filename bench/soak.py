"""Shows whether a router's memory grows with the number of requests: Envoy's calls are replayed without sockets.

As in ``replay``, the bytes pass the HTTP/2 server, the ext_proc service, the stream's state machine and a picker with a
router's subscribers. Of twenty calls, two are FULL_DUPLEX with 50 chunks, one is reset by the client before its
response, and the others are no-wait calls that the router ends; Envoy answers each of these with a late chunk and a
reset. The prompts repeat, so the index of prefixes is full after their first turn.

Fifty times, the connection is lost with calls that are still open, and a new one begins. Then the memory and the
number of Python objects are read. Both must not grow from the second row on.
"""

import asyncio
import gc
import os
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Final

import click
from bench.gateway.prompts import bodies
from bench.replay import KINDS, Picking, connected, data_frames, messages
from bench.transport import block, frame

from dualmap_extproc.transport.http2 import frames

PROMPTS: Final = 2000
CONNECTIONS: Final = 50
ABANDONED: Final = 100
"""The calls that are open when a connection is lost."""
NO_WAIT: Final = KINDS[0]
FULL_DUPLEX: Final = KINDS[3]
# The windows that Envoy opens again after each call.
WINDOW: Final = frames.window_update(0, 1 << 16)
# The position of the stream's number in a frame.
_ID_AT: Final = 5


class Replayed:
    """The bytes of a call, in which only the stream's number changes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._bytes = bytearray(b"".join(pieces))
        self._at = []
        at = 0
        while at < len(self._bytes):
            self._at.append(at + _ID_AT)
            at += frames.HEADER_BYTES + (frames.HEADER.unpack_from(self._bytes, at)[0] >> 8)

    def of(self, stream_id: int) -> bytearray:
        """Return the bytes for a stream, valid until the next call of this method."""
        for at in self._at:
            frames.NUMBER.pack_into(self._bytes, at, stream_id)
        return self._bytes


def replayed() -> Iterator[tuple[Replayed, Replayed]]:
    """Yield calls without end: the whole call, and its part before the response."""
    prompts = [b"".join(pieces) for pieces in islice(bodies(NO_WAIT.body_kb * 1024, streamed=True, first=0), PROMPTS)]
    calls = []
    for number, prompt in enumerate(prompts):
        full_duplex = number % 10 == 0
        before, chunks = messages(FULL_DUPLEX if full_duplex else NO_WAIT, prompt)
        asked = [frame(frames.HEADERS, frames.END_HEADERS, 1, block(False)), *(data_frames(1, each) for each in before)]
        if full_duplex:
            rest = [*(data_frames(1, each) for each in chunks), frame(frames.DATA, frames.END_STREAM, 1, b"")]
        elif number % 20 == 5:
            rest = [frames.rst_stream(1, frames.ErrorCode.CANCEL)]
        else:
            rest = [data_frames(1, chunks[0])] * 2 + [frames.rst_stream(1, frames.ErrorCode.INTERNAL_ERROR)]
        calls.append((Replayed([*asked, *rest]), Replayed(asked[:-1])))
    return cycle(calls)


def rss_mib() -> float:
    """Return the resident memory of this process (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def soak(requests: int) -> None:
    """Print the table."""
    picking = Picking()
    clock = asyncio.get_running_loop().time
    asked = replayed()
    # A call that fills the table of headers, which all others refer to, and is reset.
    table = frame(frames.HEADERS, frames.END_HEADERS, 1, block(True)) + frames.rst_stream(1, frames.ErrorCode.CANCEL)
    began_s = time.perf_counter()
    click.echo("| requests | seconds | MiB | Python objects | open requests |\n|---|---|---|---|---|")
    for number in range(1, CONNECTIONS + 1):
        connection, processor = connected(picking)
        connection.receive(clock(), table)
        for call in range(1, requests // CONNECTIONS + 1):
            connection.receive(clock(), next(asked)[0].of(2 * call + 1))
            connection.receive(clock(), WINDOW)
            connection.take_output()
            picking.end_all(clock())
            if not call % 100:
                # Deadlines of streams and of the picker are due.
                await asyncio.sleep(0)
        assert not connection.closing, "the server has ended the connection"
        assert not processor.open_requests
        for call in range(1, ABANDONED + 1):
            connection.receive(clock(), next(asked)[1].of(2 * (requests // CONNECTIONS + call) + 1))
        assert processor.open_requests == ABANDONED
        connection.lost(clock())
        picking.end_all(clock())
        left = processor.open_requests
        del connection, processor
        gc.collect()
        done, seconds = number * (requests // CONNECTIONS), time.perf_counter() - began_s
        click.echo(f"| {done} | {seconds:.0f} | {rss_mib():.1f} | {len(gc.get_objects())} | {left} |")


@click.command(help=__doc__)
@click.option(
    "--requests", type=click.IntRange(CONNECTIONS), default=1_000_000, show_default=True, help="Their number."
)
def command(requests: int) -> None:
    """Run the soak."""
    asyncio.run(soak(requests))
