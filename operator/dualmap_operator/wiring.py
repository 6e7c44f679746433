"""The composition root of ``dualmap operator``: only this module constructs the operator's components.

``main`` parses the settings and calls ``run``. ``main`` imports this module late, because its imports take more than a
second and would delay ``--help``.
"""

import asyncio
import time
from datetime import UTC, datetime
from typing import Final

from dualmap_edge.kube.client import KubeClient
from dualmap_operator.act.apply import Applier
from dualmap_operator.act.events import EventRecorder
from dualmap_operator.act.reservations import ReservationWriter
from dualmap_operator.api import Api
from dualmap_operator.decide.plan import plan, plan_refused
from dualmap_operator.observe.gather import Gatherer
from dualmap_operator.observe.mirror import Key
from dualmap_operator.observe.routers import FixedRouters, ServiceRouters
from dualmap_operator.observe.status_clients import EngineClient, RouterClient
from dualmap_operator.observe.watches import Watches
from dualmap_operator.run.control import ControlLoops
from dualmap_operator.run.generated_secrets import GeneratedSecrets
from dualmap_operator.run.health import HttpServer
from dualmap_operator.run.leader import Leadership
from dualmap_operator.run.metrics import Metrics
from dualmap_operator.run.process import Process, exit_status, stop_on_signals
from dualmap_operator.run.reconciler import Planner, Reconciler, ReconcilerContext, Reconcilers
from dualmap_operator.settings import Settings

# The number of concurrent reconciles: each reconcile may wait seconds for routers and the API server.
_RECONCILES: Final = 16


def run(settings: Settings) -> int:
    """Run the operator until it is stopped; return its exit status."""
    return exit_status(serve(settings))


async def serve(settings: Settings) -> None:
    """Run the operator until SIGTERM or SIGINT. Raises KubeConfigError and the exceptions of ``Process.run``."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    client = await KubeClient.connect()
    router_client, engine_client = RouterClient(), EngineClient()
    try:
        await _process(settings, client, router_client, engine_client).run(settings, stop)
    finally:
        await router_client.close()
        await engine_client.close()
        await client.close()


def _process(
    settings: Settings, client: KubeClient, router_client: RouterClient, engine_client: EngineClient
) -> Process:
    clock, metrics = asyncio.get_running_loop().time, Metrics()
    leadership: Leadership | None = None
    api = Api(client, metrics, may_write=lambda: leadership is None or leadership.leading)
    if settings.leader_election:
        leadership = Leadership(
            api, settings.lease, namespace=settings.pod_namespace, identity=settings.identity, clock=clock
        )
    reservations = ReservationWriter(api, namespace=settings.pod_namespace)
    recorder = EventRecorder(api, identity=settings.identity, clock=clock)

    def make_reconciler(key: Key, uid: str) -> Reconciler:
        observer = Gatherer(
            "/".join(key),
            watches=watches,
            routers=routers,
            router_client=router_client,
            engine_client=engine_client,
            clock=clock,
        )
        applier = Applier(api, recorder, reservations=reservations, live=watches.child, now=time.time)
        return Reconciler(key, uid, observer=observer, applier=applier, context=context)

    reconcilers = Reconcilers(make_reconciler)
    watches = Watches(
        client,
        metrics,
        namespace=settings.namespace,
        # Within one namespace, no other namespace can take a model name.
        reservations_in=settings.pod_namespace if settings.namespace is None else None,
        wake=reconcilers.wake,
        clock=clock,
    )
    service = (
        None
        if settings.routers
        else ServiceRouters(
            client, metrics, namespace=settings.pod_namespace, name=settings.router_service, clock=clock
        )
    )
    routers = service or FixedRouters(settings.routers)
    context = ReconcilerContext(
        pool=watches.pools.get,
        planner=Planner(plan=plan, refused=plan_refused),
        metrics=metrics,
        slots=asyncio.Semaphore(_RECONCILES),
        clock=clock,
        now=time.time,
    )
    control = ControlLoops(
        watches=watches,
        mirrors=(*watches.mirrors, *(() if service is None else (service.mirror,))),
        reconcilers=reconcilers,
        connection=client.connection,
        namespace=settings.namespace,
        metrics=metrics,
        clock=clock,
    )
    generated = GeneratedSecrets(
        api,
        settings.generated,
        namespace=settings.pod_namespace,
        server=settings.router_service,
        now=lambda: datetime.now(UTC),
    )
    return Process(
        server=HttpServer(problems=control.problems, metrics=metrics),
        leadership=leadership,
        control=control,
        metrics=metrics,
        secrets=generated if settings.generated else None,
    )
