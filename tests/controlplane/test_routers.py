"""Tests of the routers' addresses from EndpointSlices."""

from typing import Any

from controlplane.fake_kube import Clock, Counts, FakeKube
from dualmap_operator.observe.routers import FixedRouters, ServiceRouters, read_slice
from dualmap_operator.observe.status_clients import RouterAddress


def endpoint(address: str, pod: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": pod}}


def endpoint_slice(*endpoints: dict[str, Any], port: str = "metrics") -> dict[str, Any]:
    return {"ports": [{"name": "grpc", "port": 9002}, {"name": port, "port": 9090}], "endpoints": list(endpoints)}


def test_router_list_includes_unready_routers() -> None:
    routers = read_slice(
        endpoint_slice(
            endpoint("10.0.0.1", "a", ready=True),
            endpoint("10.0.0.2", "b", ready=False, terminating=True),
            endpoint("10.0.0.3", "c"),
        )
    )

    assert routers == {
        "a": RouterAddress(host="10.0.0.1", port=9090, ready=True),
        "b": RouterAddress(host="10.0.0.2", port=9090, ready=False),
        "c": RouterAddress(host="10.0.0.3", port=9090, ready=True),
    }


def test_endpoint_slice_without_metrics_port_has_no_routers() -> None:
    assert read_slice(endpoint_slice(endpoint("10.0.0.1", "a"), port="http")) == {}


def test_dual_stack_router_is_listed_once() -> None:
    routers = ServiceRouters(
        FakeKube(),  # type: ignore[arg-type]  # stands for it
        Counts(),
        namespace="dualmap-system",
        name="dualmap-router",
        clock=Clock(),
    )
    routers.mirror.put((("dualmap-system", "six"), read_slice(endpoint_slice(endpoint("fd00::1", "a")))))
    routers.mirror.put((("dualmap-system", "four"), read_slice(endpoint_slice(endpoint("10.0.0.1", "a")))))

    assert routers.addresses() == (RouterAddress(host="10.0.0.1", port=9090),)


def test_routers_given_as_options_are_used_unchanged() -> None:
    assert FixedRouters([("localhost", 9090)]).addresses() == (RouterAddress(host="localhost", port=9090),)
