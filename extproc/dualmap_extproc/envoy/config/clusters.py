"""Envoy's clusters: one per pool, the routers, and the access log sinks (one cluster each)."""

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

from dualmap.pools.pool import MemberState, Pool
from dualmap_extproc.envoy.config.extensions import BUFFER_BYTES, endpoint_at, extension, packed
from dualmap_extproc.envoy.config.settings import Address, EnvoySettings
from dualmap_extproc.envoy.config.sources import ROUTERS_CLUSTER, own_stream
from dualmap_extproc.envoy.config.transport import tls_socket
from dualmap_extproc.names import DESTINATION_HEADER, DESTINATION_KEY, LB_NAMESPACE, SERVED_KEY, cluster_name

CONNECT_TIMEOUT = timedelta(seconds=1)

ROUTER_KEEPALIVE = KeepaliveSettings(interval=timedelta(seconds=1), timeout=timedelta(seconds=2))

# Requests in flight that Envoy's circuit breakers let through. The default of 1024 turned 276 of 1300 held requests
# into 500s (PROTOCOLS section 1), the default of 3 retries at once would lose most of a dead engine's requests.
CONCURRENCY_MAX = 40_000

# vLLM's HTTP server closes idle connections after 5 s; Envoy lets go first, so that none closes under a request.
ENGINE_IDLE_TIMEOUT = timedelta(seconds=4)

_LOOKED_UP = "envoy.cluster.dns"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def sink_cluster_name(index: int) -> str:
    """Name the cluster of the access log sink at this place of the settings."""
    return f"dualmap-access-log-{index}"


def clusters(settings: EnvoySettings) -> list[Cluster]:
    """Write every cluster; those that EDS is fetched from stand first."""
    sinks = [
        _grpc_cluster(sink_cluster_name(index), [sink], settings) for index, sink in enumerate(settings.access_logs)
    ]
    return [_routers(settings), *sinks, *(_cluster_of(pool, settings) for pool in settings.pools)]


def _routers(settings: EnvoySettings) -> Cluster:
    """Write the routers' cluster.

    Its health is watched twice over, because FULL_DUPLEX fails open only while Envoy knows no healthy router. Of
    about 20 requests in the second and a half after a router was killed, as many as 17 got 503 without the outlier
    detection, all of them without either, none with both; a restarted router is asked again by the health check. A
    panic threshold of 0 keeps "none is healthy" meaning none.

    A router that hangs takes connections like one that works. With a health check by connecting, not 60 of 12
    clients' requests were answered in the 100 s after one of two routers was stopped: each waited for it until
    ``message_timeout``. So its health service is asked, which also tells that it is about to end; and a connection
    on which pings go unanswered is closed, which lets go of the requests that the router has already.
    """
    cluster = _grpc_cluster(ROUTERS_CLUSTER, settings.routers, settings, keepalive=ROUTER_KEEPALIVE)
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
    cluster.outlier_detection = _leave_out_the_unreachable(
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
    """Write a cluster of gRPC servers that are named in the file; ``keepalive`` is about HTTP/2 pings.

    The access log goes without those: what a router has not read when it hangs it reads when it goes on.

    Names are looked up every second, since a router that starts anew has another address: until that is known nobody
    asks it, and ends that it does not hear of are in flight to it for ten minutes.
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
    """Write a pool's cluster: the router names the host, round robin serves what it left unnamed.

    Its ``endpoints`` are asked for under its own name, or stand in it and never change.

    Hosts that refuse connections leave the round robin for a while, which is all the health checking a request
    without a pick needs. A panic threshold of 0 keeps Draining members out of it even when most are draining.
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
        outlier_detection=_leave_out_the_unreachable(
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
    """Write a pool's members as they stand; Draining ones answer to their name only (PROTOCOLS section 1)."""
    hosts = []
    for member in pool.members:
        host = endpoint_at(Address(host=member.address, port=member.port))
        if member.state is MemberState.DRAINING:
            host.health_status = HealthStatus.DRAINING
        hosts.append(host)
    return ClusterLoadAssignment(cluster_name=name, endpoints=[LocalityLbEndpoints(lb_endpoints=hosts)])


def _override_host() -> OverrideHost:
    """Take the router's candidates in order, from the header or the metadata; report which one served."""
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


def _leave_out_the_unreachable(**how_long_and_how_many: Any) -> OutlierDetection:
    """Leave a host out after one failed connection, whatever status it answers with: engines answer 5xx for reasons."""
    return OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_local_origin_success_rate=0,
        enforcing_consecutive_5xx=0,
        enforcing_consecutive_gateway_failure=0,
        enforcing_success_rate=0,
        **how_long_and_how_many,
    )


def _notice_lost_hosts() -> UpstreamConnectionOptions:
    """Close connections to a host that is gone without a word (a lost node), else silent as one that computes."""
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
