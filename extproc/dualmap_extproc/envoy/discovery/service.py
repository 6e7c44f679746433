"""Serves discovery (xDS) to Envoys: the endpoints of each pool's cluster, and the clusters and routes of all pools.

``envoy.config`` makes the configuration of Envoys that use these services. ``app.adoption`` passes the same pools to
this service and to the picker, so that both use the same members. Envoy uses a pushed endpoint within milliseconds.

``subscriptions`` decides which resources each Envoy gets; this module connects ``subscriptions`` to grpc.aio. Each
stream has its own task, and an event wakes the task. Streams do not queue pushes. A slow Envoy therefore does not delay
other Envoys, and skips outdated pushes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import grpc

from dualmap.pools.pool import Pool
from dualmap_edge.logs import get_logger
from dualmap_extproc.envoy.discovery.endpoints import assignments_of
from dualmap_extproc.envoy.discovery.subscriptions import Conversation, Snapshot, SubscriptionError
from dualmap_extproc.names import (
    ADS_METHOD,
    ADS_SERVICE,
    CLUSTER_LOAD_ASSIGNMENT_TYPE,
    CLUSTER_TYPE,
    EDS_METHOD,
    EDS_SERVICE,
    LONGEST_WAIT_KEY,
    ROUTE_CONFIGURATION_TYPE,
    ROUTES,
)
from dualmap_extproc.wire import discovery_pb2

if TYPE_CHECKING:
    from dualmap_extproc.envoy.config.discovered import Written

_Context: TypeAlias = "grpc.aio.ServicerContext[discovery_pb2.DiscoveryRequest, discovery_pb2.DiscoveryResponse]"
_log = get_logger(__name__)


class DiscoveryObserver(Protocol):
    """The counters of streams and responses; ``telemetry.metrics`` implements this interface."""

    def discovery_streams(self, count: int) -> None:
        """Set the number of open streams."""

    def discovery_pushed(self) -> None:
        """Count a response that was sent."""

    def discovery_rejected(self) -> None:
        """Count a response that an Envoy rejected (NACK)."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One open stream: its subscriptions, and the event that wakes its sender.

    ``longest_wait_s`` is the longest time that this Envoy lets a router queue a request. The value is None if Envoy's
    configuration lists the pools.
    """

    conversation: Conversation
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    peer: str = ""
    longest_wait_s: float | None = None


class Discovery:
    """The discovery services. ``publish`` sends changed pools to all streams immediately.

    Before the first ``publish``, this router sends no answers. Envoy therefore keeps an earlier router's configuration
    until this router has its pools. The services send clusters and routes only while ``run`` runs.
    """

    def __init__(self, observer: DiscoveryObserver) -> None:
        self._observer = observer
        self._pools: tuple[Pool, ...] = ()
        self._snapshot: Snapshot | None = None
        self._streams: set[_Stream] = set()
        # Whether any Envoy requests clusters and routes, and the event that the snapshot's clusters and routes are
        # outdated.
        self._wanted = False
        self._stale = asyncio.Event()
        self._warned: set[tuple[str, float]] = set()

    def handlers(self) -> "tuple[grpc.GenericRpcHandler[Any, Any], ...]":
        """Return the services' handlers, for registration in grpc.aio."""

        async def endpoints(requests: AsyncIterator[discovery_pb2.DiscoveryRequest], context: _Context) -> None:
            await self._serve(Conversation(only=CLUSTER_LOAD_ASSIGNMENT_TYPE), requests, context)

        async def everything(requests: AsyncIterator[discovery_pb2.DiscoveryRequest], context: _Context) -> None:
            await self._serve(Conversation(), requests, context)

        served = ((EDS_SERVICE, EDS_METHOD, endpoints), (ADS_SERVICE, ADS_METHOD, everything))
        return tuple(
            grpc.method_handlers_generic_handler(
                service,
                {
                    method: grpc.stream_stream_rpc_method_handler(
                        serve,
                        request_deserializer=discovery_pb2.DiscoveryRequest.FromString,
                        response_serializer=discovery_pb2.DiscoveryResponse.SerializeToString,
                    )
                },
            )
            for service, method, serve in served
        )

    def publish(self, pools: Iterable[Pool]) -> None:
        """Serve these pools. Returns immediately, because each stream sends in its own task.

        Streams send changed members immediately. Streams send added and removed pools after ``run`` has made the
        clusters.
        """
        self._pools = tuple(pools)
        known = self._snapshot or Snapshot(assignments={})
        self._snapshot = Snapshot(assignments=assignments_of(self._pools), clusters=known.clusters, routes=known.routes)
        if self._wanted:
            self._stale.set()
        self._warned &= {(pool.id, pool.routing.queue.max_wait_s) for pool in self._pools}
        for stream in self._streams:
            self._warn_of_long_waits(stream)
        self._wake_streams()

    async def run(self) -> None:
        """Make clusters and routes after each change of the pools, until cancelled.

        The method does nothing until an Envoy requests clusters or routes. After this request, the method imports
        Envoy's types in a thread, because the import takes 24 MB and more than a second.
        """
        written: Written | None = None
        while True:
            await self._stale.wait()
            self._stale.clear()
            if written is None:
                written = await asyncio.to_thread(_written)
            if self._snapshot is None:
                continue
            names = tuple(sorted(self._snapshot.assignments))
            if self._snapshot.clusters is not None and tuple(self._snapshot.clusters) == names:
                continue
            clusters = written.clusters(names)
            # With several pools, only a router can find the pool of a request. With several pools, Envoy therefore
            # rejects a request without a pick.
            routes = await asyncio.to_thread(written.routes, names[0] if len(names) == 1 else None)
            self._snapshot = Snapshot(
                assignments=self._snapshot.assignments, clusters=clusters, routes={ROUTES: routes}
            )
            self._wake_streams()

    def _wake_streams(self) -> None:
        for stream in self._streams:
            stream.wake.set()

    async def _serve(
        self,
        conversation: Conversation,
        requests: AsyncIterator[discovery_pb2.DiscoveryRequest],
        context: _Context,
    ) -> None:
        """Serve one stream until the peer or the server ends it."""
        stream = _Stream(conversation)
        self._streams.add(stream)
        self._observer.discovery_streams(len(self._streams))
        reading = asyncio.create_task(self._read(stream, requests))
        try:
            while not reading.done():
                await stream.wake.wait()
                stream.wake.clear()
                while self._snapshot is not None and (response := conversation.respond(self._snapshot)) is not None:
                    await context.write(response)
                    self._observer.discovery_pushed()
            await reading
        except SubscriptionError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reading.cancel()
            self._streams.discard(stream)
            self._observer.discovery_streams(len(self._streams))

    async def _read(self, stream: _Stream, requests: AsyncIterator[discovery_pb2.DiscoveryRequest]) -> None:
        """Pass the peer's requests to its subscriptions; wake the sender after each request and at the stream's end."""
        try:
            async for request in requests:
                # Only Envoy's first message contains the node id.
                stream.peer = stream.peer or request.node.id[:200]
                rejection = stream.conversation.on_request(request)
                if rejection is not None:
                    self._observer.discovery_rejected()
                    _log.error(
                        "Envoy rejected discovery response",
                        envoy=stream.peer,
                        what=rejection.type_url.rpartition(".")[2],
                        accepted_version=rejection.version,
                        reason=rejection.reason,
                    )
                if LONGEST_WAIT_KEY in request.node.metadata.fields:
                    with contextlib.suppress(ValueError):
                        stream.longest_wait_s = float(request.node.metadata.fields[LONGEST_WAIT_KEY].string_value)
                    self._warn_of_long_waits(stream)
                if not self._wanted and stream.conversation.asks_for(CLUSTER_TYPE, ROUTE_CONFIGURATION_TYPE):
                    self._wanted = True
                    self._stale.set()
                stream.wake.set()
        finally:
            stream.wake.set()

    def _warn_of_long_waits(self, stream: _Stream) -> None:
        """Log each pool that may queue a request for a longer time than Envoy waits, once per pool and maxWait."""
        if stream.longest_wait_s is None:
            return
        for pool in self._pools:
            wait_s = pool.routing.queue.max_wait_s
            if wait_s > stream.longest_wait_s and (pool.id, wait_s) not in self._warned:
                self._warned.add((pool.id, wait_s))
                _log.warning(
                    "Pool may queue requests for longer than Envoy waits; "
                    "lower routing.queue.maxWait or raise --longest-wait of envoy-config",
                    pool=pool.id,
                    max_wait_s=wait_s,
                    longest_wait_s=stream.longest_wait_s,
                    envoy=stream.peer,
                )


def _written() -> "Written":
    from dualmap_extproc.envoy.config.discovered import Written  # A slow import (see ``run``).

    return Written()
