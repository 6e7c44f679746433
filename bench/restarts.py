"""Shows whether the HTTP/2 server loses requests or memory over its restarts and renewals of its certificate.

As in ``soak``, Envoy's calls are replayed through a router's whole work for a request, but over loopback and TLS. Every
tenth call is FULL_DUPLEX with 50 chunks, and the others are no-wait. In each of fifty rounds, a client connects, the
certificate is renewed, and a second client connects, which accepts only the new certificate. Both send their calls.
Then the server drains while calls of both are open, and a new server starts on the same port. A call counts as lost if
the server does not end it with the status OK.

After each round, the memory of this process, with server and clients, is read. It must not grow from the second row on.
"""

import asyncio
import gc
import os
import ssl
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Final, cast

import click
from bench.gateway.prompts import bodies
from bench.replay import KINDS, Picking, data_frames, messages
from bench.soak import PROMPTS, Replayed, rss_mib
from bench.transport import LIMITS, PATH, beginning, block, frame

from dualmap_extproc.settings import Limits
from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.hpack import encode
from dualmap_extproc.transport.http2_processor import http2_method
from dualmap_extproc.transport.http2_server import Http2Server
from dualmap_extproc.transport.processor import ExternalProcessor
from dualmap_extproc.transport.tls import ALPN, Certificates, self_signed

ROUNDS: Final = 50
HOST: Final = "127.0.0.1"
TOGETHER: Final = 20
"""The calls of a client that are open at the same time."""
WITHIN_S: Final = 60.0
NO_WAIT: Final = KINDS[0]
FULL_DUPLEX: Final = KINDS[3]
_FILES: Final = ("tls.key", "tls.crt")
_OK: Final = encode(((b"grpc-status", b"0"),))


def calls() -> Iterator[tuple[Replayed, Replayed]]:
    """Yield calls without end: the part before the response, and the rest."""
    found = []
    for number, pieces in enumerate(islice(bodies(NO_WAIT.body_kb * 1024, streamed=True, first=0), PROMPTS)):
        kind = NO_WAIT if number % 10 else FULL_DUPLEX
        request, chunks = messages(kind, b"".join(pieces))
        asked = [
            frame(frames.HEADERS, frames.END_HEADERS, 1, block(False)),
            *(data_frames(1, each) for each in request),
        ]
        rest = [data_frames(1, each) for each in chunks]
        if kind.full_duplex:
            rest.append(frame(frames.DATA, frames.END_STREAM, 1, b""))
        found.append((Replayed(asked), Replayed(rest)))
    return cycle(found)


class Client(asyncio.Protocol):
    """A connection of Envoy's, over which calls are replayed.

    ``open`` are the calls that the server has not ended, and ``failed`` those that it ended without the status OK.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._next_id = 3
        self._rest: list[bytes] = []
        self._moved = asyncio.Event()
        self.open: set[int] = set()
        self.failed = 0
        self.draining = False
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # The first call fills the table of headers, which all others refer to.
        table = frame(frames.HEADERS, frames.END_HEADERS, 1, block(True))
        self._transport.write(beginning() + table + frames.rst_stream(1, frames.ErrorCode.CANCEL))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._moved.set()

    def begin(self, asked: Iterator[tuple[Replayed, Replayed]]) -> None:
        """Send the first parts of calls; ``finish`` sends the rest."""
        for before, rest in islice(asked, TOGETHER):
            self._transport.write(bytes(before.of(self._next_id)))
            self._rest.append(bytes(rest.of(self._next_id)))
            self.open.add(self._next_id)
            self._next_id += 2

    def finish(self) -> None:
        """Send the rest of the calls that have begun."""
        self._transport.write(b"".join(self._rest))
        self._rest.clear()

    async def until_ended(self) -> None:
        """Wait until the server has ended all calls, or the connection. Raises TimeoutError."""
        async with asyncio.timeout(WITHIN_S):
            while self.open and not self.closed:
                self._moved.clear()
                await self._moved.wait()

    def close(self) -> None:
        """Close the connection."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        at, granted = 0, 0
        while len(self._received) - at >= frames.HEADER_BYTES:
            word, flags, stream_id = frames.HEADER.unpack_from(self._received, at)
            end = at + frames.HEADER_BYTES + (word >> 8)
            if end > len(self._received):
                break
            granted += self._frame(word & 0xFF, flags, stream_id, bytes(self._received[at + frames.HEADER_BYTES : end]))
            at = end
        del self._received[:at]
        if granted:
            self._transport.write(frames.window_update(0, granted))
        self._moved.set()

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> int:
        """Take a frame; return how many bytes of the connection's window it has used."""
        if kind == frames.DATA:
            return len(payload)
        if stream_id in self.open and (kind == frames.RST_STREAM or flags & frames.END_STREAM):
            self.open.remove(stream_id)
            self.failed += payload != _OK
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._transport.write(frames.SETTINGS_ACK)
        elif kind == frames.PING and not flags & frames.ACK:
            self._transport.write(frames.ping_ack(payload))
        elif kind == frames.GOAWAY:
            self.draining = True
        return 0


class Site:
    """The server's port, its certificate and its picker."""

    def __init__(self, folder: Path) -> None:
        self.picking = Picking()
        self.processor = ExternalProcessor(self.picking.picker, self.picking.observers.observations.report, Limits())
        self._folder = folder
        self._port = 0
        self.lost = 0
        self.renew()

    def renew(self) -> None:
        """Replace the certificate's files."""
        for name, content in zip(_FILES, self_signed(), strict=True):
            fresh = self._folder / f"{name}.new"
            fresh.write_bytes(content)
            fresh.rename(self._folder / name)

    async def server(self) -> Http2Server:
        """Return a new server on the port."""
        server = Http2Server(lambda client: {PATH: http2_method(self.processor)}, LIMITS)
        self._port = await server.bind(HOST, self._port, Certificates(self._folder, None))
        await server.start()
        return server

    async def connect(self) -> Client:
        """Return a new client, which accepts only the present certificate."""
        context = ssl.create_default_context(cafile=self._folder / _FILES[1])
        context.set_alpn_protocols([ALPN])
        connect = asyncio.get_running_loop().create_connection
        return (await connect(Client, HOST, self._port, ssl=context))[1]

    async def ended(self, *clients: Client) -> None:
        """Wait until the server has ended the clients' calls, and count those that are lost."""
        for each in clients:
            each.finish()
            await each.until_ended()
            self.lost += len(each.open) + each.failed
            each.failed = 0
        self.picking.end_all(asyncio.get_running_loop().time())


async def run(requests: int) -> None:
    """Print the table."""
    asked = calls()
    began_s, sent = time.perf_counter(), 0
    batches = max(1, requests // (ROUNDS * 2 * TOGETHER) - 1)
    click.echo("| requests | seconds | MiB | Python objects | open files | lost |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="dualmap-restarts-") as folder:
        site = Site(Path(folder))
        for _ in range(ROUNDS):
            server = await site.server()
            first = await site.connect()
            site.renew()
            clients = first, await site.connect()
            for _ in range(batches):
                for client in clients:
                    client.begin(asked)
                await site.ended(*clients)
            for client in clients:
                client.begin(asked)
            draining = asyncio.create_task(server.drain())
            await asyncio.sleep(0)
            await site.ended(*clients)
            await asyncio.wait_for(draining, WITHIN_S)
            assert all(each.draining for each in clients), "the server has not announced its end"
            for client in clients:
                client.close()
            sent += (batches + 1) * 2 * TOGETHER
            del server, first, client, clients, draining
            gc.collect()
            files, seconds = len(os.listdir("/proc/self/fd")), time.perf_counter() - began_s
            shown = f"{sent} | {seconds:.0f} | {rss_mib():.1f} | {len(gc.get_objects())} | {files} | {site.lost}"
            click.echo(f"| {shown} |")


@click.command(help=__doc__)
@click.option("--requests", type=click.IntRange(1), default=200_000, show_default=True, help="Their number, about.")
def command(requests: int) -> None:
    """Run the soak."""
    asyncio.run(run(requests))
