"""The composition root of ``dualmap operator``: everything is wired here and nowhere else.

``main`` parses the settings and calls ``run``; what is imported here takes more than a second, which its ``--help``
need not take.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import click
import kopf

from dualmap_edge.kube.client import KubeClient, KubeConfigError
from dualmap_edge.ports import AddressError, address
from dualmap_operator.act.apply import Applier
from dualmap_operator.act.events import Recorder
from dualmap_operator.api import Api
from dualmap_operator.decide.plan import plan, plan_refused
from dualmap_operator.errors import OperatorError
from dualmap_operator.observe.gather import Gatherer
from dualmap_operator.observe.mirror import Key, Mirror
from dualmap_operator.observe.routers import FixedRouters, ServiceRouters
from dualmap_operator.observe.status_clients import EngineClient, RouterClient
from dualmap_operator.observe.watches import Watches
from dualmap_operator.run.handlers import make_registry, make_settings
from dualmap_operator.run.health import HttpServer, problems
from dualmap_operator.run.leader import Leadership, LeadershipLostError
from dualmap_operator.run.metrics import Metrics
from dualmap_operator.run.reconciler import Keeper, Keepers, Planner, Tools
from dualmap_operator.settings import Settings

# Passes at a time: each may wait for routers, and for the API server, for seconds.
_PASSES: Final = 16
_KOPF_EXIT_S: Final = 7.0
_CANCEL_S: Final = 2.0
_NOT_FOUND: Final = 404


def run(settings: Settings) -> int:
    """Run the operator until it is stopped; return its exit status: 1 for a failure, 2 for a bad kubeconfig."""
    try:
        asyncio.run(serve(settings))
    except KubeConfigError as error:
        click.echo(f"dualmap operator: {error}", err=True)
        return 2
    except (AddressError, ControlError) as error:
        click.echo(f"dualmap operator: {error}", err=True)
        return 1
    return 0


class ControlError(OperatorError):
    """A part of the operator ended that must not; the message says which, and why. A supervisor starts it anew."""


async def serve(settings: Settings) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Raises KubeConfigError or AddressError for what keeps it from starting, ControlError for what ends it; the loss of
    the lease ends the process at once.
    """
    stop = asyncio.Event()
    _stop_signalled(stop)
    metrics = Metrics()
    client = await KubeClient.connect()
    clock = asyncio.get_running_loop().time
    leadership: Leadership | None = None
    api = Api(client, metrics, may_write=lambda: leadership is None or leadership.leading)
    if settings.leader_election:
        leadership = Leadership(
            api, settings.lease, namespace=settings.pod_namespace, identity=settings.identity, clock=clock
        )
    control = _Control(settings, client, api, metrics)
    server = HttpServer(problems=control.problems, metrics=metrics)
    try:
        health, metrics_port = await server.start(
            settings.host, health_port=settings.health_port, metrics_port=settings.metrics_port
        )
        click.echo(
            f"dualmap operator ready health={address(settings.host, health)} "
            f"metrics={address(settings.host, metrics_port)}",
            err=True,
        )
        if leadership is not None and not await _before(stop, leadership.acquire()):
            return
        metrics.leading(True)
        await _lead(stop, leadership, control, server)
    finally:
        await server.close()
        if leadership is not None:
            await leadership.release()
        await control.close()
        await client.close()


async def _lead(stop: asyncio.Event, leadership: Leadership | None, control: "_Control", server: HttpServer) -> None:
    """Act until told to stop, and end in order; raises ControlError for a part that ended by itself."""
    tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(control.run(lambda: _stop_signalled(stop)))]
    if leadership is not None:
        tasks.append(asyncio.create_task(_keep_or_end(leadership)))
    _, acting, *renewing = tasks
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # kopf, when it ends, waits for whatever has begun since it began: open connections for one.
        await server.close()
        # The lease is renewed until nothing is written any more.
        control.stop()
        await asyncio.wait([acting], timeout=_KOPF_EXIT_S)
        for task in (*renewing, acting):
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CANCEL_S)


async def _keep_or_end(leadership: Leadership) -> None:
    """Keep the lease; end the process when it is lost: another may act soon, and kopf's writes cannot be kept back.

    An end in order takes seconds, in which kopf finishes what it has begun. Nothing is lost by this one: whoever leads
    next goes on from what was written.
    """
    try:
        await leadership.keep()
    except LeadershipLostError as error:
        click.echo(f"dualmap operator: {error}", err=True)
        os._exit(1)


class _Control:
    """The control loops: mirrors, keepers and kopf. ``run`` once, when this operator leads."""

    def __init__(self, settings: Settings, client: KubeClient, api: Api, metrics: Metrics) -> None:
        loop = asyncio.get_running_loop()
        self._settings = settings
        self._client = client
        self._metrics = metrics
        self._clock = loop.time
        self._stopping = asyncio.Event()
        self._router_client = RouterClient()
        self._engine_client = EngineClient()
        self._keepers = Keepers(self._keeper)
        self._watches = Watches(
            client, metrics, namespace=settings.namespace, wake=self._keepers.wake, clock=self._clock
        )
        self._service = (
            None
            if settings.routers
            else ServiceRouters(
                client, metrics, namespace=settings.pod_namespace, name=settings.router_service, clock=self._clock
            )
        )
        self._routers = self._service or FixedRouters(settings.routers)
        self._api = api
        self._recorder = Recorder(api, identity=settings.identity, clock=self._clock)
        self._tools = Tools(
            pool=self._watches.pools.get,
            planner=Planner(plan=plan, refused=plan_refused),
            observer=metrics,
            turns=asyncio.Semaphore(_PASSES),
            clock=self._clock,
            now=time.time,
        )
        self._unkept_since_s: dict[Key, float] = {}
        self._running = False

    async def run(self, started: Callable[[], None]) -> None:
        """Look after pools until ``stop``; ``started`` is called when kopf has taken the signals for itself.

        Raises ControlError when a part ends by itself.
        """
        self._running = True
        self._metrics.watch(self._ages_s)
        # All of them before kopf begins: at its end it cancels every task that has begun since.
        tasks = [asyncio.create_task(mirror.run()) for mirror in self._mirrors]
        tasks.append(asyncio.create_task(self._act(started)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except Exception as error:
            raise ended(error) from error
        finally:
            self._running = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Have the keepers finish their passes, and ``run`` return."""
        self._keepers.closing.set()
        self._stopping.set()

    async def close(self) -> None:
        """Close what asks routers and engines."""
        await self._router_client.close()
        await self._engine_client.close()

    def problems(self) -> tuple[str, ...]:
        """Return what is wrong with this operator, in words; nothing while it stands by."""
        if not self._running:
            return ()
        now_s = self._clock()
        unkept = {key for key, _ in self._watches.pools.items() if not self._keepers.keeps(key)}
        self._unkept_since_s = {key: self._unkept_since_s.get(key, now_s) for key in unkept}
        return problems(
            ages_s=self._ages_s(),
            stuck=self._keepers.stuck(),
            unkept_s={"/".join(key): now_s - since_s for key, since_s in self._unkept_since_s.items()},
        )

    @property
    def _mirrors(self) -> tuple[Mirror[Any], ...]:
        return (*self._watches.mirrors, *(() if self._service is None else (self._service.mirror,)))

    def _ages_s(self) -> dict[str, float]:
        return {mirror.kind: mirror.age_s for mirror in self._mirrors}

    async def _act(self, started: Callable[[], None]) -> None:
        """Run kopf, and with it the keepers, once everything was listed: half of it would make pods look gone."""
        if not await _before(self._stopping, self._listed()):
            return
        ready = asyncio.Event()
        telling = asyncio.create_task(_after(ready, started))
        try:
            await kopf.operator(
                registry=make_registry(self._keepers, self._clock, connection=self._client.connection),
                settings=make_settings(),
                standalone=True,
                clusterwide=self._settings.namespace is None,
                namespaces=[] if self._settings.namespace is None else [self._settings.namespace],
                stop_flag=self._stopping,
                ready_flag=ready,
            )
        finally:
            telling.cancel()

    async def _listed(self) -> None:
        for mirror in self._mirrors:
            await mirror.listed.wait()

    def _keeper(self, key: Key, uid: str) -> Keeper:
        source = Gatherer(
            "/".join(key),
            watches=self._watches,
            routers=self._routers,
            router_client=self._router_client,
            engine_client=self._engine_client,
            clock=self._clock,
        )
        sink = Applier(self._api, self._recorder, live=self._watches.child, now=time.time)
        return Keeper(key, uid, source=source, sink=sink, tools=self._tools)


def ended(error: Exception) -> ControlError:
    """Return in words that a part of the operator ended by ``error``."""
    # kopf alone ends by what the API server answers, and pools are all that it lists and watches. Its errors have no
    # public name, but the HTTP status.
    if getattr(error, "status", None) == _NOT_FOUND:
        return ControlError(
            "InferencePools are not served any more; has their CRD been deleted? When it is started again, the "
            "operator waits for the CRD"
        )
    return ControlError(f"a part of the operator ended: {error!r}")


def _stop_signalled(stop: asyncio.Event) -> None:
    """Have SIGTERM and SIGINT set ``stop``; kopf puts its own handlers in their place when it begins."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do ``work`` unless told to stop before it is done; return whether it was done."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _after(event: asyncio.Event, then: Callable[[], None]) -> None:
    await event.wait()
    then()
