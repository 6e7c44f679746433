"""Makes Envoy's clusters: one per pool, one for the routers, and one per access log sink."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterCustomClusterType,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
    UpstreamConnectionOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ConfigSource,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    HealthStatus,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    KeepaliveSettings,
    TcpKeepalive,
)
from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions as CommonHttpOptions
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment, LocalityLbEndpoints
from envoy_data_plane.envoy.extensions.clusters.common.dns.v3 import DnsLookupFamily
from envoy_data_plane.envoy.extensions.clusters.dns.v3 import DnsCluster
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent

from dualmap.pools.claims import addressed_pools
from dualmap.pools.pool import MemberState, Pool
from dualmap_extproc.envoy.config.extensions import BUFFER_BYTES, endpoint_at, extension, packed
from dualmap_extproc.envoy.config.settings import Address, EnvoySettings
from dualmap_extproc.envoy.config.sources import ROUTERS_CLUSTER, own_stream, shared_stream
from dualmap_extproc.envoy.config.transport import tls_socket
from dualmap_extproc.names import DESTINATION_HEADER, DESTINATION_KEY, LB_NAMESPACE, ONLY_POOL, SERVED_KEY, cluster_name

CONNECT_TIMEOUT = timedelta(seconds=1)

ROUTER_KEEPALIVE = KeepaliveSettings(interval=timedelta(seconds=1), timeout=timedelta(seconds=2))

# The number of requests in flight that Envoy's circuit breakers allow. With Envoy's default of 1024, 276 of 1300 queued
# requests got a 500. With Envoy's default of 3 simultaneous retries, most requests of a failed engine would be lost.
CONCURRENCY_MAX = 40_000

# vLLM's HTTP server closes idle connections after 5 s. Envoy closes idle connections earlier, so that vLLM does not
# close a connection while Envoy sends a request.
ENGINE_IDLE_TIMEOUT = timedelta(seconds=4)

_LOOKED_UP = "envoy.cluster.dns"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def sink_cluster_name(index: int) -> str:
    """Return the name of the cluster of the access log sink at this index of the settings."""
    return f"dualmap-access-log-{index}"


def clusters(settings: EnvoySettings) -> list[Cluster]:
    """Return all clusters; the routers' cluster, which serves discovery, comes first."""
    if settings.shares_access_log and settings.access_logs == settings.routers:
        # One of the routers gets each entry, so Envoy must choose a healthy router.
        sinks = [_router_cluster(sink_cluster_name(0), settings)]
    else:
        sinks = [
            _grpc_cluster(sink_cluster_name(index), [sink], settings) for index, sink in enumerate(settings.access_logs)
        ]
    pools = [_cluster_of(pool, settings) for pool in settings.pools]
    if settings.discover is not None:
        pools.append(pool_cluster(ONLY_POOL, endpoints=shared_stream()))
    elif len(addressed_pools(settings.pools)) != 1:
        # Only a router can find the pool of a request, so this cluster for requests without a pick has no hosts.
        pools.append(pool_cluster(ONLY_POOL, endpoints=ClusterLoadAssignment(cluster_name=ONLY_POOL)))
    return [_router_cluster(ROUTERS_CLUSTER, settings), *sinks, *pools]


def _router_cluster(name: str, settings: EnvoySettings) -> Cluster:
    """Return a cluster of the routers.

    The cluster has a health check and outlier detection, because FULL_DUPLEX fails open only while no router is
    healthy. In a measurement, about 20 requests arrived in the 1.5 s after a router was killed. Without outlier
    detection, up to 17 of these requests got 503. Without both checks, all requests got 503; with both checks, no
    request got 503. After a restart of a router, the health check makes the router available again. The panic threshold
    of 0 stops Envoy from using unhealthy routers when all are unhealthy.

    A router that hangs still accepts connections. In a measurement with a TCP health check, one of two routers was
    stopped. In the next 100 s, 12 clients got fewer than 60 answers, because each request waited for
    ``message_timeout``. The gRPC health check detects a router that hangs and a router that is about to end. Envoy also
    sends HTTP/2 pings. If a router does not answer pings, Envoy closes the connection, which ends all calls on the
    connection.
    """
    cluster = _grpc_cluster(name, settings.routers, settings, keepalive=ROUTER_KEEPALIVE)
    cluster.health_checks = [
        HealthCheck(
            grpc_health_check=HealthCheckGrpcHealthCheck(),
            timeout=timedelta(seconds=1),
            interval=timedelta(milliseconds=500),
            no_traffic_interval=timedelta(milliseconds=500),
            unhealthy_threshold=2,
            healthy_threshold=1,
        )
    ]
    cluster.outlier_detection = _eject_unreachable(
        interval=timedelta(milliseconds=500),
        base_ejection_time=timedelta(milliseconds=500),
        max_ejection_time=timedelta(seconds=2),
        max_ejection_percent=100,
    )
    cluster.common_lb_config = ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0))
    return cluster


def _grpc_cluster(
    name: str, addresses: Sequence[Address], settings: EnvoySettings, *, keepalive: KeepaliveSettings | None = None
) -> Cluster:
    """Return a cluster of gRPC servers at fixed addresses; ``keepalive`` sets HTTP/2 pings.

    Connections to the sinks of single routers have no pings, so that a router that hangs can read the buffered entries
    when it continues.

    Envoy resolves DNS names every second, because a name of several routers gains and loses addresses, and a restarted
    router has a new address. Until Envoy has a new address, the router gets no requests and no access log entries. A
    request without an entry about its end counts as in flight for ten minutes.
    """
    looked_up = DnsCluster(dns_refresh_rate=timedelta(seconds=1), dns_lookup_family=DnsLookupFamily.V4_PREFERRED)
    named = any(not address.is_ip for address in addresses)
    options = HttpProtocolOptions(
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=Http2ProtocolOptions(connection_keepalive=keepalive)
        )
    )
    return Cluster(
        name=name,
        type=None if named else ClusterDiscoveryType.STATIC,
        cluster_type=ClusterCustomClusterType(name=_LOOKED_UP, typed_config=packed(looked_up)) if named else None,
        connect_timeout=CONNECT_TIMEOUT,
        per_connection_buffer_limit_bytes=BUFFER_BYTES,
        circuit_breakers=_breakers(),
        upstream_connection_options=_notice_lost_hosts(),
        typed_extension_protocol_options={_HTTP_OPTIONS: packed(options)},
        transport_socket=None if settings.tls is None else tls_socket(settings.tls),
        load_assignment=ClusterLoadAssignment(
            cluster_name=name,
            endpoints=[LocalityLbEndpoints(lb_endpoints=[endpoint_at(address) for address in addresses])],
        ),
    )


def _cluster_of(pool: Pool, settings: EnvoySettings) -> Cluster:
    name = cluster_name(pool.namespace, pool.name)
    return pool_cluster(name, endpoints=_members(pool, name) if settings.static_endpoints else own_stream())


def pool_cluster(name: str, *, endpoints: ConfigSource | ClusterLoadAssignment) -> Cluster:
    """Return a pool's cluster. The router names a request's host; without a name, Envoy uses round robin.

    ``endpoints`` is a fixed list of endpoints, or the source from which Envoy requests the endpoints by the cluster's
    name.

    Outlier detection temporarily removes hosts that refuse connections from the round robin. Requests without a named
    host need no other health check. The panic threshold of 0 excludes Draining members even if most are draining.
    """
    options = HttpProtocolOptions(
        common_http_protocol_options=CommonHttpOptions(idle_timeout=ENGINE_IDLE_TIMEOUT),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions()),
    )
    cluster = Cluster(
        name=name,
        connect_timeout=CONNECT_TIMEOUT,
        per_connection_buffer_limit_bytes=BUFFER_BYTES,
        circuit_breakers=_breakers(),
        upstream_connection_options=_notice_lost_hosts(),
        outlier_detection=_eject_unreachable(
            base_ejection_time=timedelta(seconds=5),
            max_ejection_time=timedelta(seconds=5),
            max_ejection_percent=50,
        ),
        common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0)),
        typed_extension_protocol_options={_HTTP_OPTIONS: packed(options)},
        load_balancing_policy=_policy("override_host", _override_host()),
    )
    if isinstance(endpoints, ClusterLoadAssignment):
        cluster.type = ClusterDiscoveryType.STATIC
        cluster.load_assignment = endpoints
    else:
        cluster.type = ClusterDiscoveryType.EDS
        cluster.eds_cluster_config = ClusterEdsClusterConfig(eds_config=endpoints)
    return cluster


def _members(pool: Pool, name: str) -> ClusterLoadAssignment:
    """Return a pool's members as endpoints; Envoy uses a Draining member only if a request names it."""
    hosts = []
    for member in pool.members:
        host = endpoint_at(Address(host=member.address, port=member.port))
        if member.state is MemberState.DRAINING:
            host.health_status = HealthStatus.DRAINING
        hosts.append(host)
    return ClusterLoadAssignment(cluster_name=name, endpoints=[LocalityLbEndpoints(lb_endpoints=hosts)])


def _override_host() -> OverrideHost:
    """Return the policy that tries a request's named hosts in order, and reports the host that served the request."""
    fallback = _policy("round_robin", RoundRobin())
    return OverrideHost(
        override_host_sources=[
            OverrideHostOverrideHostSource(header=DESTINATION_HEADER),
            OverrideHostOverrideHostSource(metadata=_lb_metadata(DESTINATION_KEY)),
        ],
        selected_host_key=_lb_metadata(SERVED_KEY),
        fallback_policy=fallback,
    )


def _policy(name: str, message: OverrideHost | RoundRobin) -> LoadBalancingPolicy:
    config = extension(f"envoy.load_balancing_policies.{name}", message)
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=config)])


def _lb_metadata(key: str) -> MetadataKey:
    return MetadataKey(key=LB_NAMESPACE, path=[MetadataKeyPathSegment(key=key)])


def _eject_unreachable(**limits: Any) -> OutlierDetection:
    """Return outlier detection that ejects a host after one failed connection, but not for an engine's 5xx answer."""
    return OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_local_origin_success_rate=0,
        enforcing_consecutive_5xx=0,
        enforcing_consecutive_gateway_failure=0,
        enforcing_success_rate=0,
        **limits,
    )


def _notice_lost_hosts() -> UpstreamConnectionOptions:
    """Return options for TCP keepalive, which closes connections to a lost node.

    Without keepalive, Envoy cannot distinguish a lost node from a busy engine that sends nothing.
    """
    return UpstreamConnectionOptions(
        tcp_keepalive=TcpKeepalive(keepalive_time=10, keepalive_interval=5, keepalive_probes=3)
    )


def _breakers() -> CircuitBreakers:
    limits = CircuitBreakersThresholds(
        max_connections=CONCURRENCY_MAX,
        max_pending_requests=CONCURRENCY_MAX,
        max_requests=CONCURRENCY_MAX,
        max_retries=CONCURRENCY_MAX,
    )
    return CircuitBreakers(thresholds=[limits])
