"""``dualmap router``: the composition root. Settings are parsed here, once, and everything is wired here."""

import asyncio
import secrets
import signal
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from dualmap.errors import PoolError
from dualmap.pool import Pool
from dualmap.pool_reader import parse_duration
from dualmap_extproc import logs
from dualmap_extproc.access_log import AccessLogEntry, AccessLogSink
from dualmap_extproc.endpoints import EndpointDiscovery
from dualmap_extproc.http_status import StatusServer
from dualmap_extproc.metrics import Metrics
from dualmap_extproc.picker import Picker
from dualmap_extproc.pools.file import PoolFileError, PoolFileWatcher
from dualmap_extproc.server import AddressError, ExternalProcessor, GrpcServers, address, keep_deadlines
from dualmap_extproc.settings import Settings
from dualmap_extproc.tls import TlsError, server_credentials

_PORT = click.IntRange(0, 65535)


class _Duration(click.ParamType[float]):
    """A duration as pool files spell it (``500ms``, ``25s``, ``1m``), in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(value, "--drain-timeout", high_s=3600.0)
        except PoolError as error:
            self.fail(str(error), param, ctx)


@click.command(context_settings={"show_default": True})
@click.option(
    "--pool",
    "pools",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="Pool file (InferencePool as YAML); repeat for several.",
)
@click.option("--host", default="0.0.0.0", help="Address that all ports are bound on.")
@click.option("--grpc-port", default=9002, type=_PORT, help="ext_proc, discovery, access log, health. 0: any.")
@click.option("--health-port", default=9003, type=_PORT, help="gRPC health in plain text. 0: any.")
@click.option("--metrics-port", default=9090, type=_PORT, help="/metrics and /pools over HTTP. 0: any.")
@click.option("--als-port", default=9004, type=_PORT, help="Envoy's access log over gRPC. 0: any.")
@click.option("--tls", default="off", metavar="off|self-signed|DIR", help="DIR holds tls.crt and tls.key.")
@click.option("--replica-id", default=socket.gethostname, show_default="host name", help="Name of this router.")
@click.option("--drain-timeout", default="25s", type=_Duration(), help="Longest wait for requests at SIGTERM.")
@click.option("--log-level", default="info", type=click.Choice(logs.LOG_LEVELS))
@click.option("--log-format", default="text", type=click.Choice(["text", "json"]))
def router(drain_timeout: float, **options: Any) -> None:
    """Run the endpoint picker that Envoy asks where each request goes.

    \b
    Example:
      dualmap router --pool pool.yaml
      dualmap envoy-config --pool pool.yaml --router 127.0.0.1:9002 --als 127.0.0.1:9004 > envoy.yaml

    SIGTERM turns readiness off first, serves what is open, and exits 0.
    """
    settings = Settings(drain_timeout_s=drain_timeout, **options)
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    try:
        asyncio.run(serve(settings))
    except (PoolFileError, TlsError) as error:
        click.echo(f"dualmap router: {error}", err=True)
        sys.exit(2)
    except AddressError as error:
        click.echo(f"dualmap router: {error}", err=True)
        sys.exit(1)


async def serve(settings: Settings) -> None:
    """Run the router until SIGTERM or SIGINT, then drain it.

    Raises PoolFileError, TlsError or AddressError for what keeps it from starting.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics = Metrics(version=version("dualmap"), replica_id=settings.replica_id)
    # Request ids come back in access logs, which may be another replica's or older than this process.
    picker = Picker(settings.limits, metrics, id_prefix=f"{settings.replica_id}-{secrets.token_hex(4)}")
    discovery = EndpointDiscovery(metrics)

    def serve_pools(pools: tuple[Pool, ...]) -> None:
        metrics.set_pools(pools)
        picker.set_pools(loop.time(), pools)
        discovery.publish(pools)

    def take_entries(entries: tuple[AccessLogEntry, ...]) -> None:
        for entry in entries:
            picker.access_log(loop.time(), entry)

    files = PoolFileWatcher(settings.pools)
    serve_pools(files.load())
    servers = GrpcServers(
        ExternalProcessor(picker, metrics, settings.limits),
        services=(discovery.handler(),),
        access_log=(AccessLogSink(take_entries, metrics).handler(),),
        limits=settings.limits,
    )
    status = StatusServer(router=settings.replica_id, statuses=picker.statuses, metrics=metrics)
    tasks: list[asyncio.Task[Any]] = []
    try:
        ready_line = await _listen(settings, servers, status)
        tasks += [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(files.run(serve_pools, lambda _: metrics.pools_refused())),
            asyncio.create_task(keep_deadlines(picker)),
        ]
        await servers.ready()
        click.echo(ready_line, err=True)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await servers.drain(settings.drain_timeout_s)
        # Only `stop` may end; a watcher that died must not go unnoticed, and a supervisor starts the router again.
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await servers.close()
        await status.close()


async def _listen(settings: Settings, servers: GrpcServers, status: StatusServer) -> str:
    """Bind every port; return the line that tells which. Raises AddressError and TlsError."""
    ports = await servers.start(
        settings.host,
        grpc_port=settings.grpc_port,
        health_port=settings.health_port,
        als_port=settings.als_port,
        credentials=server_credentials(settings.tls),
    )
    try:
        metrics_port = await status.start(settings.host, settings.metrics_port)
    except OSError as error:
        raise AddressError(address(settings.host, settings.metrics_port), error) from error
    bound = {"grpc": ports.grpc, "health": ports.health, "metrics": metrics_port, "als": ports.als}
    return "dualmap router ready " + " ".join(f"{name}={address(settings.host, port)}" for name, port in bound.items())
