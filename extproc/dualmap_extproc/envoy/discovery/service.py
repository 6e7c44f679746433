"""Serves discovery (xDS) to Envoys: the endpoints of each pool's cluster, and the clusters of all pools.

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
from typing import Any, Protocol, TypeAlias

import grpc

from dualmap.pools.pool import Pool
from dualmap_edge.logs import get_logger
from dualmap_extproc.envoy.discovery.clusters import clusters_of
from dualmap_extproc.envoy.discovery.endpoints import assignments_of
from dualmap_extproc.envoy.discovery.subscriptions import Conversation, Snapshot, SubscriptionError
from dualmap_extproc.names import (
    ADS_METHOD,
    ADS_SERVICE,
    CLUSTER_LOAD_ASSIGNMENT_TYPE,
    EDS_METHOD,
    EDS_SERVICE,
    LONGEST_WAIT_KEY,
    cluster_name,
)
from dualmap_extproc.wire import discovery_pb2

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
    until this router has its pools.
    """

    def __init__(self, observer: DiscoveryObserver) -> None:
        self._observer = observer
        self._pools: tuple[Pool, ...] = ()
        self._snapshot: Snapshot | None = None
        self._streams: set[_Stream] = set()
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
        """Serve these pools. Returns immediately, because each stream sends in its own task."""
        self._pools = tuple(pools)
        names = sorted(cluster_name(pool.namespace, pool.name) for pool in self._pools)
        self._snapshot = Snapshot(assignments=assignments_of(self._pools), clusters=clusters_of(names))
        self._warned &= {(pool.id, pool.routing.queue.max_wait_s) for pool in self._pools}
        for stream in self._streams:
            self._warn_of_long_waits(stream)
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
