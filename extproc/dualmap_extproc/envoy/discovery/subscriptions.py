"""One Envoy's side of discovery (xDS, state of the world): what it has asked for, and what of it it lacks.

Pure: requests in, the response that is due out. ``discovery`` puts it under grpc.aio. A stream asks for endpoints alone
(one stream per cluster of the bootstrap), or for clusters, endpoints and routes together (ADS).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dualmap_extproc.envoy.discovery.endpoints import no_endpoints
from dualmap_extproc.names import CLUSTER_LOAD_ASSIGNMENT_TYPE, CLUSTER_TYPE, ROUTE_CONFIGURATION_TYPE
from dualmap_extproc.wire import discovery_pb2

# Names one stream may subscribe to. Envoy opens a stream per EDS cluster; other xDS clients may name all in one.
MAX_NAMES: Final = 10_000

# What is needed before what needs it: a cluster is used when its endpoints are known, a route when its cluster is.
ORDER: Final = (CLUSTER_TYPE, CLUSTER_LOAD_ASSIGNMENT_TYPE, ROUTE_CONFIGURATION_TYPE)


class SubscriptionError(Exception):
    """A discovery request asks for something that is not served here; the message is for the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What Envoys are to know at one moment: serialized resources by name. None is what nobody has written yet."""

    assignments: Mapping[str, bytes]
    clusters: Mapping[str, bytes] | None = None
    routes: Mapping[str, bytes] | None = None

    def resources(self, type_url: str, names: tuple[str, ...]) -> dict[str, bytes] | None:
        """Return what there is of a type under these names, None when that is not known yet. All clusters are one set.

        A cluster that no pool has gets an assignment without endpoints. Without an answer Envoy would hold back its
        listeners until ``initial_fetch_timeout``, all pools' together, and would go on sending a vanished pool's
        traffic to instances that may be somebody else's by now.
        """
        if type_url == CLUSTER_LOAD_ASSIGNMENT_TYPE:
            return {name: self.assignments.get(name) or no_endpoints(name) for name in names}
        if type_url == CLUSTER_TYPE:
            return None if self.clusters is None else dict(self.clusters)
        return None if self.routes is None else {name: self.routes[name] for name in names if name in self.routes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """An Envoy refused what it was sent and goes on with what it had."""

    type_url: str
    version: str
    reason: str


@dataclass(slots=True)
class _Subscription:
    """What is asked for of one type, and what was sent of it: None before the first response."""

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
            # It answers an older response than the last; the one that answers the last is on its way.
            return None
        self.answered = self.answered or bool(request.response_nonce)
        # Sorted and without duplicates, so that the version depends on nothing but content.
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
            # A cluster that is not in it is removed, so that it is sent whole; having none is worth saying once.
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
    """One stream's side of the conversation; ``only`` is the one type that may be asked for on it ("": each of ORDER).

    Only resources that the peer has not been sent in their present form are due, so an ACK is answered with silence
    and a NACK too: the same content would be refused again.
    """

    only: str = ""
    _subscriptions: dict[str, _Subscription] = field(default_factory=dict)

    def asks_for(self, *types: str) -> bool:
        """Whether any of these types has been asked for."""
        return any(each in self._subscriptions for each in types)

    def on_request(self, request: discovery_pb2.DiscoveryRequest) -> Rejection | None:
        """Take a subscription, an ACK or a NACK; return what a NACK says. Raises SubscriptionError."""
        type_url = request.type_url or self.only
        accepted = (self.only,) if self.only else ORDER
        if type_url not in accepted:
            raise SubscriptionError(f"type_url: {type_url[:200]!r} is not accepted; give {' or '.join(accepted)}")
        if len(request.resource_names) > MAX_NAMES:
            count = len(request.resource_names)
            raise SubscriptionError(f"resource_names: {count} names are not accepted; give at most {MAX_NAMES}")
        return self._subscriptions.setdefault(type_url, _Subscription(type_url)).on_request(request)

    def respond(self, snapshot: Snapshot) -> discovery_pb2.DiscoveryResponse | None:
        """Return one response that is due, None when none is for the moment, and count it as sent.

        Routes wait for the peer's answer to clusters: Envoy 1.40 gives it when it has the endpoints of all of them and
        uses them. So endpoints wait for nothing; they are sent after the clusters, and taken up in that order.
        The version is a digest of all the content subscribed to: replicas and restarts that say the same say it under
        the same version.
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
        """Have the endpoints sent again of each cluster that Envoy makes anew: it waits for them before it uses it."""
        endpoints = self._subscriptions.get(CLUSTER_LOAD_ASSIGNMENT_TYPE)
        if endpoints is not None and endpoints.sent is not None:
            kept = {name: sent for name, sent in endpoints.sent.items() if before.get(name) == now.get(name)}
            endpoints.sent = kept
