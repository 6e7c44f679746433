"""The composition root of the commands that route requests: creates and connects all components.

``main`` imports this module after it has parsed the settings, and then calls ``run``. The imports of this module take
more than a second, and ``--help`` must be faster.
"""

import asyncio
import gc
import secrets
import signal
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import click

from dualmap_edge.kube.client import KubeConfigError
from dualmap_edge.ports import AddressError
from dualmap_extproc.app.adoption import Adoption
from dualmap_extproc.app.hash_key import client_key
from dualmap_extproc.app.listening import Listening
from dualmap_extproc.app.observers import Observers, dashboard_of, engine_reports, observers_of
from dualmap_extproc.app.other_routers import OtherRouters
from dualmap_extproc.app.pool_source import OpenPools, PoolSource, PoolUser, pools_of
from dualmap_extproc.app.program import ROUTER, Program
from dualmap_extproc.autoscaling.pool_demand import PoolDemand
from dualmap_extproc.autoscaling.scaler import Scaler
from dualmap_extproc.envoy.access_log.sink import AccessLogSink
from dualmap_extproc.envoy.discovery.service import Discovery
from dualmap_extproc.kv_stores.metrics import KvStoreMetrics
from dualmap_extproc.kv_stores.stores import KvStores
from dualmap_extproc.pools.file import PoolFileError
from dualmap_extproc.reading.processes import ReadingProcesses
from dualmap_extproc.recording.folder import RecordingError
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.ids import KEY_BYTES
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Settings, TracingError
from dualmap_extproc.telemetry.http_status import StatusServer
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_extproc.telemetry.transport import TransportMetrics
from dualmap_extproc.tokens.rendering import TokenizerError
from dualmap_extproc.tokens.sources import PoolTokenizers
from dualmap_extproc.transport.deadlines import keep_deadlines
from dualmap_extproc.transport.processor import ExternalProcessor
from dualmap_extproc.transport.tls import TlsError


def run(settings: Settings, *, program: Program = ROUTER, pools: OpenPools | None = None) -> int:
    """Run the router until a signal stops it; return the exit status.

    ``program`` is what messages call the command. ``pools`` opens the source of pools (None: that of the settings). The
    status is 0 after a signal, 1 for a port that cannot be bound, and 2 for invalid settings or pools.
    """
    # The collector leaves out what the imports have created, which stays to the end: 72,000 objects. Each full
    # collection of them would stop the event loop for tens of milliseconds.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(serve(settings, program=program, pools=pools))
    except (KubeConfigError, PoolFileError, RecordingError, TlsError, TokenizerError, TracingError) as error:
        click.echo(f"{program.name}: {error}", err=True)
        return 2
    except AddressError as error:
        click.echo(f"{program.name}: {error}", err=True)
        return 1
    return 0


async def serve(settings: Settings, *, program: Program = ROUTER, pools: OpenPools | None = None) -> None:
    """Run the router until SIGTERM or SIGINT, then drain it. The arguments are those of ``run``.

    Raises KubeConfigError, PoolFileError, RecordingError, TlsError, TokenizerError, TracingError or AddressError if it
    cannot start.
    """
    stop = _stop_signalled()
    observers = observers_of(settings)
    metrics, demand, report = observers.metrics, observers.demand, observers.observations.report
    # Access log entries contain request ids of all replicas and of earlier processes. The random suffix makes the ids
    # of this process unique. ``request.ids`` makes the ids unguessable.
    incarnation = f"{settings.replica_id}-{secrets.token_hex(4)}"
    others = OtherRouters(settings, incarnation)
    picker = _picker(settings, observers, others, incarnation)
    pool_demand = PoolDemand(demand, picker.demands, picker.pool, replicated=others.exist)
    scaler = Scaler(pool_demand)
    discovery = Discovery(metrics)
    others.connect(picker, pool_demand, metrics)
    engines, kv_events = engine_reports(picker, metrics)
    tokenizers = PoolTokenizers(report)
    kv_stores = KvStores(tokenizers, KvStoreMetrics(metrics.registry), trusts=picker.trusts, pool_of=picker.pool)
    adoption = Adoption(metrics, demand, discovery, engines, tokenizers, kv_stores, kv_events, picker)
    open_pools = pools_of(settings) if pools is None else pools
    source = await open_pools(PoolUser(adopt=adoption.adopt, metrics=metrics, tokenizers=tokenizers))
    reading = ReadingProcesses()
    processor = ExternalProcessor(picker, report, settings.limits, reading, kv_stores)
    metrics.show_buffered(lambda: processor.buffered_bytes)
    transport_metrics = TransportMetrics(metrics.registry)
    listening = Listening(
        settings,
        program,
        processor=processor,
        discovery=discovery,
        scaler=scaler,
        access_log=_access_log(picker, metrics, others),
        others=others,
        status=_status(settings, observers, picker, pool_demand, others, source, tokenizers, kv_stores),
        metrics=transport_metrics,
    )
    try:
        grpc_port = await listening.start()
        runs = (
            stop.wait(),
            source.run(),
            keep_deadlines(picker),
            reading.run(),
            tokenizers.run(),
            kv_events.run(),
            transport_metrics.run(),
            *(() if observers.recorder is None else (observers.recorder.run(),)),
            *others.runs(picker, grpc_port),
        )
        await _serve_until_one_ends(runs, listening, before=_all(source.known(), others.tried()))
    finally:
        await others.close()
        await listening.close()
        await source.close()
        await engines.close()
        await kv_stores.close()
        await tokenizers.close()
        kv_events.close()
        if observers.recorder is not None:
            await observers.recorder.close()
        await asyncio.to_thread(observers.close_tracing)


def _picker(settings: Settings, observers: Observers, others: OtherRouters, incarnation: str) -> Picker:
    return Picker(
        settings.limits,
        observers.observations.report,
        id_prefix=incarnation,
        hash_key=settings.hash_key,
        id_key=secrets.token_bytes(KEY_BYTES),
        observed_headers=observers.headers,
        replicated=others.exist,
        log_prompts=settings.log_prompts,
        client_key=client_key(settings.hash_key),
        send=others.send if others.exist else None,
        gateway=settings.gateway,
        epoch_s=time.time() - asyncio.get_running_loop().time(),
    )


def _access_log(picker: Picker, metrics: Metrics, others: OtherRouters) -> AccessLogSink:
    clock = asyncio.get_running_loop().time

    def take_entries(entries: tuple[AccessLogEntry, ...]) -> None:
        for entry in entries:
            picker.access_log(clock(), entry)

    return AccessLogSink(
        take_entries,
        metrics,
        ids=picker.ids,
        connections=others.peers,
        on_orphan=lambda entry: picker.on_orphan(clock(), entry),
    )


def _status(
    settings: Settings,
    observers: Observers,
    picker: Picker,
    pool_demand: PoolDemand,
    others: OtherRouters,
    source: PoolSource,
    tokenizers: PoolTokenizers,
    kv_stores: KvStores,
) -> StatusServer:
    dashboard = None
    if observers.histories is not None:
        dashboard = dashboard_of(
            settings.replica_id,
            picker,
            pool_demand,
            observers.histories,
            store_lost_s=others.store_lost_s,
            watch_ages_s=source.ages_s,
            kv_store_lost=kv_stores.is_left_alone,
        )
    return StatusServer(
        router=settings.replica_id,
        statuses=picker.statuses,
        signals=lambda _: observers.demand.signals(picker.demands()),
        metrics=observers.metrics,
        tokenizer=lambda pool: tokenizers.status(pool, picker.distrusted(pool)),
        kv_store=kv_stores.status,
        dashboard=dashboard,
    )


async def _serve_until_one_ends(
    runs: Iterable[Coroutine[Any, Any, object]], listening: Listening, *, before: Coroutine[Any, Any, object]
) -> None:
    """Run all of ``runs`` until one of them ends, then drain. The router is ready when ``before`` has ended.

    Only the run that waits for a signal ends without an error. The error of another run is raised: it ends the router,
    and its supervisor restarts it.
    """
    tasks = [asyncio.create_task(each) for each in runs]
    try:
        done = await _first_ended(tasks, before=before)
        if not done:
            await listening.ready()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await listening.drain()
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all(*awaited: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*awaited)


async def _first_ended(
    tasks: Sequence[asyncio.Task[Any]], *, before: Coroutine[Any, Any, object]
) -> set[asyncio.Task[Any]]:
    """Return the tasks that end before the coroutine ``before`` ends, or an empty set if ``before`` ends first."""
    awaited = asyncio.create_task(before)
    try:
        done, _ = await asyncio.wait([awaited, *tasks], return_when=asyncio.FIRST_COMPLETED)
        return set() if awaited in done else done
    finally:
        awaited.cancel()


def _stop_signalled() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
