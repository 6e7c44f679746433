"""The composition root of ``dualmap router``: creates and connects all components.

``main`` imports this module after it has parsed the settings, and then calls ``run``. The imports of this module take
more than a second, and ``--help`` must be faster.
"""

import asyncio
import secrets
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, Final

import click

from dualmap.engines.profile import EngineProfile
from dualmap.engines.residency import KvChange
from dualmap.engines.source import SourceStatus
from dualmap.ownership.messages import Message
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap_edge.kube.client import KubeClient, KubeConfigError
from dualmap_edge.logs import get_logger
from dualmap_edge.ports import AddressError, address, check_free
from dualmap_extproc.app.adoption import Adoption
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.autoscaling.pool_demand import PoolDemand
from dualmap_extproc.autoscaling.scaler import Scaler
from dualmap_extproc.engines.kv_events import KvEvents
from dualmap_extproc.engines.metrics import KvEventMetrics
from dualmap_extproc.engines.profiles import EngineProfiles
from dualmap_extproc.envoy.access_log.sink import AccessLogSink
from dualmap_extproc.envoy.discovery.service import Discovery
from dualmap_extproc.peers.addresses import NamedAddresses
from dualmap_extproc.peers.peers import Peers
from dualmap_extproc.pools.file import PoolFileError, PoolFileWatcher
from dualmap_extproc.pools.kube import KubePools
from dualmap_extproc.pools.metrics import KubeMetrics
from dualmap_extproc.reading.processes import ReadingProcesses
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.ids import KEY_BYTES
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import RedisSettings, Settings, TracingError
from dualmap_extproc.store.announcement import Announcement
from dualmap_extproc.store.exchange import SHORTEST_HISTORY_S, Exchange, history_s
from dualmap_extproc.store.metrics import StoreMetrics
from dualmap_extproc.store.peers_store import PeersStore, Unobserved
from dualmap_extproc.store.target import target_of
from dualmap_extproc.telemetry.dashboard.histories import Histories
from dualmap_extproc.telemetry.dashboard.routes import Dashboard
from dualmap_extproc.telemetry.dashboard.snapshot import SnapshotInputs
from dualmap_extproc.telemetry.dashboard.verdict import Reach
from dualmap_extproc.telemetry.http_status import StatusServer
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_extproc.tokens.rendering import TokenizerError
from dualmap_extproc.tokens.sources import PoolTokenizers
from dualmap_extproc.transport.deadlines import keep_deadlines
from dualmap_extproc.transport.processor import ExternalProcessor
from dualmap_extproc.transport.server import GrpcServers
from dualmap_extproc.transport.tls import TlsError, peer_security, server_certificates

# The interval in which a router checks whether it knows enough of the past to own pools.
_WARM_CHECK_S: Final = 0.2
_log = get_logger(__name__)


def run(settings: Settings) -> int:
    """Run the router until a signal stops it; return the exit status.

    The status is 0 after a signal, 1 for a port that cannot be bound, and 2 for invalid settings or pools.
    """
    try:
        asyncio.run(serve(settings))
    except (KubeConfigError, PoolFileError, TlsError, TokenizerError, TracingError) as error:
        click.echo(f"dualmap router: {error}", err=True)
        return 2
    except AddressError as error:
        click.echo(f"dualmap router: {error}", err=True)
        return 1
    return 0


async def serve(settings: Settings) -> None:
    """Run the router until SIGTERM or SIGINT, then drain it.

    Raises KubeConfigError, PoolFileError, TlsError, TokenizerError, TracingError or AddressError if it cannot start.
    """
    loop = asyncio.get_running_loop()
    stop = _stop_signalled(loop)
    observations = FanOut()
    demand, metrics = Demand(), Metrics(version=version("dualmap"), replica_id=settings.replica_id)
    histories = Histories() if settings.dashboard else None
    for subscriber in (metrics, demand, histories):
        if subscriber is not None:
            subscriber.subscribe(observations)
    # Access log entries contain request ids of all replicas and of earlier processes. The random suffix makes the ids
    # of this process unique. ``request.ids`` makes the ids unguessable.
    incarnation = f"{settings.replica_id}-{secrets.token_hex(4)}"
    trace_headers, close_tracing = _tracing(settings, observations)
    meshed = bool(settings.peers) or settings.redis is not None

    def send(pool: str, peer: str, message: Message) -> None:
        if peers is not None:
            peers.send(pool, peer, message)

    def share(payload: bytes) -> None:
        if peers is not None:
            peers.share(payload)

    picker = Picker(
        settings.limits,
        observations.report,
        id_prefix=incarnation,
        hash_key=settings.hash_key,
        id_key=secrets.token_bytes(KEY_BYTES),
        trace_headers=trace_headers,
        replicated=meshed,
        log_prompts=settings.log_prompts,
        client_key=_client_key(settings.hash_key),
        send=send if meshed else None,
    )
    pool_demand = PoolDemand(demand, picker.demands, picker.pool, replicated=meshed)
    scaler = Scaler(pool_demand)
    discovery = Discovery(metrics)
    addresses = _RouterAddresses(settings, incarnation)
    peers: Peers | None = None
    exchange: Exchange | None = None
    if meshed:
        peers_store = PeersStore(share, lambda pool: picker.pool(pool) is not None, loop.time)
        peers = Peers(
            picker,
            name=incarnation,
            hash_key=settings.hash_key,
            find=addresses.find,
            security=peer_security(settings.tls, settings.tls_client_ca),
            on_shared=peers_store.on_shared,
        )
        metrics.show_peers(lambda: 0 if peers is None else len(peers.names))
        exchange = _exchange(settings.redis, peers_store, picker, pool_demand, metrics, incarnation)

    def take_profile(pool: str, member: str, profile: EngineProfile) -> None:
        picker.on_profile(loop.time(), pool, member, profile)
        kv_events.on_profile(pool, member, profile)

    def take_kv_events(pool: str, member: str, rank: int, changes: Sequence[KvChange], status: SourceStatus) -> None:
        picker.on_kv_events(pool, member, rank, changes, status)

    engines, kv_events = EngineProfiles(take_profile), KvEvents(take_kv_events, KvEventMetrics(metrics.registry))
    tokenizers = PoolTokenizers(observations.report)
    adoption = Adoption(metrics, demand, discovery, engines, tokenizers, kv_events, picker)

    def take_entries(entries: tuple[AccessLogEntry, ...]) -> None:
        for entry in entries:
            picker.access_log(loop.time(), entry)

    source = await _pool_source(settings, metrics, adoption, tokenizers)
    reading = ReadingProcesses()
    processor = ExternalProcessor(picker, observations.report, settings.limits, reading, tokenizers)
    metrics.show_buffered(lambda: processor.buffered_bytes)
    access_log = AccessLogSink(
        take_entries,
        metrics,
        ids=picker.ids,
        connections=peers,
        on_orphan=lambda entry: picker.on_orphan(loop.time(), entry),
    )
    servers = GrpcServers(
        processor,
        services=(*discovery.handlers(), scaler.handler(), *(() if peers is None else (peers.handler(),))),
        plain=(scaler.handler(),),
        access_log=(access_log.handler(),),
        limits=settings.limits,
        transport=settings.transport,
    )
    status = StatusServer(
        router=settings.replica_id,
        statuses=picker.statuses,
        signals=lambda _: demand.signals(picker.demands()),
        metrics=metrics,
        tokenizer=lambda pool: tokenizers.status(pool, picker.distrusted(pool)),
        dashboard=None
        if histories is None
        else _dashboard(settings.replica_id, picker, pool_demand, histories, _reach(exchange, source.ages_s)),
    )
    tasks: list[asyncio.Task[Any]] = []
    try:
        ready_line, grpc_port = await _listen(settings, servers, status)
        tasks += [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(source.run()),
            asyncio.create_task(discovery.run()),
            asyncio.create_task(keep_deadlines(picker)),
            asyncio.create_task(reading.run()),
            asyncio.create_task(tokenizers.run()),
            asyncio.create_task(kv_events.run()),
        ]
        if exchange is not None:
            tasks.append(asyncio.create_task(exchange.run()))
        if peers is not None:
            addresses.listen(grpc_port)
            tasks.append(asyncio.create_task(_run_peers(peers, picker, None if settings.redis is None else exchange)))
        done = await _first_ended(tasks, before=source.known())
        if not done:
            await servers.ready()
            click.echo(ready_line, err=True)
            _warn_of_public_key(settings)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        scaler.end_streams()
        if peers is not None:
            peers.leave()
        await servers.drain(settings.drain_timeout_s, end_access_log=access_log.end_streams)
        # Only the task of `stop` may end without an error. The error of another task ends the router, and its
        # supervisor restarts it.
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if exchange is not None:
            await exchange.leave()
        if peers is not None:
            await peers.close()
        await addresses.close()
        await servers.close()
        await status.close()
        await source.close()
        await engines.close()
        await tokenizers.close()
        kv_events.close()
        await asyncio.to_thread(close_tracing)


def _client_key(hash_key: bytes) -> bytes:
    """Return the key of the hashes of clients' names: the same for all routers with the same secret hash key."""
    if hash_key == PUBLIC_KEY:
        return secrets.token_bytes(32)
    return blake2b(key=hash_key, person=b"dualmap clients", digest_size=32).digest()


async def _run_peers(peers: Peers, picker: Picker, history: Exchange | None) -> None:
    """Connect to the other routers, and announce when this router knows enough of the past to own pools.

    ``history`` reads the past from Redis. Without it, this router knows what happened since its start.
    """
    async with asyncio.TaskGroup() as group:
        group.create_task(peers.run())
        clock = asyncio.get_running_loop().time
        began_s, warm = clock(), False
        while not warm:
            await asyncio.sleep(_WARM_CHECK_S)
            if history is not None:
                warm = history.has_read_history
            else:
                longest_s = max((history_s(pool) for pool in picker.pools), default=SHORTEST_HISTORY_S)
                warm = clock() - began_s >= longest_s
        peers.warm()


class _RouterAddresses:
    """Finds the addresses of the other routers: those of ``--peer``, else those that routers announce in Redis.

    ``name`` is this router's name among the routers.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._named = NamedAddresses(settings.peers)
        self._announcement: Announcement | None = None
        self._close: Callable[[], Coroutine[Any, Any, object]] = _at_once

    def listen(self, grpc_port: int) -> None:
        """Begin to announce this router, which listens on ``grpc_port``, if routers find each other in Redis."""
        if self._settings.peers or self._settings.redis is None:
            return
        from dualmap_extproc.store.redis import RedisStore  # This import takes 0.4 s.

        target = target_of(self._settings.redis)
        # The exchange has a client of its own, because a failed call closes all connections of its client.
        store = RedisStore(target)
        self._close = store.close
        host = self._settings.host
        self._announcement = Announcement(store, name=self._name, host=host, port=grpc_port, target=target)

    async def find(self) -> Collection[tuple[str, int]]:
        """Return the addresses of the routers, this one possibly among them."""
        return await (self._named if self._announcement is None else self._announcement).find()

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._close()


def _warn_of_public_key(settings: Settings) -> None:
    """Log a warning if clients can compute the hashes of prompts."""
    if settings.hash_key == PUBLIC_KEY:
        _log.warning(
            "The hash key is public, so a client can craft prompts that match another tenant's; "
            "give all routers the same secret with --hash-key-file"
        )


def _tracing(settings: Settings, observations: FanOut) -> tuple[frozenset[str], Callable[[], None]]:
    """Set up tracing if it is enabled; return the headers that spans need and a function that exports pending spans."""
    if settings.otlp_endpoint is None:
        return frozenset(), lambda: None
    # The import is here because OpenTelemetry is an optional dependency and takes time to import.
    try:
        from dualmap_extproc.telemetry.tracing import TRACE_HEADERS, tracing_to
    except ValueError as error:
        # OpenTelemetry reads some of its settings during its import.
        raise TracingError(f"invalid OTEL_* environment variables: {error}") from error

    tracing = tracing_to(settings.otlp_endpoint, replica_id=settings.replica_id, version=version("dualmap"))
    tracing.subscribe(observations)
    return TRACE_HEADERS, tracing.close


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolSource:
    """A source of pools. ``run`` adopts every change; ``known`` waits until the first pools are adopted.

    ``ages_s`` returns, for each resource that the source watches, the time since the last answer of its server.
    """

    run: Callable[[], Coroutine[Any, Any, None]]
    known: Callable[[], Coroutine[Any, Any, object]]
    close: Callable[[], Coroutine[Any, Any, object]]
    ages_s: Callable[[], Mapping[str, float]]


async def _pool_source(
    settings: Settings, metrics: Metrics, adoption: Adoption, tokenizers: PoolTokenizers
) -> _PoolSource:
    """Return the source of pools; adopt pools of files immediately.

    Raises PoolFileError, KubeConfigError, and TokenizerError for the tokenizer of a pool in a file.
    """
    if settings.kube is not None:
        client = await KubeClient.connect()
        observer = KubeMetrics(metrics.registry, metrics.pools_refused)
        # Within one namespace, no other namespace can take a model name.
        reservations_in = settings.kube.pod_namespace if settings.kube.namespace is None else None
        pools = KubePools(client, settings.kube.namespace, observer, reservations_in=reservations_in)
        observer.show_ages(pools.ages_s)
        return _PoolSource(
            run=lambda: pools.run(adoption.adopt), known=pools.listed, close=client.close, ages_s=pools.ages_s
        )
    files = PoolFileWatcher(settings.pools)
    loaded = files.load()
    tokenizers.start(loaded)
    adoption.adopt(loaded)
    return _PoolSource(
        run=lambda: files.run(adoption.adopt, lambda _: metrics.pools_refused(), metrics.pool_file_refused),
        known=_at_once,
        close=_at_once,
        ages_s=dict,
    )


async def _at_once() -> None:
    """Do nothing: pools of files are already read when this function runs, and need no closing."""


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


def _stop_signalled(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _dashboard(
    router: str, picker: Picker, pool_demand: PoolDemand, histories: Histories, reach: Callable[[], Reach]
) -> Dashboard:
    """Return the router's dashboard."""
    inputs = SnapshotInputs(
        router=router,
        version=version("dualmap"),
        pools=lambda: picker.pools,
        statuses=picker.statuses,
        demand=pool_demand.total,
        histories=histories,
        clock=time.time,
        reach=reach,
    )
    return Dashboard(inputs)


def _reach(exchange: Exchange | None, ages_s: Callable[[], Mapping[str, float]]) -> Callable[[], Reach]:
    """Return a function that returns the time since the last answers of the store and of the pools' source."""
    return lambda: Reach(store_lost_s=None if exchange is None else exchange.lost_for_s, watch_ages_s=ages_s())


def _exchange(
    redis: RedisSettings | None,
    peers_store: PeersStore,
    picker: Picker,
    pool_demand: PoolDemand,
    metrics: Metrics,
    peer: str,
) -> Exchange:
    """Return the exchange of replication updates with the other routers; they identify this router by ``peer``.

    Without Redis, the routers send the updates to each other.
    """
    clock = asyncio.get_running_loop().time
    if redis is None:
        shown = "the other routers"
        return Exchange(picker, peers_store, Unobserved(), reporter=pool_demand, peer=peer, clock=clock, shown=shown)
    from dualmap_extproc.store.redis import RedisStore  # This import takes 0.4 s.

    target = target_of(redis)
    observer = StoreMetrics(metrics.registry)
    return Exchange(
        picker, RedisStore(target), observer, reporter=pool_demand, peer=peer, clock=clock, shown=target.shown
    )


async def _listen(settings: Settings, servers: GrpcServers, status: StatusServer) -> tuple[str, int]:
    """Bind every port; return the line that lists them, and the gRPC port. Raises AddressError and TlsError."""
    wanted = {
        "--grpc-port": settings.grpc_port,
        "--health-port": settings.health_port,
        "--metrics-port": settings.metrics_port,
        "--als-port": settings.als_port,
    }
    for option, port in wanted.items():
        check_free(settings.host, port, option)
    ports = await servers.start(
        settings.host,
        grpc_port=settings.grpc_port,
        health_port=settings.health_port,
        als_port=settings.als_port,
        certificates=server_certificates(settings.tls, settings.tls_client_ca),
    )
    try:
        metrics_port = await status.start(settings.host, settings.metrics_port)
    except OSError as error:
        raise AddressError(settings.host, settings.metrics_port, "--metrics-port", error) from error
    bound = {"grpc": ports.grpc, "health": ports.health, "metrics": metrics_port, "als": ports.als}
    shown = " ".join(f"{name}={address(settings.host, port)}" for name, port in bound.items())
    return f"dualmap router ready {shown}", ports.grpc
