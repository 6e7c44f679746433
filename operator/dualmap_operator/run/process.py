"""The operator process: serves the HTTP ports, acquires the lease, runs the control loops, stops and exits.

``wiring`` constructs the objects that this module runs.
"""

import asyncio
import os
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

import click

from dualmap_edge.kube.client import KubeConfigError
from dualmap_edge.ports import AddressError, address
from dualmap_operator.run.control import ControlError, ControlLoops
from dualmap_operator.run.health import HttpServer
from dualmap_operator.run.leader import Leadership, LeadershipLostError
from dualmap_operator.run.metrics import Metrics
from dualmap_operator.run.tasks import finished_before
from dualmap_operator.settings import Settings

_KOPF_EXIT_S: Final = 7.0
_CANCEL_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The components of one operator process; ``leadership`` is None without leader election."""

    server: HttpServer
    leadership: Leadership | None
    control: ControlLoops
    metrics: Metrics

    async def run(self, settings: Settings, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set.

        Raises AddressError for a port that cannot be bound, and ControlError if a mirror or kopf ends unexpectedly. If
        the lease is lost, the process exits at once.
        """
        try:
            health, metrics = await self.server.start(
                settings.host, health_port=settings.health_port, metrics_port=settings.metrics_port
            )
            click.echo(
                f"dualmap operator ready health={address(settings.host, health)} "
                f"metrics={address(settings.host, metrics)}",
                err=True,
            )
            if self.leadership is not None and not await finished_before(stop, self.leadership.acquire()):
                return
            self.metrics.leading(True)
            await self._lead(stop)
        finally:
            await self.server.close()
            if self.leadership is not None:
                await self.leadership.release()

    async def _lead(self, stop: asyncio.Event) -> None:
        """Run the control loops until ``stop`` is set; raise ControlError if a mirror or kopf ends unexpectedly."""
        tasks = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(self.control.run(lambda: stop_on_signals(stop))),
        ]
        if self.leadership is not None:
            tasks.append(asyncio.create_task(_renew_or_exit(self.leadership)))
        _, controlling, *renewing = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # At its end, kopf waits for every task that was started after kopf, such as open HTTP connections.
            await self.server.close()
            # The renewal of the lease continues until the last write is complete.
            self.control.stop()
            await asyncio.wait([controlling], timeout=_KOPF_EXIT_S)
            for task in (*renewing, controlling):
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_S)


def exit_status(operator: Coroutine[Any, Any, None]) -> int:
    """Run ``operator`` and return the exit status: 0, 1 for a failure, or 2 for an invalid kubeconfig."""
    try:
        asyncio.run(operator)
    except KubeConfigError as error:
        click.echo(f"dualmap operator: {error}", err=True)
        return 2
    except (AddressError, ControlError) as error:
        click.echo(f"dualmap operator: {error}", err=True)
        return 1
    return 0


def stop_on_signals(stop: asyncio.Event) -> None:
    """Make SIGTERM and SIGINT set ``stop``; kopf replaces these handlers with its own when it starts."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _renew_or_exit(leadership: Leadership) -> None:
    """Renew the lease; exit at once if it is lost, because another operator may lead soon.

    During a regular stop, kopf continues its writes for some seconds. An immediate exit loses no state: the next leader
    continues from the published status.
    """
    try:
        await leadership.renew()
    except LeadershipLostError as error:
        click.echo(f"dualmap operator: {error}", err=True)
        os._exit(1)
