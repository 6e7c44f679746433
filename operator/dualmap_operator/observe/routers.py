"""Router discovery: from addresses on the command line, or from EndpointSlices of the routers' Service.

``gather`` sends requests to these routers. Routers that are not ready or are terminating are included, because they may
still have requests in flight.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from dualmap.objects.pods import mapping_in, mappings_in, text_in
from dualmap_edge.kube.client import KubeClient
from dualmap_operator.api import ApiObserver, collection_path
from dualmap_operator.observe.mirror import Mirror
from dualmap_operator.observe.status_clients import RouterAddress

_PORT_NAME: Final = "metrics"
_SERVICE_LABEL: Final = "kubernetes.io/service-name"


class Routers(Protocol):
    """A source of the routers' addresses."""

    def addresses(self) -> tuple[RouterAddress, ...]:
        """Return the metrics port of every router."""


class FixedRouters:
    """The routers on the command line."""

    def __init__(self, addresses: Iterable[tuple[str, int]]) -> None:
        self._addresses = tuple(RouterAddress(host=host, port=port) for host, port in addresses)

    def addresses(self) -> tuple[RouterAddress, ...]:
        """Return the metrics port of every router."""
        return self._addresses


class ServiceRouters:
    """The routers behind the Service ``name`` in ``namespace``."""

    def __init__(
        self, client: KubeClient, observer: ApiObserver, *, namespace: str, name: str, clock: Callable[[], float]
    ) -> None:
        self.mirror = Mirror(
            client,
            observer,
            kind="EndpointSlice",
            path=collection_path("discovery.k8s.io/v1", "EndpointSlice", namespace),
            read=read_slice,
            listener=lambda *_: None,  # The next periodic reconcile uses the new routers.
            clock=clock,
            selector=f"{_SERVICE_LABEL}={name}",
        )

    def addresses(self) -> tuple[RouterAddress, ...]:
        """Return one metrics port for each router, also for a router with IPv4 and IPv6 addresses."""
        found: dict[str, RouterAddress] = {}
        for _, routers in self.mirror.items():
            for name, router in routers.items():
                # Prefer IPv4, regardless of the order of the slices.
                if name not in found or ":" in found[name].host:
                    found[name] = router
        return tuple(found[name] for name in sorted(found))


def read_slice(body: Mapping[str, Any]) -> dict[str, RouterAddress]:
    """Return the routers in an EndpointSlice by pod name, or by address if the endpoint has no pod name."""
    ports = [port.get("port") for port in mappings_in(body, "ports") if port.get("name") == _PORT_NAME]
    if not ports or not isinstance(ports[0], int):
        return {}
    routers: dict[str, RouterAddress] = {}
    for endpoint in mappings_in(body, "endpoints"):
        addresses = endpoint.get("addresses")
        if not isinstance(addresses, list) or not addresses:
            continue
        host = str(addresses[0])
        # A missing value means ready (Kubernetes API: EndpointConditions).
        ready = mapping_in(endpoint, "conditions").get("ready") is not False
        name = text_in(mapping_in(endpoint, "targetRef"), "name") or host
        routers[name] = RouterAddress(host=host, port=ports[0], ready=ready)
    return routers
