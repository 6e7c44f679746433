from dualmap.pools.pool import Member, MemberState
from dualmap_extproc.envoy.discovery.endpoints import load_assignment
from dualmap_extproc.wire import base_pb2, discovery_pb2
from extproc.discovery_messages import QWEN, pool


def test_endpoint_health_is_derived_from_the_member_state() -> None:
    members = tuple(
        Member(id=state, address=f"10.0.0.{n}", port=8000, state=state) for n, state in enumerate(MemberState)
    )
    assignment = load_assignment(pool(members=members))
    assert [host.health_status for host in assignment.endpoints[0].lb_endpoints] == [
        base_pb2.HEALTHY,
        base_pb2.HEALTHY,
        base_pb2.DRAINING,
    ]


def test_endpoint_ipv6_address_has_no_brackets() -> None:
    members = (Member(id="a", address="fd00::1", port=8000),)
    (host,) = load_assignment(pool(members=members)).endpoints[0].lb_endpoints
    assert host.endpoint.address.socket_address.address == "fd00::1"


def test_empty_pool_has_no_endpoints() -> None:
    assert load_assignment(pool(count=0)) == discovery_pb2.ClusterLoadAssignment(cluster_name=QWEN)
