"""Serves an aiohttp application on loopback; no connection stays open after the server stops."""

import asyncio
import ssl
from types import TracebackType
from typing import Final, Self

from aiohttp import web

# asyncio creates the transport of an accepted connection in the next iteration of the event loop, and aiohttp then
# registers the connection. The server closes only registered connections.
_ITERATIONS: Final = 5


class WebServer:
    """A server of ``application`` on ``host`` and ``port`` (0: any free port); it starts once.

    A request's handler is cancelled when its client leaves, and ``shutdown_timeout`` seconds after the server stops.
    """

    def __init__(
        self,
        application: web.Application,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ssl_context: ssl.SSLContext | None = None,
        shutdown_timeout: float = 0.1,
    ) -> None:
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=shutdown_timeout)
        self._host = host
        self._ssl = ssl_context
        self._listener: asyncio.Server | None = None
        self.port = port

    async def start(self) -> None:
        """Listen; ``port`` is then the port."""
        await self._runner.setup()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._runner.server, self._host, self.port, ssl=self._ssl)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._listener is not None:
            await stop_accepting(self._listener)
            self._listener.close()
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


async def stop_accepting(listener: asyncio.Server) -> None:
    """Return when every accepted connection has its transport; the listener accepts no further connection."""
    # Without this step, Python 3.11 leaves open a connection that it accepted shortly before ``close``.
    loop = asyncio.get_running_loop()
    for each in listener.sockets:
        loop.remove_reader(each)
    for _ in range(_ITERATIONS):
        await asyncio.sleep(0)
