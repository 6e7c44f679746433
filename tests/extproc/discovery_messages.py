"""Envoy's messages on a discovery stream and the content of the answers, for the tests of discovery."""

from dataclasses import replace

from dualmap.pools.pool import Member, Model, Pool
from dualmap_extproc.names import CLUSTER_LOAD_ASSIGNMENT_TYPE
from dualmap_extproc.wire import discovery_pb2

QWEN, LLAMA = "llm/qwen", "llm/llama"


def pool(name: str = "qwen", count: int = 2, **changes: object) -> Pool:
    members = tuple(Member(id=f"{name}-{n}", address=f"10.0.0.{n + 1}", port=8000) for n in range(count))
    whole = Pool(namespace="llm", name=name, model=Model(name=name), members=members)
    return replace(whole, **changes)  # type: ignore[arg-type]  # the fields differ in type


def request(
    *names: str,
    of: str = CLUSTER_LOAD_ASSIGNMENT_TYPE,
    nonce: str = "",
    version: str = "",
    error: str = "",
) -> discovery_pb2.DiscoveryRequest:
    message = discovery_pb2.DiscoveryRequest(
        resource_names=names, type_url=of, response_nonce=nonce, version_info=version
    )
    message.node.id = "envoy-1"
    if error:
        message.error_detail.message = error
    return message


def answer_to(
    response: discovery_pb2.DiscoveryResponse, *names: str, error: str = ""
) -> discovery_pb2.DiscoveryRequest:
    """Return an ACK, or with ``error`` a NACK."""
    version = "" if error else response.version_info
    return request(*names, of=response.type_url, nonce=response.nonce, version=version, error=error)


def hosts(response: discovery_pb2.DiscoveryResponse) -> dict[str, list[str]]:
    """Return the endpoints of each resource in a response."""
    found = {}
    for resource in response.resources:
        assert resource.type_url == response.type_url == CLUSTER_LOAD_ASSIGNMENT_TYPE
        assignment = discovery_pb2.ClusterLoadAssignment.FromString(resource.value)
        found[assignment.cluster_name] = [
            f"{host.endpoint.address.socket_address.address}:{host.endpoint.address.socket_address.port_value}"
            for locality in assignment.endpoints
            for host in locality.lb_endpoints
        ]
    return found
