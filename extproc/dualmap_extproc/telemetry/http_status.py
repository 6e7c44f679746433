"""The HTTP server of the metrics port: metrics for Prometheus, status for people and the operator, and the dashboard.

The server runs in the event loop, where it reads the pools' statuses quickly. A separate thread renders the metrics
page, because this takes a long time for a thousand endpoints.
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
"""The most open connections. More connections could use up the file descriptors that routing needs."""
STALLED_TIMEOUT_S: Final = 30.0
"""The server disconnects a client that does not read an answer for this time."""


class StatusServer:
    """The HTTP server of the metrics port.

    Each request reads the current ``statuses`` and ``signals``. ``router`` is this router's name.
    Without ``dashboard``, the path ``/`` does not exist. The server disconnects a client that completes no request
    within ``idle_timeout_s``, or does not read an answer for ``stalled_timeout_s``. These timeouts keep connections
    free for Prometheus.
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
        # The lock allows one page at a time, because several threads would leave the event loop little time of the
        # interpreter.
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
        # aiohttp's keepalive timeout starts when a connection opens and after each answer, and pauses during a request.
        # The shutdown timeout replaces aiohttp's default, which waits a minute for open connections.
        self._runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=1.0, logger=_logger(), keepalive_timeout=idle_timeout_s
        )
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on ``host:port`` (0: any free port) and return the port. Raises OSError if the bind fails."""
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._admit, host, port)
        except OSError:
            await self._runner.cleanup()
            raise
        if sys.platform == "linux":
            # aiohttp and asyncio wait without a limit for a client that does not read. TCP_USER_TIMEOUT closes
            # connections to such clients. Connections inherit this option from the listening socket.
            for listening in self._listener.sockets:
                timeout_ms = int(self._stalled_timeout_s * 1000)
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def _admit(self) -> asyncio.Protocol:
        """Return the protocol of a new connection; above the limit, a protocol that closes the connection."""
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
    """A protocol that closes its connection immediately."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _logger() -> logging.Logger:
    """Return a logger that drops errors about invalid HTTP: these are the client's fault and are answered with 400."""
    logger = logging.getLogger(f"{__name__}.aiohttp")
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def pool_document(router: str, status: PoolSnapshot, traffic: Traffic) -> dict[str, object]:
    """Return the answer to ``GET /pools/NAMESPACE/NAME``, as JSON values (docs/metrics.md).

    ``traffic`` contains totals that only grow, so that a client can sum them over routers and compute differences.
    ``held`` is the number of requests queued in this router, even for a pool without members. The ring version is the
    version that the picker uses, which may briefly be older than the latest version (``app.adoption``). A ``suspended``
    endpoint failed several times and temporarily gets no requests.
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
