"""Keeps what one Envoy has asked for and been sent in discovery (xDS, state of the world). Pure.

It takes requests and returns the responses that are due; ``service`` runs it under grpc.aio. A stream asks for
endpoints only (one stream per cluster of the bootstrap), or for clusters, endpoints and routes together (ADS).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dualmap_extproc.envoy.discovery.endpoints import no_endpoints
from dualmap_extproc.names import CLUSTER_LOAD_ASSIGNMENT_TYPE, CLUSTER_TYPE, ROUTE_CONFIGURATION_TYPE
from dualmap_extproc.wire import discovery_pb2

# The most names that one stream may subscribe to. Envoy opens a stream per EDS cluster; other clients may use one.
MAX_NAMES: Final = 10_000

# Envoy needs the endpoints of a cluster before it uses the cluster, and a cluster before its route.
ORDER: Final = (CLUSTER_TYPE, CLUSTER_LOAD_ASSIGNMENT_TYPE, ROUTE_CONFIGURATION_TYPE)


class SubscriptionError(Exception):
    """A discovery request asks for something that the router does not serve; the message is for the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The configuration for all Envoys at one moment: serialized resources by name; None for those not made yet."""

    assignments: Mapping[str, bytes]
    clusters: Mapping[str, bytes] | None = None
    routes: Mapping[str, bytes] | None = None

    def resources(self, type_url: str, names: tuple[str, ...]) -> dict[str, bytes] | None:
        """Return the resources of a type with these names, None if not made yet. Clusters are always returned whole.

        A cluster that belongs to no pool gets an assignment without endpoints. Without an answer Envoy would delay its
        listeners until ``initial_fetch_timeout``. Envoy would also send requests of a removed pool to its old
        addresses, which may belong to other pods by now.
        """
        if type_url == CLUSTER_LOAD_ASSIGNMENT_TYPE:
            return {name: self.assignments.get(name) or no_endpoints(name) for name in names}
        if type_url == CLUSTER_TYPE:
            return None if self.clusters is None else dict(self.clusters)
        return None if self.routes is None else {name: self.routes[name] for name in names if name in self.routes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """An Envoy rejected a response (NACK) and keeps its earlier resources."""

    type_url: str
    version: str
    reason: str


@dataclass(slots=True)
class _Subscription:
    """The names subscribed to of one type, and the resources sent: None before the first response."""

    type_url: str
    names: tuple[str, ...] = ()
    sent: dict[str, bytes] | None = None
    responses: int = 0
    answered: bool = True

    @property
    def nonce(self) -> str:
        return str(self.responses)

    def on_request(self, request: discovery_pb2.DiscoveryRequest) -> Rejection | None:
        if self.responses and request.response_nonce not in ("", self.nonce):
            # This request answers an older response; the answer to the last one will follow.
            return None
        self.answered = self.answered or bool(request.response_nonce)
        # Sorted and without duplicates, so that the version depends only on the content.
        self.names = tuple(sorted(set(request.resource_names)))
        if self.sent is not None and self.type_url != CLUSTER_TYPE:
            self.sent = {name: self.sent[name] for name in self.names if name in self.sent}
        if not request.HasField("error_detail"):
            return None
        reason = request.error_detail.message[:500]
        return Rejection(type_url=self.type_url, version=request.version_info, reason=reason)

    def respond(self, snapshot: Snapshot) -> discovery_pb2.DiscoveryResponse | None:
        content = snapshot.resources(self.type_url, self.names)
        if content is None:
            return None
        sent = self.sent or {}
        due = {name: resource for name, resource in content.items() if sent.get(name) != resource}
        if self.type_url == CLUSTER_TYPE:
            # Envoy removes clusters that a response lacks, so responses hold all of them. An empty one is sent once.
            if content == self.sent:
                return None
            due = content
        elif not due:
            return None
        self.sent = content
        self.responses += 1
        self.answered = False
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
    """The state of one stream; ``only`` is the one type that it may ask for (empty: each of ORDER).

    Only resources whose present version the peer was not sent are due. So an ACK gets no response, nor does a NACK: the
    peer would reject the same content again.
    """

    only: str = ""
    _subscriptions: dict[str, _Subscription] = field(default_factory=dict)

    def asks_for(self, *types: str) -> bool:
        """Return whether the peer has asked for any of these types."""
        return any(each in self._subscriptions for each in types)

    def on_request(self, request: discovery_pb2.DiscoveryRequest) -> Rejection | None:
        """Apply a subscription, an ACK or a NACK; return a NACK's content. Raises SubscriptionError."""
        type_url = request.type_url or self.only
        accepted = (self.only,) if self.only else ORDER
        if type_url not in accepted:
            raise SubscriptionError(f"type_url: {type_url[:200]!r} is not accepted; give {' or '.join(accepted)}")
        if len(request.resource_names) > MAX_NAMES:
            count = len(request.resource_names)
            raise SubscriptionError(f"resource_names: {count} names are not accepted; give at most {MAX_NAMES}")
        return self._subscriptions.setdefault(type_url, _Subscription(type_url)).on_request(request)

    def respond(self, snapshot: Snapshot) -> discovery_pb2.DiscoveryResponse | None:
        """Return one response that is due and count it as sent; None if none is due.

        Routes wait for the peer's answer to the clusters, which Envoy 1.40 sends once it has all their endpoints.
        Endpoints do not wait; they follow the clusters. The version is a digest of all content subscribed to, so that
        replicas and restarted routers send equal content under the same version.
        """
        for type_url in ORDER:
            subscription = self._subscriptions.get(type_url)
            if subscription is None or (type_url == ROUTE_CONFIGURATION_TYPE and not self._clusters_in_use):
                continue
            before = subscription.sent or {}
            response = subscription.respond(snapshot)
            if response is not None:
                if type_url == CLUSTER_TYPE:
                    self._forget_endpoints(before, subscription.sent or {})
                return response
        return None

    @property
    def _clusters_in_use(self) -> bool:
        clusters = self._subscriptions.get(CLUSTER_TYPE)
        return clusters is None or clusters.answered

    def _forget_endpoints(self, before: Mapping[str, bytes], now: Mapping[str, bytes]) -> None:
        """Send the endpoints of each changed cluster again: Envoy recreates it and waits for its endpoints."""
        endpoints = self._subscriptions.get(CLUSTER_LOAD_ASSIGNMENT_TYPE)
        if endpoints is not None and endpoints.sent is not None:
            kept = {name: sent for name, sent in endpoints.sent.items() if before.get(name) == now.get(name)}
            endpoints.sent = kept
