"""The proxy's HTTP servers: the one for requests, and the one for metrics and liveness."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dualmap_edge.connections import Connections
from dualmap_edge.ports import IDLE_TIMEOUT_S
from dualmap_sidecar.metrics import CONTENT_TYPE, SidecarMetrics
from dualmap_sidecar.settings import Limits

Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
# Longer than gateways keep idle connections: a server that closes first can cut a request that is on its way.
_CLIENT_IDLE_S: Final = 3630.0
_STATUS_CONNECTIONS: Final = 64


class Server:
    """A server that drains: it stops listening, and then waits for the requests in flight.

    ``changed`` receives the number of requests in flight.
    """

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        *,
        connections: int,
        idle_s: float = _CLIENT_IDLE_S,
        changed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._handler = handler
        self._changed = changed
        self._in_flight = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=_logger(),
            keepalive_timeout=idle_s,
            auto_decompress=False,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
        )
        self._connections = Connections(self._server, most=connections, most_of_source=connections)
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on ``host:port`` (0: any free port) and return the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connections.accept, host, port, backlog=1024)
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    async def drain(self, timeout_s: float) -> None:
        """Stop listening, and wait for the requests in flight."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Close every connection, which aborts the requests in flight."""
        if self._listener is not None:
            self._listener.close()
        await self._server.shutdown(1.0)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        self._connections.begin(transport)
        self._count(1)
        try:
            response = await self._handler(request)
            if self._draining:
                response.force_close()
            return response
        finally:
            self._count(-1)
            self._connections.end(transport)

    def _count(self, change: int) -> None:
        self._in_flight += change
        self._changed(self._in_flight)
        if self._in_flight:
            self._idle.clear()
        else:
            self._idle.set()


def status_server(metrics: SidecarMetrics, limits: Limits) -> Server:
    """Return the server of ``/metrics`` and ``/healthz``, which tells that the proxy itself lives."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})
        if request.path == "/healthz":
            return web.Response(text="ok\n")
        return web.Response(status=404, text="not found; GET /metrics or /healthz\n")

    return Server(handle, limits, connections=_STATUS_CONNECTIONS, idle_s=IDLE_TIMEOUT_S)


def _logger() -> logging.Logger:
    """Return a logger that drops errors about invalid HTTP: these are the client's fault and are answered with 400."""
    logger = logging.getLogger(f"{__name__}.aiohttp")
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
