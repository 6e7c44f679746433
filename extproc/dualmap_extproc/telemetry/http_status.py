"""The metrics port: ``GET /metrics`` for Prometheus, ``GET /pools`` for people and the operator, and the dashboard.

It shares the event loop with routing: it takes the statuses there, which is quick. A thread writes the metrics page,
which takes long for a thousand endpoints.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dualmap.requests import PoolSnapshot
from dualmap.scaling.scaling import PoolSignals
from dualmap_edge.ports import IDLE_TIMEOUT_S
from dualmap_extproc.telemetry.counts import Traffic
from dualmap_extproc.telemetry.dashboard.routes import Dashboard
from dualmap_extproc.telemetry.metrics import CONTENT_TYPE, Metrics

CONNECTIONS_MAX: Final = 256
"""Connections open at a time; further ones would take file descriptors that routing needs."""
STALLED_TIMEOUT_S: Final = 30.0
"""A client that reads nothing of an answer for this long is disconnected."""


class StatusServer:
    """Serves ``metrics`` with the ``statuses`` and ``signals`` at each request; ``router`` is this router's name.

    Without ``dashboard`` there is nothing at ``/``. A client that completes no request within ``idle_timeout_s``, or
    reads nothing of an answer for ``stalled_timeout_s``, is disconnected, so that Prometheus finds a free connection.
    """

    def __init__(
        self,
        *,
        router: str,
        statuses: Callable[[], tuple[PoolSnapshot, ...]],
        signals: Callable[[Sequence[PoolSnapshot]], Mapping[str, PoolSignals]],
        metrics: Metrics,
        dashboard: Dashboard | None = None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        stalled_timeout_s: float = STALLED_TIMEOUT_S,
    ) -> None:
        self._router = router
        self._statuses = statuses
        self._signals = signals
        self._metrics = metrics
        self._dashboard = dashboard
        self._stalled_timeout_s = stalled_timeout_s
        # One page at a time: several threads would leave the event loop little time of the interpreter.
        self._writing = asyncio.Lock()
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/pools", self._get_pools),
                web.get("/pools/{namespace}/{name}", self._get_pool),
            ]
        )
        if dashboard is not None:
            application.add_routes(dashboard.routes())
        # aiohttp's keepalive timeout starts with a connection and after each answer, and pauses while one is answered.
        # A shutdown does not wait aiohttp's default minute for open connections.
        self._runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=1.0, logger=_logger(), keepalive_timeout=idle_timeout_s
        )
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on ``host:port`` (0: any free port) and return the port. Raises OSError when it cannot be bound."""
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._admit, host, port)
        except OSError:
            await self._runner.cleanup()
            raise
        if sys.platform == "linux":
            # aiohttp and asyncio wait forever for a client that does not read. TCP_USER_TIMEOUT closes such
            # connections, which inherit it from the listening socket.
            for listening in self._listener.sockets:
                timeout_ms = int(self._stalled_timeout_s * 1000)
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def _admit(self) -> asyncio.Protocol:
        """Return the protocol of a new connection; one too many is closed."""
        server = self._runner.server
        assert server is not None
        return server() if len(server.connections) < CONNECTIONS_MAX else _Closed()

    async def close(self) -> None:
        """Stop listening and close open connections."""
        if self._dashboard is not None:
            self._dashboard.close()
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        async with self._writing:
            statuses = self._statuses()
            page = await asyncio.to_thread(self._metrics.render, statuses, self._signals(statuses))
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})

    async def _get_pools(self, _request: web.Request) -> web.Response:
        pools = [
            {"pool": status.pool, "ring_version": status.ring_version, "endpoints": len(status.endpoints)}
            for status in self._statuses()
        ]
        return web.json_response({"router": self._router, "pools": pools})

    async def _get_pool(self, request: web.Request) -> web.Response:
        pool = f"{request.match_info['namespace']}/{request.match_info['name']}"
        for status in self._statuses():
            if status.pool == pool:
                return web.json_response(pool_document(self._router, status, self._metrics.traffic(pool)))
        return web.json_response(
            {"router": self._router, "error": f"this router serves no pool {pool}; GET /pools lists those it does"},
            status=404,
        )


class _Closed(asyncio.Protocol):
    """Closes a connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _logger() -> logging.Logger:
    """Return a log without errors about invalid HTTP, which is answered 400 and is the client's fault."""
    logger = logging.getLogger(f"{__name__}.aiohttp")
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def pool_document(router: str, status: PoolSnapshot, traffic: Traffic) -> dict[str, object]:
    """Return the answer to ``GET /pools/NAMESPACE/NAME``, as JSON values (docs/metrics.md).

    ``traffic`` holds totals that only grow, so that a reader of several routers can add them up and take differences.
    ``held`` counts the requests queued in this router, those of a pool without members included. The ring version is
    the one that the picker applies, which may be a moment behind the latest (``app.adoption``). A ``suspended``
    endpoint failed several times and gets no requests for a while.
    """
    return {
        "router": router,
        "ring_version": status.ring_version,
        "held": status.held,
        "traffic": asdict(traffic),
        "endpoints": [
            {
                "id": endpoint.id,
                "state": endpoint.state,
                "in_flight": endpoint.in_flight,
                "held": endpoint.held,
                "pending_prefill_tokens": endpoint.pending_prefill_tokens,
                "suspended": endpoint.suspended,
            }
            for endpoint in status.endpoints
        ],
    }
