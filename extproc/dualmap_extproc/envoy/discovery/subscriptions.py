"""The resources that one Envoy subscribed to and received by discovery (xDS, state of the world).

This module does no I/O: it receives requests and returns the responses that are due. The module ``service`` connects
this module to grpc.aio. A stream subscribes to endpoints only (one stream per cluster of the bootstrap), or to
clusters and endpoints together (ADS).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dualmap_extproc.envoy.discovery.endpoints import no_endpoints
from dualmap_extproc.names import CLUSTER_LOAD_ASSIGNMENT_TYPE, CLUSTER_TYPE
from dualmap_extproc.wire import discovery_pb2

# The most names that one stream may subscribe to. Envoy opens one stream per EDS cluster; other clients may use one
# stream for all clusters.
MAX_NAMES: Final = 10_000

# The order of responses. Envoy requests the endpoints of a cluster after it has received the cluster.
ORDER: Final = (CLUSTER_TYPE, CLUSTER_LOAD_ASSIGNMENT_TYPE)


class SubscriptionError(Exception):
    """A discovery request for a resource that the router does not serve; the message is for the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The configuration for all Envoys: serialized resources by name."""

    assignments: Mapping[str, bytes]
    clusters: Mapping[str, bytes]

    def resources(self, type_url: str, names: tuple[str, ...]) -> dict[str, bytes]:
        """Return the named resources of a type.

        For the cluster type, the result always contains all clusters.

        A cluster without a pool gets an assignment without endpoints, for two reasons. Without an answer, Envoy would
        delay its listeners until ``initial_fetch_timeout``. Envoy would also send requests of a removed pool to the
        pool's old addresses, which other pods may use now.
        """
        if type_url == CLUSTER_LOAD_ASSIGNMENT_TYPE:
            return {name: self.assignments.get(name) or no_endpoints(name) for name in names}
        return dict(self.clusters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The rejection of a response by an Envoy (NACK), which keeps its earlier resources."""

    type_url: str
    version: str
    reason: str


@dataclass(slots=True)
class _Subscription:
    """A subscription to resources of one type: the names, and the resources sent (None before the first response)."""

    type_url: str
    names: tuple[str, ...] = ()
    sent: dict[str, bytes] | None = None
    responses: int = 0

    @property
    def nonce(self) -> str:
        return str(self.responses)

    def on_request(self, request: discovery_pb2.DiscoveryRequest) -> Rejection | None:
        if self.responses and request.response_nonce not in ("", self.nonce):
            # This request acknowledges an older response; the acknowledgement of the last response will follow.
            return None
        # The names are sorted and unique, so that the version depends only on the content.
        self.names = tuple(sorted(set(request.resource_names)))
        if self.sent is not None and self.type_url != CLUSTER_TYPE:
            self.sent = {name: self.sent[name] for name in self.names if name in self.sent}
        if not request.HasField("error_detail"):
            return None
        reason = request.error_detail.message[:500]
        return Rejection(type_url=self.type_url, version=request.version_info, reason=reason)

    def respond(self, snapshot: Snapshot) -> discovery_pb2.DiscoveryResponse | None:
        content = snapshot.resources(self.type_url, self.names)
        sent = self.sent or {}
        due = {name: resource for name, resource in content.items() if sent.get(name) != resource}
        if self.type_url == CLUSTER_TYPE:
            # Envoy removes clusters that a response lacks, so each response contains all clusters. An empty response is
            # sent only once.
            if content == self.sent:
                return None
            due = content
        elif not due:
            return None
        self.sent = content
        self.responses += 1
        response = discovery_pb2.DiscoveryResponse(
            version_info=_version(content),
            type_url=self.type_url,
            nonce=self.nonce,
        )
        for resource in due.values():
            response.resources.add(type_url=self.type_url, value=resource)
        return response


def _version(content: Mapping[str, bytes]) -> str:
    return hashlib.blake2b(b"".join(content[name] for name in sorted(content)), digest_size=8).hexdigest()


@dataclass(slots=True)
class Conversation:
    """The state of one stream; ``only`` is the one type that the stream may subscribe to (empty: all types in ORDER).

    A resource is due if the peer has not received its current version. An ACK therefore gets no response. A NACK gets
    no response either, because the peer would reject the same content again.
    """

    only: str = ""
    _subscriptions: dict[str, _Subscription] = field(default_factory=dict)

    def on_request(self, request: discovery_pb2.DiscoveryRequest) -> Rejection | None:
        """Apply a subscription, an ACK or a NACK; return the rejection for a NACK. Raises SubscriptionError."""
        type_url = request.type_url or self.only
        accepted = (self.only,) if self.only else ORDER
        if type_url not in accepted:
            raise SubscriptionError(f"type_url: {type_url[:200]!r} is not accepted; give {' or '.join(accepted)}")
        if len(request.resource_names) > MAX_NAMES:
            count = len(request.resource_names)
            raise SubscriptionError(f"resource_names: {count} names are not accepted; give at most {MAX_NAMES}")
        return self._subscriptions.setdefault(type_url, _Subscription(type_url)).on_request(request)

    def respond(self, snapshot: Snapshot) -> discovery_pb2.DiscoveryResponse | None:
        """Return one response that is due and record it as sent; return None if no response is due.

        Endpoints follow the clusters without an acknowledgement. The version is a digest of the subscribed content.
        Replicas and restarted routers therefore send equal content under the same version.
        """
        for type_url in ORDER:
            subscription = self._subscriptions.get(type_url)
            if subscription is None:
                continue
            before = subscription.sent or {}
            response = subscription.respond(snapshot)
            if response is not None:
                if type_url == CLUSTER_TYPE:
                    self._forget_endpoints(before, subscription.sent or {})
                return response
        return None

    def _forget_endpoints(self, before: Mapping[str, bytes], now: Mapping[str, bytes]) -> None:
        """Mark endpoints of changed clusters as not sent: Envoy recreates these clusters and waits for endpoints."""
        endpoints = self._subscriptions.get(CLUSTER_LOAD_ASSIGNMENT_TYPE)
        if endpoints is not None and endpoints.sent is not None:
            kept = {name: sent for name, sent in endpoints.sent.items() if before.get(name) == now.get(name)}
            endpoints.sent = kept
