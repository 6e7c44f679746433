"""The HTTP server of the metrics port: metrics for Prometheus, status for people and the operator, and the dashboard.

The server runs in the event loop, where it reads the pools' statuses quickly. A separate thread renders the metrics
page, because this takes a long time for a thousand endpoints.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Final, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dualmap.objects.times import time_text
from dualmap.requests import EndpointStatus, PoolSnapshot
from dualmap.scaling.scaling import PoolSignals
from dualmap_edge.connections import Connections
from dualmap_edge.ports import IDLE_TIMEOUT_S
from dualmap_extproc.names import replica_of
from dualmap_extproc.telemetry.counts import Traffic
from dualmap_extproc.telemetry.dashboard.routes import Dashboard
from dualmap_extproc.telemetry.metrics import CONTENT_TYPE, Metrics

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

CONNECTIONS_MAX: Final = 256
"""The most open connections. More connections could use up the file descriptors that routing needs."""
CONNECTIONS_OF_SOURCE_MAX: Final = 16
"""The most open connections of one source address."""
STALLED_TIMEOUT_S: Final = 30.0
"""The server disconnects a client that does not read an answer for this time."""


class StatusServer:
    """The HTTP server of the metrics port.

    Each request reads the current ``statuses`` and ``signals``. ``router`` is this router's name. ``tokenizer`` returns
    the state of a pool's source of token ids, and ``kv_store`` that of its KV store, None without one.
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
        tokenizer: Callable[[str], Mapping[str, object]] = lambda _: {},
        kv_store: Callable[[str], Mapping[str, object] | None] = lambda _: None,
        dashboard: Dashboard | None = None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        stalled_timeout_s: float = STALLED_TIMEOUT_S,
    ) -> None:
        self._router = router
        self._statuses = statuses
        self._signals = signals
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._kv_store = kv_store
        self._dashboard = dashboard
        self._stalled_timeout_s = stalled_timeout_s
        # The lock allows one page at a time, because several threads would leave the event loop little time of the
        # interpreter.
        self._writing = asyncio.Lock()
        application = web.Application(middlewares=[self._answer])
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
        self._runner = web.AppRunner(application, shutdown_timeout=1.0)
        self._idle_timeout_s = idle_timeout_s
        self._connections = Connections(self._protocol, most=CONNECTIONS_MAX, most_of_source=CONNECTIONS_OF_SOURCE_MAX)
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on ``host:port`` (0: any free port) and return the port. Raises OSError if the bind fails."""
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._connections.accept, host, port)
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

    def _protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        # aiohttp accepts None and then logs no requests.
        return _Protocol(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            logger=_logger(),
            keepalive_timeout=self._idle_timeout_s,
        )

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request on a connection that is busy meanwhile. The text of an error ends with a newline."""
        transport = request.transport
        assert transport is not None
        self._connections.begin(transport)
        try:
            return await handler(request)
        except web.HTTPException as error:
            _end_line(error)
            raise
        finally:
            self._connections.end(transport)

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
                document = pool_document(self._router, status, self._metrics.traffic(pool), self._tokenizer(pool))
                kv_store = self._kv_store(pool)
                return web.json_response(document if kv_store is None else {**document, "kv_store": kv_store})
        error = f"this router serves no pool {pool}; GET /pools lists those it does"
        response = web.json_response({"router": self._router, "error": error}, status=404)
        _end_line(response)
        return response


class _Protocol(web.RequestHandler):
    """The protocol of one connection. The text of an error about invalid HTTP ends with a newline."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a request that cannot be read or that failed."""
        response = super().handle_error(request, status, exc, message)
        if isinstance(response, web.Response):
            _end_line(response)
        return response


def _end_line(response: web.Response) -> None:
    response.text = f"{response.text or ''}\n"


def _logger() -> logging.Logger:
    """Return a logger that drops errors about invalid HTTP: these are the client's fault and are answered with 400."""
    logger = logging.getLogger(f"{__name__}.aiohttp")
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def pool_document(
    router: str, status: PoolSnapshot, traffic: Traffic, tokenizer: Mapping[str, object]
) -> dict[str, object]:
    """Return the answer to ``GET /pools/NAMESPACE/NAME``, as JSON values (docs/metrics.md).

    ``traffic`` contains totals that only grow, so that a client can sum them over routers and compute differences.
    ``held`` is the number of requests queued in this router, even for a pool without members. The ring version is the
    version that the picker uses, which may briefly be older than the latest version (``app.adoption``). A ``suspended``
    endpoint failed several times and temporarily gets no requests. ``engine`` is what the endpoint's engine says.
    ``tokenizer`` is the state of the pool's source of token ids. ``owner`` is the router that decides for the pool.
    ``leave_at`` is the time at which an endpoint must stop, None for an endpoint without notice.
    """
    return {
        "router": router,
        "owner": replica_of(status.owner) or router,
        "ring_version": status.ring_version,
        "held": status.held,
        "traffic": asdict(traffic),
        "tokenizer": tokenizer,
        "endpoints": [
            {
                "id": endpoint.id,
                "state": endpoint.state,
                "in_flight": endpoint.in_flight,
                "held": endpoint.held,
                "pending_prefill_tokens": endpoint.pending_prefill_tokens,
                "suspended": endpoint.suspended,
                "leave_at": None if endpoint.leave_at_s is None else time_text(endpoint.leave_at_s),
                "engine": _engine(endpoint),
            }
            for endpoint in status.endpoints
        ],
    }


def _engine(endpoint: EndpointStatus) -> dict[str, object]:
    profile = endpoint.engine
    return {
        "version": profile.version,
        "block_tokens": profile.block_tokens,
        "kv_tokens": profile.kv_tokens,
        "adapters": profile.adapters,
        "events": asdict(endpoint.events),
        "reason": profile.problem,
    }
