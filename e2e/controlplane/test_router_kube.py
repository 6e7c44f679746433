"""Tests that ``dualmap router --kube`` updates its members from a real API server's pools and pods.

No operator and no kubelet run. The tests write the status of pools like the operator, and the status of pods like a
kubelet, to control each step.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from controlplane.product import Product
from emulated_cluster.control_plane.cluster import Cluster
from harness.stack import Router
from harness.waiting import until

POOLS = "inferencepools"
SOON_S = 60.0


class Served:
    """A router of one namespace, and the pool and pods that a test writes to this namespace."""

    def __init__(self, product: Product, router: Router) -> None:
        self.product = product
        self.router = router

    async def publish(self, version: int, **states: str) -> None:
        """Write a ring like the operator. The keywords are the members' IDs, with ``_`` instead of ``-``."""
        members = [
            {
                "id": name.replace("_", "-"),
                "address": f"10.244.200.{number}",
                "port": 8000,
                "state": state,
                "weight": 100,
            }
            for number, (name, state) in enumerate(states.items(), start=1)
        ]
        status = {"selector": "app=qwen", "ring": {"version": version, "members": members}}
        await self.patch_status("dmpool/qwen", status)

    async def patch_status(self, name: str, status: dict[str, Any]) -> None:
        patch = json.dumps({"status": status})
        await self.product.kubectl("patch", name, "--subresource=status", "--type=merge", "-p", patch)

    async def pod_says(self, name: str, number: int, *, ready: bool) -> None:
        conditions = [
            {"type": kind, "status": str(ready), "lastTransitionTime": "2026-11-20T08:00:00Z"}
            for kind in ("ContainersReady", "Ready")
        ]
        address = f"10.244.200.{number}"
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}
        await self.patch_status(f"pod/{name}", status)

    async def create_pod(self, name: str, number: int) -> None:
        container = {"name": "engine", "image": "none"}
        # No node has this label, so no kubelet writes the pod's status.
        spec = {"containers": [container], "nodeSelector": {"dualmap.dev/nowhere": "true"}}
        metadata = {"name": name, "labels": {"app": "qwen"}}
        await self.product.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        await self.pod_says(name, number, ready=True)

    async def page(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.router.ports['metrics']}/pools/{self.product.namespace}/qwen"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            document: dict[str, Any] = await response.json()
        return document

    async def until_version(self, version: int, timeout_s: float = SOON_S) -> None:
        async def is_applied() -> bool:
            return (await self.page()).get("ring_version") == version

        await until(is_applied, f"the router has applied ring version {version}", timeout_s=timeout_s)

    async def states(self) -> dict[str, str]:
        return {each["id"]: each["state"] for each in (await self.page()).get("endpoints", [])}

    async def until_states(self, **states: str) -> None:
        wanted = {name.replace("_", "-"): state for name, state in states.items()}

        async def are_so() -> bool:
            return await self.states() == wanted

        await until(are_so, f"the router's members are {wanted}", timeout_s=SOON_S)

    async def until_watched(self) -> None:
        """Wait until the router has listed the pods, so that its watch reports every later change."""

        async def are_listed() -> bool:
            return await self.router.metric("dualmap_kube_lists_total", resource="pods") >= 1

        await until(are_listed, "the router has listed the pods", timeout_s=SOON_S)


def pool(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen", "namespace": namespace},
        "spec": {"model": {"name": "qwen-model"}, "workload": {"selector": {"matchLabels": {"app": "qwen"}}}},
    }


@asynccontextmanager
async def serving(cluster: Cluster, directory: Path) -> AsyncIterator[Served]:
    async with Product(cluster, directory, routers=0) as product:
        await product.apply(pool(product.namespace))
        kubeconfig = product.kubeconfig("dualmap-router")
        router = Router((), directory=directory, arguments=("--kube", "--namespace", product.namespace))
        router.argv = ["/usr/bin/env", f"KUBECONFIG={kubeconfig}", *router.argv]
        async with router:
            yield Served(product, router)


@pytest.fixture
async def served(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(cluster, tmp_path) as served:
        yield served


async def test_router_applies_a_published_ring(served: Served) -> None:
    await served.publish(1, qwen_0="Active", qwen_1="Active")
    await served.until_version(1)
    assert await served.states() == {"qwen-0": "Active", "qwen-1": "Active"}
    await served.publish(2, qwen_0="Active", qwen_1="Draining")
    await served.until_version(2)
    assert await served.states() == {"qwen-0": "Active", "qwen-1": "Draining"}


async def test_router_drains_unready_or_terminating_pods_without_operator(served: Served) -> None:
    for number, name in enumerate(("qwen-0", "qwen-1"), start=1):
        await served.create_pod(name, number)
    await served.publish(1, qwen_0="Active", qwen_1="Active")
    await served.until_version(1)
    await served.until_watched()
    await served.pod_says("qwen-0", 1, ready=False)
    await served.until_states(qwen_0="Draining", qwen_1="Active")
    await served.pod_says("qwen-0", 1, ready=True)
    await served.until_states(qwen_0="Active", qwen_1="Active")
    await served.product.kubectl("delete", "pod/qwen-1", "--wait=false")
    await served.until_states(qwen_0="Active", qwen_1="Draining")
    assert (await served.page())["ring_version"] == 1


async def test_router_serves_during_api_outage_and_catches_up_after(cluster: Cluster, served: Served) -> None:
    await served.publish(1, qwen_0="Active")
    await served.until_version(1)
    await asyncio.to_thread(cluster.stop_apiserver)
    try:

        async def is_noticed() -> bool:
            return await served.router.metric("dualmap_kube_errors_total", resource=POOLS, kind="unreached") >= 2

        await until(is_noticed, "the router has noticed that the API server is away", timeout_s=SOON_S)
        assert await served.states() == {"qwen-0": "Active"}
    finally:
        await asyncio.to_thread(cluster.start_apiserver)
    await served.publish(2, qwen_0="Active", qwen_1="Active")
    await served.until_version(2)


async def test_router_requests_only_resources_its_role_allows(cluster: Cluster, served: Served) -> None:
    await served.create_pod("qwen-0", 1)
    await served.publish(1, qwen_0="Active")
    await served.until_version(1)
    await served.until_watched()

    def asked() -> set[tuple[str, str, int]]:
        return {
            (entry["verb"], entry["objectRef"]["resource"], entry["responseStatus"]["code"])
            for entry in cluster.audit()
            if entry["user"].get("username", "") == "system:serviceaccount:dualmap-system:dualmap-router"
            and entry["objectRef"].get("namespace") == served.product.namespace
        }

    wanted = {(verb, resource, 200) for verb in ("list", "watch") for resource in (POOLS, "pods")}

    async def all_is_asked() -> bool:
        return await asyncio.to_thread(asked) == wanted

    await until(all_is_asked, f"the router has asked for {wanted}", timeout_s=SOON_S)
