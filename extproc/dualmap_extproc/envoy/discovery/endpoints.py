"""Converts pools to Envoy's endpoints: one ClusterLoadAssignment per pool, by its cluster's name."""

from collections.abc import Iterable

from dualmap.pools.claims import addressed_pools
from dualmap.pools.pool import MemberState, Pool
from dualmap_extproc.names import ONLY_POOL, cluster_name
from dualmap_extproc.wire import base_pb2, discovery_pb2


def load_assignment(pool: Pool) -> discovery_pb2.ClusterLoadAssignment:
    """Return a pool's members as Envoy's hosts.

    Envoy sends a request to a DRAINING host only if the request names it (sessions, retries), never by the fallback
    policy. Joining members are healthy hosts for Envoy: the rings limit the number of requests that joining members
    get.
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


def assignments_of(pools: Iterable[Pool]) -> dict[str, bytes]:
    """Return all pools' assignments by cluster name, serialized once for every Envoy.

    If clients address only one pool, ONLY_POOL has its members. With several pools, only a router can find the pool of
    a request. ONLY_POOL is then absent, and Envoy rejects a request without a pick.
    """
    pools = tuple(pools)
    assignments = [load_assignment(pool) for pool in pools]
    addressed = addressed_pools(pools)
    if len(addressed) == 1:
        endpoints = load_assignment(addressed[0]).endpoints
        assignments.append(discovery_pb2.ClusterLoadAssignment(cluster_name=ONLY_POOL, endpoints=endpoints))
    return {each.cluster_name: each.SerializeToString() for each in assignments}


def no_endpoints(cluster: str) -> bytes:
    """Return the assignment of a cluster without endpoints."""
    return discovery_pb2.ClusterLoadAssignment(cluster_name=cluster).SerializeToString()
