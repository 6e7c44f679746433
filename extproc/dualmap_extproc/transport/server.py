"""The router's gRPC servers: their ports, the health service, and the drain."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # grpc-stubs does not know it
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from dualmap_edge.logs import get_logger
from dualmap_edge.ports import AddressError
from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.settings import Limits, Transport
from dualmap_extproc.transport.grpc_processor import grpc_handler
from dualmap_extproc.transport.grpc_server import GrpcServer, Handler
from dualmap_extproc.transport.http2.limits import Http2Limits
from dualmap_extproc.transport.http2_processor import http2_method
from dualmap_extproc.transport.http2_server import Http2Server
from dualmap_extproc.transport.http2_services import Methods
from dualmap_extproc.transport.processor import ExternalProcessor
from dualmap_extproc.transport.tls import Certificates

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
EXT_PROC_PATH: Final = f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}".encode()
LIVENESS_SERVICE: Final = "liveness"
# Envoy and Kubernetes request the health of the empty name by default, which means the whole server.
READINESS_SERVICES: Final = ("", "readiness", EXT_PROC_SERVICE)
# The charts of other endpoint pickers use this name for readiness and for liveness. So it means readiness at first, but
# a router that still waits for its pools soon reports that it is alive: the kubelet would restart it 25 s after its
# start (initialDelaySeconds 5, and three failures with a period of 10 s).
SHARED_PROBE_SERVICE: Final = "inference-extension"
SHARED_PROBE_WAIT_S = 15.0

# A drain closes the port when no stream has begun for this time. Envoy checks the health every 0.5 s, or later if the
# machine is busy, and leaves out a router after two failed checks. With little traffic, no stream begins for a second
# by chance. In a test with a time of 1 s, one of 160 requests passed without a pick while four routers became one.
NOTICE_S = 1.5
# The longest time that the port stays open. Clients without health checks send streams until the port closes.
NOTICE_MAX_S = 5.0
# The time in which gRPC sends the end of calls after their handlers have returned. A call that is cut before its end
# breaks the response in Envoy.
_FLUSH_S: Final = 0.25
# gRPC stores a message until it is complete, for any peer that reaches the port. These ports therefore accept only the
# messages that they need. An access log batch has 64 KiB, or one entry more; an entry has at most the size of Envoy's
# headers. The health port has requests of a few names.
ALS_MESSAGE_BYTES: Final = 4 * 1024 * 1024
HEALTH_MESSAGE_BYTES: Final = 64 * 1024
# The unsent bytes of a connection above the bodies that the router stores: the answers around them.
_UNSENT_MARGIN_BYTES: Final = 1024 * 1024
# The open streams of one connection. A worker of Envoy has one stream per access log on its connection. KEDA has a
# stream per pool. A client with more streams opens another connection.
_ALS_STREAMS_MAX: Final = 100
_HEALTH_STREAMS_MAX: Final = 1000
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The bound ports."""

    grpc: int
    health: int
    als: int


class Server(Protocol):
    """A gRPC server on one port, in either transport."""

    async def bind(self, host: str, port: int, certificates: Certificates | None) -> int:
        """Bind the port (0: any), and return it. Raises OSError."""

    async def start(self) -> None:
        """Serve."""

    async def drain(self) -> None:
        """Reject new streams, and wait until all streams have ended."""

    async def close(self) -> None:
        """Stop immediately, and cut open streams."""


async def _nothing() -> None:
    pass


class GrpcServers:
    """The router's three gRPC servers: all services for Envoy, health without TLS, and the access log.

    ``transport`` serves the first of them: ``h2`` is the router's own HTTP/2 server (``http2``, which is None with the
    other transport), ``grpc`` is grpc.aio. The other servers use grpc.aio.

    The main server offers ext_proc, health, ``services`` and ``access_log``. The server without TLS offers health and
    ``plain``, which change nothing. The access log server offers ``access_log``.
    """

    def __init__(
        self,
        processor: ExternalProcessor,
        *,
        services: Sequence[Handler],
        plain: Sequence[Handler] = (),
        access_log: Sequence[Handler],
        limits: Limits,
        transport: Transport = "h2",
    ) -> None:
        self._processor = processor
        self.http2: Http2Server | None = None
        self._health = health_aio.HealthServicer()
        self._until_alive: asyncio.Task[None] | None = None
        health = (health_handler(self._health),)
        handlers = (*services, *access_log, *health)
        self._main: Server
        if transport == "h2":
            self._main = self.http2 = Http2Server(
                lambda client: Methods({EXT_PROC_PATH: http2_method(processor)}, handlers, client),
                http2_limits(limits),
            )
        else:
            # The number of streams has no limit on the main port, because queued requests are open streams.
            self._main = GrpcServer((grpc_handler(processor), *handlers), message_bytes=_message_bytes(limits))
        self._plain_health = GrpcServer(
            (*plain, *health), message_bytes=HEALTH_MESSAGE_BYTES, streams_max=_HEALTH_STREAMS_MAX
        )
        self._als = GrpcServer(access_log, message_bytes=ALS_MESSAGE_BYTES, streams_max=_ALS_STREAMS_MAX)

    async def start(
        self,
        host: str,
        *,
        grpc_port: int,
        health_port: int,
        als_port: int,
        health_option: str = "--health-port",
        certificates: Certificates | None,
    ) -> Ports:
        """Bind the ports and start to serve, with the status not ready; return the ports. Raises AddressError.

        ``certificates`` are those of the ports with TLS (None: no TLS). Errors call the option for the health port
        ``health_option``.
        """
        await self._set_ready(HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVENESS_SERVICE, HealthCheckResponse.SERVING)
        ports = Ports(
            grpc=await _bind(self._main, host, grpc_port, "--grpc-port", certificates),
            health=await _bind(self._plain_health, host, health_port, health_option, None),
            als=await _bind(self._als, host, als_port, "--als-port", certificates),
        )
        for server in (self._plain_health, self._als, self._main):
            await server.start()
        self._until_alive = asyncio.create_task(self._report_alive())
        return ports

    async def ready(self) -> None:
        """Report readiness to health checks."""
        await self._set_ready(HealthCheckResponse.SERVING)

    async def drain(self, timeout_s: float, *, before_close: Callable[[], Awaitable[None]] = _nothing) -> None:
        """Report not ready, then reject new streams, finish open streams within ``timeout_s``, and stop.

        The drain waits only for ext_proc streams, because clients keep discovery, access log and health streams open.
        New streams are rejected when none has begun for NOTICE_S, and after NOTICE_MAX_S at the latest. At this
        moment, the router dispatches all queued requests, because their members may need more time than the drain
        allows. When no stream of ext_proc is open, or after ``timeout_s``, the drain waits for ``before_close``, during
        which the ports accept messages of open streams only.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        _log.info("Draining", open_requests=self._processor.open_requests, at_most_s=timeout_s)
        await self._set_ready(HealthCheckResponse.NOT_SERVING)
        await self._noticed(until_s=min(loop.time() + NOTICE_MAX_S, deadline_s))
        self._processor.stop_queueing()
        stopping = asyncio.create_task(self._main.drain())
        idle = asyncio.create_task(self._processor.idle())
        left_s = max(0.0, deadline_s - loop.time())
        await asyncio.wait((stopping, idle), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        cut = self._processor.open_requests
        als_stopping = asyncio.create_task(self._als.drain())
        await before_close()
        if not cut:
            await asyncio.sleep(_FLUSH_S)
        await self.close()
        await asyncio.gather(stopping, als_stopping)
        _log.info("Stopped", cut_requests=cut)

    async def close(self) -> None:
        """Stop immediately, and cut open streams."""
        if self._until_alive is not None:
            self._until_alive.cancel()
        await asyncio.gather(*(server.close() for server in (self._main, self._als, self._plain_health)))

    async def _noticed(self, *, until_s: float) -> None:
        """Wait until no stream has begun for NOTICE_S, or until ``until_s`` on the loop's clock."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while (now := clock()) < until_s:
            quiet_s = now - max(began_s, self._processor.last_began_s)
            if quiet_s >= NOTICE_S:
                return
            await asyncio.sleep(min(NOTICE_S - quiet_s, until_s - now))

    async def _set_ready(self, status: "HealthCheckResponse.ServingStatus") -> None:
        if self._until_alive is not None:
            self._until_alive.cancel()
        for service in (*READINESS_SERVICES, SHARED_PROBE_SERVICE):
            await self._health.set(service, status)

    async def _report_alive(self) -> None:
        """Report that the router is alive to probes of ``SHARED_PROBE_SERVICE``, although it is not ready."""
        await asyncio.sleep(SHARED_PROBE_WAIT_S)
        await self._health.set(SHARED_PROBE_SERVICE, HealthCheckResponse.SERVING)


def health_handler(servicer: health_aio.HealthServicer) -> Handler:
    """Return the handler of the health service: the methods that gRPC's health checking protocol has."""
    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(
            servicer.Check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        ),
        "Watch": grpc.unary_stream_rpc_method_handler(
            servicer.Watch, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        ),
    }
    return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)


def _message_bytes(limits: Limits) -> int:
    """Return the limit of one message: above the body limit, so that the router can answer 413 to a larger body."""
    return limits.body_bytes * 5 // 2


def http2_limits(limits: Limits) -> Http2Limits:
    """Return the limits of a connection of the main port.

    All bodies that the router may store may arrive from one Envoy, or be on their way back to it. One incomplete
    message more may arrive, because the router answers a body above ``limits.buffered_bytes`` with 503, while Envoy may
    send the request of a call that the connection ends to any member.
    """
    message_bytes = _message_bytes(limits)
    unsent_bytes = limits.buffered_bytes + _UNSENT_MARGIN_BYTES
    return Http2Limits(
        message_bytes=message_bytes,
        unfinished_bytes=limits.buffered_bytes + message_bytes,
        unsent_stream_bytes=unsent_bytes,
        unsent_connection_bytes=unsent_bytes,
    )


async def _bind(server: Server, host: str, port: int, option: str, certificates: Certificates | None) -> int:
    try:
        return await server.bind(host, port, certificates)
    except OSError as error:
        raise AddressError(host, port, option, error.strerror) from None
