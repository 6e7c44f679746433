"""A TCP proxy in front of the API server, which can stop forwarding like a network that drops packets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

_API_SERVER_PORT: Final = 6443


class SilentProxy:
    """The proxy. A running proxy.

    ``kubeconfig`` writes a kubeconfig file with the proxy's address. ``freeze`` stops forwarding without closing
    connections.
    """

    def __init__(self) -> None:
        self.port = 0
        self._forwarding: list[asyncio.Task[None]] = []

    def freeze(self) -> None:
        """Stop forwarding on the open connections; new connections work."""
        for task in self._forwarding:
            task.cancel()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["SilentProxy"]:
        """Accept connections while the context is open."""
        async with AsyncExitStack() as stack:
            writers: list[asyncio.StreamWriter] = []

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    from_server, to_server = await asyncio.open_connection("127.0.0.1", _API_SERVER_PORT)
                except OSError:
                    # If the API server is down, the proxy also closes the client's connection.
                    writer.close()
                    return
                writers.extend((writer, to_server))
                pairs = ((reader, to_server), (from_server, writer))
                self._forwarding += [asyncio.create_task(_forward(*pair)) for pair in pairs]

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            stack.callback(_close, writers)
            stack.callback(self.freeze)
            stack.callback(server.close)
            self.port = server.sockets[0].getsockname()[1]
            yield self

    def kubeconfig(self, path: Path, original: Path) -> Path:
        """Write a copy of a kubeconfig with the proxy's address, and return the copy's path."""
        path.write_text(original.read_text().replace(f":{_API_SERVER_PORT}", f":{self.port}"))
        return path


def _close(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    writer.close()
