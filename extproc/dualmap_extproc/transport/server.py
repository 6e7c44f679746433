"""The router's gRPC servers: their ports, the health service, and the drain."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # grpc-stubs does not know it
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dualmap_edge.logs import get_logger
from dualmap_edge.ports import AddressError, address
from dualmap_extproc.names import EXT_PROC_SERVICE
from dualmap_extproc.settings import Limits
from dualmap_extproc.transport.grpc_processor import Handler, grpc_handler
from dualmap_extproc.transport.processor import ExternalProcessor

Credentials: TypeAlias = Callable[[], grpc.ServerCredentials]

LIVENESS_SERVICE: Final = "liveness"
# Envoy and Kubernetes request the health of the empty name by default, which means the whole server.
READINESS_SERVICES: Final = ("", "readiness", EXT_PROC_SERVICE)

# A drain closes the port when no stream has begun for this time. Envoy checks the health every 0.5 s, or later if the
# machine is busy. In a test with a fixed delay of 0.5 s, one of 50 restarts under load rejected a stream.
NOTICE_S = 1.0
# The longest time that the port stays open. Clients without health checks send streams until the port closes.
NOTICE_MAX_S = 5.0
_NO_END_S: Final = 1e6
# The time in which gRPC sends the end of calls after their handlers have returned. A call that is cut before its end
# breaks the response in Envoy.
_FLUSH_S: Final = 0.25
# The most pending streams: as many as a pool may queue (docs/pool.md), and more than Envoy's circuit breakers allow.
_STREAMS_PENDING_MAX: Final = 100_000
# gRPC stores a message until it is complete, for any peer that reaches the port. These ports therefore accept only the
# messages that they need. An access log batch has 64 KiB, or one entry more; an entry has at most the size of Envoy's
# headers. The health port has requests of a few names.
ALS_MESSAGE_BYTES: Final = 4 * 1024 * 1024
HEALTH_MESSAGE_BYTES: Final = 64 * 1024
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


class GrpcServers:
    """The router's three gRPC servers: all services for Envoy, health without TLS, and the access log.

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
    ) -> None:
        self._processor = processor
        self._health = health_aio.HealthServicer()
        # The gRPC limit is above the body limit, so that the router can answer 413 to a larger body before gRPC fails
        # the stream. The number of streams has no limit on the main port, because queued requests are open streams.
        main = (("grpc.max_receive_message_length", limits.body_bytes * 5 // 2),)
        health = (
            ("grpc.max_receive_message_length", HEALTH_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", _HEALTH_STREAMS_MAX),
        )
        als = (
            ("grpc.max_receive_message_length", ALS_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", _ALS_STREAMS_MAX),
        )
        options = (
            ("grpc.max_send_message_length", -1),
            # A port in use must be an error: the router must not share the port with another process.
            ("grpc.so_reuseport", 0),
            # Queued requests are open streams. By default, if more than 1000 streams arrive together, gRPC itself
            # rejects some of them. Envoy then forwards the requests of rejected streams without a pick.
            ("grpc.server.max_pending_requests", _STREAMS_PENDING_MAX),
            ("grpc.server.max_pending_requests_hard_limit", _STREAMS_PENDING_MAX),
            # Envoy may send keepalive pings at any rate.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        )
        self._main = grpc.aio.server(options=(*options, *main))
        self._plain_health = grpc.aio.server(options=(*options, *health))
        self._als = grpc.aio.server(options=(*options, *als))
        self._main.add_generic_rpc_handlers((grpc_handler(processor), *services, *access_log))
        self._plain_health.add_generic_rpc_handlers(tuple(plain))
        self._als.add_generic_rpc_handlers(tuple(access_log))
        for server in (self._main, self._plain_health):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def start(
        self,
        host: str,
        *,
        grpc_port: int,
        health_port: int,
        als_port: int,
        credentials: Credentials | None,
    ) -> Ports:
        """Bind the ports and start to serve, with the status not ready; return the ports. Raises AddressError.

        ``credentials`` makes the TLS credentials of one port (None: no TLS).
        """
        await self._set_ready(HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVENESS_SERVICE, HealthCheckResponse.SERVING)
        ports = Ports(
            grpc=_bind(self._main, host, grpc_port, "--grpc-port", credentials),
            health=_bind(self._plain_health, host, health_port, "--health-port", None),
            als=_bind(self._als, host, als_port, "--als-port", credentials),
        )
        for server in (self._plain_health, self._als, self._main):
            await server.start()
        return ports

    async def ready(self) -> None:
        """Report readiness to health checks."""
        await self._set_ready(HealthCheckResponse.SERVING)

    async def drain(self, timeout_s: float, *, end_access_log: Callable[[], None] = lambda: None) -> None:
        """Stop within ``timeout_s``: report not ready, then reject new streams and finish open streams.

        The drain waits only for ext_proc streams, because clients keep discovery, access log and health streams open.
        New streams are rejected when none has begun for NOTICE_S, and after NOTICE_MAX_S at the latest. At this
        moment, the router dispatches all queued requests, because their members may need more time than the drain
        allows. When no stream of ext_proc is open, ``end_access_log`` must end each stream of the access log after its
        next batch.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        _log.info("Draining", open_requests=self._processor.open_requests, at_most_s=timeout_s)
        await self._set_ready(HealthCheckResponse.NOT_SERVING)
        await self._noticed(until_s=min(loop.time() + NOTICE_MAX_S, deadline_s))
        self._processor.stop_queueing()
        # The grace period must not end: grpc.aio 1.85 crashes if a grace period ends while another `stop` is running.
        stopping = asyncio.create_task(self._main.stop(_NO_END_S))
        idle = asyncio.create_task(self._processor.idle())
        left_s = max(0.0, deadline_s - loop.time())
        await asyncio.wait((stopping, idle), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        end_access_log()
        cut = self._processor.open_requests
        if not cut:
            await asyncio.wait((stopping,), timeout=_FLUSH_S)
        await self.close()
        await stopping
        _log.info("Stopped", cut_requests=cut)

    async def close(self) -> None:
        """Stop immediately, and cut open streams."""
        await asyncio.gather(*(server.stop(None) for server in (self._main, self._als, self._plain_health)))

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
        for service in READINESS_SERVICES:
            await self._health.set(service, status)


def _bind(server: grpc.aio.Server, host: str, port: int, option: str, credentials: Credentials | None) -> int:
    where = address(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, credentials())
    except RuntimeError as error:
        raise AddressError(host, port, option, error) from None
