"""The router's ports: binding, readiness, and the order in which services end in a drain."""

import click

from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap_edge.logs import get_logger
from dualmap_edge.ports import AddressError, address, check_free
from dualmap_extproc.app.other_routers import OtherRouters
from dualmap_extproc.app.program import Program
from dualmap_extproc.autoscaling.scaler import Scaler
from dualmap_extproc.envoy.access_log.sink import AccessLogSink
from dualmap_extproc.envoy.discovery.service import Discovery
from dualmap_extproc.settings import Settings
from dualmap_extproc.telemetry.http_status import StatusServer
from dualmap_extproc.telemetry.transport import TransportMetrics
from dualmap_extproc.transport.processor import ExternalProcessor
from dualmap_extproc.transport.server import GrpcServers
from dualmap_extproc.transport.tls import server_certificates

_log = get_logger(__name__)


class Listening:
    """All servers of the router; ``program`` is what messages call the command."""

    def __init__(
        self,
        settings: Settings,
        program: Program,
        *,
        processor: ExternalProcessor,
        discovery: Discovery,
        scaler: Scaler,
        access_log: AccessLogSink,
        others: OtherRouters,
        status: StatusServer,
        metrics: TransportMetrics,
    ) -> None:
        self._settings = settings
        self._program = program
        self._scaler = scaler
        self._access_log = access_log
        self._others = others
        self._status = status
        self._ready_line = ""
        self._servers = GrpcServers(
            processor,
            services=(*discovery.handlers(), scaler.handler(), *others.handlers()),
            plain=(scaler.handler(),),
            access_log=(access_log.handler(),),
            limits=settings.limits,
            transport=settings.transport,
        )
        metrics.show(self._servers.http2)

    async def start(self) -> int:
        """Bind every port and serve, not ready yet; return the gRPC port. Raises AddressError and TlsError."""
        settings = self._settings
        wanted = {
            "--grpc-port": settings.grpc_port,
            self._program.health_port: settings.health_port,
            "--metrics-port": settings.metrics_port,
            "--als-port": settings.als_port,
        }
        for option, port in wanted.items():
            check_free(settings.host, port, option)
        ports = await self._servers.start(
            settings.host,
            grpc_port=settings.grpc_port,
            health_port=settings.health_port,
            als_port=settings.als_port,
            health_option=self._program.health_port,
            certificates=server_certificates(settings.tls, settings.tls_client_ca, option=self._program.tls),
        )
        try:
            metrics_port = await self._status.start(settings.host, settings.metrics_port)
        except OSError as error:
            raise AddressError(settings.host, settings.metrics_port, "--metrics-port", error) from error
        bound = {"grpc": ports.grpc, "health": ports.health, "metrics": metrics_port, "als": ports.als}
        shown = " ".join(f"{name}={address(settings.host, port)}" for name, port in bound.items())
        self._ready_line = f"{self._program.name} ready {shown}"
        return ports.grpc

    async def ready(self) -> None:
        """Report readiness to health checks, and print the ports to standard error."""
        await self._servers.ready()
        click.echo(self._ready_line, err=True)
        if self._settings.hash_key == PUBLIC_KEY:
            _log.warning(
                "The hash key is public, so a client can craft prompts that match another tenant's; "
                "give all routers the same secret with --hash-key-file"
            )

    async def drain(self) -> None:
        """Fail readiness checks, finish open requests, and stop within the settings' drain timeout.

        Autoscalers go first, to another router. The other routers choose new owners of this router's pools before this
        router stops queueing. They receive the last access log entries before the ports close.
        """
        self._scaler.end_streams()
        self._others.leave()
        await self._servers.drain(self._settings.drain_timeout_s, before_close=self._end)

    async def _end(self) -> None:
        """Take the last entries of the access log, and send what they report to the other routers."""
        await self._access_log.end()
        await self._others.end()

    async def close(self) -> None:
        """Stop immediately, and cut what is open."""
        await self._servers.close()
        await self._status.close()
