"""Makes Envoy's second listener, which serves Envoy's readiness and statistics to probes and Prometheus.

Envoy's administration interface stays on loopback, because any client of this interface can stop Envoy.
"""

from datetime import timedelta

from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment, LocalityLbEndpoints
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import Route, RouteAction, RouteConfiguration, RouteMatch, VirtualHost
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpFilter,
)

from dualmap_extproc.envoy.config.extensions import endpoint_at, packed, socket_address
from dualmap_extproc.envoy.config.settings import Address

SHOWN = ("/ready", "/stats/prometheus")
_CLUSTER = "envoy-admin"
_TIMEOUT = timedelta(seconds=5)


def status_listener(status: Address) -> Listener:
    """Return the listener; it answers 404 to every path that is not in SHOWN, and answers also under overload."""
    manager = HttpConnectionManager(
        stat_prefix="status",
        route_config=RouteConfiguration(
            name="status",
            virtual_hosts=[VirtualHost(name="status", domains=["*"], routes=[_route(path) for path in SHOWN])],
        ),
        http_filters=[HttpFilter(name="envoy.filters.http.router", typed_config=packed(Router()))],
    )
    manager_filter = Filter(name="envoy.filters.network.http_connection_manager", typed_config=packed(manager))
    return Listener(
        name="status",
        address=socket_address(status),
        filter_chains=[FilterChain(filters=[manager_filter])],
        ignore_global_conn_limit=True,
        bypass_overload_manager=True,
    )


def admin_cluster(admin: Address) -> Cluster:
    """Return the cluster of Envoy's administration interface at ``admin``."""
    return Cluster(
        name=_CLUSTER,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=1),
        load_assignment=ClusterLoadAssignment(
            cluster_name=_CLUSTER, endpoints=[LocalityLbEndpoints(lb_endpoints=[endpoint_at(admin)])]
        ),
    )


def _route(path: str) -> Route:
    return Route(match=RouteMatch(path=path), route=RouteAction(cluster=_CLUSTER, timeout=_TIMEOUT))
