"""A gRPC server on one port, in grpc.aio."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import grpc

from dualmap_edge.ports import address
from dualmap_extproc.transport.tls import Certificates

Handler: TypeAlias = "grpc.GenericRpcHandler[Any, Any]"

_NO_END_S: Final = 1e6
# The most pending streams: as many as a pool may queue (docs/pool.md), and more than Envoy's circuit breakers allow.
_STREAMS_PENDING_MAX: Final = 100_000


class GrpcServer:
    """A server of ``handlers``. A message has at most ``message_bytes``.

    A connection has at most ``streams_max`` open streams, or any number of them.
    """

    def __init__(self, handlers: Sequence[Handler], *, message_bytes: int, streams_max: int | None = None) -> None:
        options = (
            ("grpc.max_receive_message_length", message_bytes),
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
        streams = () if streams_max is None else (("grpc.max_concurrent_streams", streams_max),)
        self._server = grpc.aio.server(options=(*options, *streams))
        self._server.add_generic_rpc_handlers(tuple(handlers))

    async def bind(self, host: str, port: int, certificates: Certificates | None) -> int:
        """Bind the port (0: any), and return it. Raises OSError."""
        where = address(host, port)
        try:
            if certificates is None:
                return self._server.add_insecure_port(where)
            return self._server.add_secure_port(where, certificates.for_port())
        except RuntimeError as error:
            raise OSError(0, str(error)) from None

    async def start(self) -> None:
        """Serve."""
        await self._server.start()

    async def drain(self) -> None:
        """Reject new streams, and wait until all streams have ended."""
        # The grace period must not end: grpc.aio 1.85 crashes if a grace period ends while another `stop` is running.
        await self._server.stop(_NO_END_S)

    async def close(self) -> None:
        """Stop immediately, and cut open streams."""
        await self._server.stop(None)
