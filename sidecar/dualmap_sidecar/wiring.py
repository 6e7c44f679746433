"""The composition root of ``dualmap pd-proxy``: creates and connects all components, and runs until a signal."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Protocol

import click

from dualmap_edge.kube.client import KubeClient, KubeConfigError
from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_edge.ports import AddressError, address, check_free
from dualmap_extproc.pools.file import PoolFileError
from dualmap_sidecar.continuing import Continuer
from dualmap_sidecar.messages import open_session
from dualmap_sidecar.metrics import SidecarMetrics
from dualmap_sidecar.pools import FileMembers, KubeMembers, NoMembers
from dualmap_sidecar.prefill import Prefillers
from dualmap_sidecar.proxy import Proxy
from dualmap_sidecar.server import Server, status_server
from dualmap_sidecar.settings import Settings
from dualmap_sidecar.targets import Allowed, read_allowed

_log = get_logger(__name__)


class _Members(Protocol):
    async def run(self) -> None: ...

    async def close(self) -> None: ...


def run(settings: Settings) -> int:
    """Run the proxy until a signal stops it; return the exit status: 0, 1 for a port in use, 2 for invalid pools."""
    try:
        asyncio.run(_serve(settings))
    except (KubeConfigError, PoolFileError) as error:
        click.echo(f"dualmap pd-proxy: {error}", err=True)
        return 2
    except AddressError as error:
        click.echo(f"dualmap pd-proxy: {error}", err=True)
        return 1
    return 0


async def _serve(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    metrics, allowed, limits = SidecarMetrics(), read_allowed(settings.allow), settings.limits
    members = await _members(settings, allowed)
    session = open_session(limits)
    proxy = Proxy(
        settings.engine,
        session,
        Prefillers(session, settings, metrics, loop.time),
        allowed=allowed,
        metrics=metrics,
        limits=limits,
        continuer=Continuer(session, settings, metrics),
        continue_tokens=settings.continue_tokens,
        left_out=OncePerMinute(_log, "Left out members that are not allowed", loop.time),
    )
    server = Server(proxy.handle, limits, connections=limits.connections, changed=metrics.show_in_flight)
    status = status_server(metrics, limits)
    watching = asyncio.create_task(members.run())
    try:
        port = await _start(server, settings.host, settings.port, "--listen")
        metrics_port = await _start(status, settings.host, settings.metrics_port, "--metrics-port")
        shown = f"http={address(settings.host, port)} metrics={address(settings.host, metrics_port)}"
        click.echo(f"dualmap pd-proxy ready {shown}", err=True)
        await _first_of(signals.get(), watching)
        _log.info("Draining", timeout_s=limits.drain_s)
        await _first_of(signals.get(), asyncio.create_task(server.drain(limits.drain_s)))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await server.close()
        await status.close()
        await session.close()
        await members.close()


async def _members(settings: Settings, allowed: Allowed) -> _Members:
    if settings.namespace is not None:
        return KubeMembers(await KubeClient.connect(), settings.namespace, allowed)
    return FileMembers(settings.pools, allowed) if settings.pools else NoMembers()


async def _start(server: Server, host: str, port: int, option: str) -> int:
    check_free(host, port, option)
    return await server.start(host, port)


async def _first_of(signalled: Coroutine[Any, Any, signal.Signals], task: "asyncio.Task[None]") -> None:
    """Wait for a signal or for the end of a task, whose error is raised."""
    waiting = asyncio.create_task(signalled)
    try:
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if task.done():
        task.result()
