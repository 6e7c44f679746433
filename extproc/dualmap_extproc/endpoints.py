"""Endpoint discovery: the router tells every Envoy which instances each pool's cluster has (EDS, state of the world).

``envoy/`` configures one EDS cluster per pool; ``main`` publishes the same pools here and to the picker, so that one
membership decides and routes. A pushed endpoint is routable within milliseconds (PROTOCOLS section 1).

The upper half of the module is pure: pools to resources (``snapshot_of``), and one stream's conversation as a state
machine (``Subscription``). ``EndpointDiscovery`` puts it under grpc.aio: each stream has a task of its own and is told
by an event, never a queue, that there is news, so that a slow or dead Envoy delays nobody and owes one push at most.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import grpc

from dualmap.pool import MemberState, Pool
from dualmap_edge.logs import get_logger
from dualmap_extproc.names import CLUSTER_LOAD_ASSIGNMENT_TYPE, EDS_METHOD, EDS_SERVICE, cluster_name
from dualmap_extproc.wire import base_pb2, discovery_pb2

# Names one stream may subscribe to. Envoy opens a stream per EDS cluster; other xDS clients may name all in one.
MAX_NAMES: Final = 10_000

_Context: TypeAlias = "grpc.aio.ServicerContext[discovery_pb2.DiscoveryRequest, discovery_pb2.DiscoveryResponse]"
_log = get_logger(__name__)


class SubscriptionError(Exception):
    """A discovery request asks for something that is not served here; the message is for the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The endpoints of all pools at one moment: cluster name to serialized ClusterLoadAssignment."""

    assignments: Mapping[str, bytes]

    def assignment(self, cluster: str) -> bytes:
        """Return a cluster's resource; for one that no pool has, a resource without endpoints.

        Without an answer Envoy would hold back its listeners until ``initial_fetch_timeout``, all pools' together, and
        would go on sending a vanished pool's traffic to instances that may be somebody else's by now.
        """
        known = self.assignments.get(cluster)
        return known if known is not None else _empty_assignment(cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """An Envoy refused what it was sent and goes on with what it had."""

    version: str
    reason: str


def load_assignment(pool: Pool) -> discovery_pb2.ClusterLoadAssignment:
    """Return a pool's members as Envoy's hosts.

    DRAINING hosts are reached when a request names them (bound sessions, retries) and never by the fallback policy;
    Joining ones are whole hosts for Envoy, since how much they get is for the rings to say (measured, PROTOCOLS 1).
    """
    hosts = [
        discovery_pb2.LbEndpoint(
            endpoint=discovery_pb2.Endpoint(
                address=base_pb2.Address(
                    socket_address=base_pb2.SocketAddress(address=member.address, port_value=member.port)
                )
            ),
            health_status=(
                base_pb2.HealthStatus.DRAINING
                if member.state is MemberState.DRAINING
                else base_pb2.HealthStatus.HEALTHY
            ),
        )
        for member in pool.members
    ]
    return discovery_pb2.ClusterLoadAssignment(
        cluster_name=cluster_name(pool.namespace, pool.name),
        endpoints=[discovery_pb2.LocalityLbEndpoints(lb_endpoints=hosts)] if hosts else [],
    )


def snapshot_of(pools: Iterable[Pool]) -> Snapshot:
    """Return all pools' resources, serialized once for every stream."""
    assignments = [load_assignment(pool) for pool in pools]
    return Snapshot(assignments={each.cluster_name: each.SerializeToString() for each in assignments})


class Subscription:
    """One stream's side of the conversation: requests in, the response that is due out. Without gRPC or a clock.

    Only resources that the peer has not been sent in their present form are due, so an ACK is answered with silence
    and a NACK too: the same content would be refused again.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._sent: dict[str, bytes] = {}
        self._responses = 0

    def on_request(self, request: discovery_pb2.DiscoveryRequest) -> Rejection | None:
        """Take a subscription, an ACK or a NACK; return what a NACK says. Raises SubscriptionError."""
        if request.type_url not in ("", CLUSTER_LOAD_ASSIGNMENT_TYPE):
            accepted = f"give {CLUSTER_LOAD_ASSIGNMENT_TYPE}"
            raise SubscriptionError(f"type_url: {request.type_url[:200]!r} is not accepted; {accepted}")
        if len(request.resource_names) > MAX_NAMES:
            count = len(request.resource_names)
            raise SubscriptionError(f"resource_names: {count} names are not accepted; give at most {MAX_NAMES}")
        if self._responses and request.response_nonce not in ("", self._nonce):
            # It answers an older response than the last; the one that answers the last is on its way.
            return None
        # Sorted and without duplicates, so that the version depends on nothing but content.
        self._names = tuple(sorted(set(request.resource_names)))
        self._sent = {name: self._sent[name] for name in self._names if name in self._sent}
        if not request.HasField("error_detail"):
            return None
        return Rejection(version=request.version_info, reason=request.error_detail.message[:500])

    def respond(self, snapshot: Snapshot) -> discovery_pb2.DiscoveryResponse | None:
        """Return what the peer lacks of ``snapshot``, None when it lacks nothing, and count it as sent.

        The version is a digest of all the content subscribed to: replicas and restarts that say the same say it under
        the same version.
        """
        content = {name: snapshot.assignment(name) for name in self._names}
        due = {name: resource for name, resource in content.items() if self._sent.get(name) != resource}
        if not due:
            return None
        self._sent = content
        self._responses += 1
        response = discovery_pb2.DiscoveryResponse(
            version_info=hashlib.blake2b(b"".join(content.values()), digest_size=8).hexdigest(),
            type_url=CLUSTER_LOAD_ASSIGNMENT_TYPE,
            nonce=self._nonce,
        )
        for resource in due.values():
            response.resources.add(type_url=CLUSTER_LOAD_ASSIGNMENT_TYPE, value=resource)
        return response

    @property
    def _nonce(self) -> str:
        return str(self._responses)


class DiscoveryObserver(Protocol):
    """Told what discovery does; implemented by ``metrics``."""

    def discovery_streams(self, count: int) -> None:
        """So many streams are open now."""

    def discovery_pushed(self) -> None:
        """A response was handed to a stream."""

    def discovery_rejected(self) -> None:
        """An Envoy refused a response (NACK)."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One open stream: its conversation, and the event that says there may be something to send."""

    subscription: Subscription = field(default_factory=Subscription)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    peer: str = ""


class EndpointDiscovery:
    """The EDS service. ``publish`` whenever the pools change; streams that lack the change get it at once.

    Before the first ``publish`` nothing is answered: an Envoy that outlived the last router keeps its endpoints until
    this one knows better.
    """

    def __init__(self, observer: DiscoveryObserver) -> None:
        self._observer = observer
        self._snapshot: Snapshot | None = None
        self._streams: set[_Stream] = set()

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the service as grpc.aio registers it."""
        method = grpc.stream_stream_rpc_method_handler(
            self._serve,
            request_deserializer=discovery_pb2.DiscoveryRequest.FromString,
            response_serializer=discovery_pb2.DiscoveryResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(EDS_SERVICE, {EDS_METHOD: method})

    def publish(self, pools: Iterable[Pool]) -> None:
        """Serve these pools from now on. Returns at once; each stream sends in its own task."""
        self._snapshot = snapshot_of(pools)
        for stream in self._streams:
            stream.news.set()

    async def _serve(self, requests: AsyncIterator[discovery_pb2.DiscoveryRequest], context: _Context) -> None:
        """Serve one stream until the peer or the server ends it."""
        stream = _Stream()
        self._streams.add(stream)
        self._observer.discovery_streams(len(self._streams))
        reading = asyncio.create_task(self._read(stream, requests))
        try:
            while not reading.done():
                await stream.news.wait()
                stream.news.clear()
                response = None if self._snapshot is None else stream.subscription.respond(self._snapshot)
                if response is not None:
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
        """Feed the peer's requests to its subscription, wake the sender for each, and once more at the end."""
        try:
            async for request in requests:
                # Envoy names itself on the first message only.
                stream.peer = stream.peer or request.node.id[:200]
                rejection = stream.subscription.on_request(request)
                if rejection is not None:
                    self._observer.discovery_rejected()
                    _log.error(
                        "endpoints refused by Envoy, it goes on with those it had",
                        envoy=stream.peer,
                        accepted_version=rejection.version,
                        reason=rejection.reason,
                    )
                stream.news.set()
        finally:
            stream.news.set()


def _empty_assignment(cluster: str) -> bytes:
    return discovery_pb2.ClusterLoadAssignment(cluster_name=cluster).SerializeToString()
