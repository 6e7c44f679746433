"""A TCP relay on loopback: its connections have another source address than those of the test's own clients."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from web_server import stop_accepting

OTHER_HOST = "127.0.0.2"


@asynccontextmanager
async def relayed(port: int, host: str = OTHER_HOST) -> AsyncIterator[int]:
    """Yield a port that leads to ``port`` of 127.0.0.1; the target accepts its connections from ``host``."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
        writers.extend((writer, to_writer))
        for task in (copy(reader, to_writer), copy(to_reader, writer)):
            tasks.add(asyncio.create_task(task))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await stop_accepting(server)
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        # The event loop closes the sockets in its next step.
        await asyncio.sleep(0)
