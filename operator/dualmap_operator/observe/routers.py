"""Which routers there are: those of the command line, or those behind a Service, as its EndpointSlices say.

``gather`` asks them. Routers that do not take requests (not ready, or terminating) are among them: they may still have
some in flight.
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
    """Who knows the routers."""

    def addresses(self) -> tuple[RouterAddress, ...]:
        """Return the metrics port of every router."""


class FixedRouters:
    """The routers that the command line names."""

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
            listener=lambda *_: None,  # Routers are asked at the next look, which is never far.
            clock=clock,
            selector=f"{_SERVICE_LABEL}={name}",
        )

    def addresses(self) -> tuple[RouterAddress, ...]:
        """Return the metrics port of every router, once each though it may have addresses of two families."""
        found: dict[str, RouterAddress] = {}
        for _, routers in self.mirror.items():
            for name, router in routers.items():
                # IPv4 before IPv6, whichever slice came first.
                if name not in found or ":" in found[name].host:
                    found[name] = router
        return tuple(found[name] for name in sorted(found))


def read_slice(body: Mapping[str, Any]) -> dict[str, RouterAddress]:
    """Return the routers in an EndpointSlice by the name of their pod, or by address where no pod is named."""
    ports = [port.get("port") for port in mappings_in(body, "ports") if port.get("name") == _PORT_NAME]
    if not ports or not isinstance(ports[0], int):
        return {}
    routers: dict[str, RouterAddress] = {}
    for endpoint in mappings_in(body, "endpoints"):
        addresses = endpoint.get("addresses")
        if not isinstance(addresses, list) or not addresses:
            continue
        host = str(addresses[0])
        # The API means ready where it says nothing.
        ready = mapping_in(endpoint, "conditions").get("ready") is not False
        name = text_in(mapping_in(endpoint, "targetRef"), "name") or host
        routers[name] = RouterAddress(host=host, port=ports[0], ready=ready)
    return routers
