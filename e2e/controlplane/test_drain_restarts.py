"""Tests that a drain survives killed operators at each step, an API server restart and a silent watch."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.history import Shrink
from controlplane.product import Product, pool_manifest
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.control_plane.silent_proxy import SilentProxy
from harness.traffic import failed, tally

pytestmark = pytest.mark.always_picked

Status = dict[str, Any]
# The operator ends a watch after 55 s without data.
NOTICED_S = 90.0


def _draining(status: Status) -> bool:
    return any(member["state"] == "Draining" for member in status.get("ring", {}).get("members", []))


def _shrinking(status: Status) -> bool:
    return status.get("replicas") == 2 or len(status.get("ring", {}).get("members", [])) < 3


STEPS: dict[str, Callable[[Status], bool]] = {
    "as it is asked": lambda status: True,
    "while members drain": _draining,
    "while the StatefulSet shrinks": _shrinking,
}


@pytest.mark.timeout(240, func_only=True)
async def test_drain_completes_with_operator_killed_at_each_step(product: Product) -> None:
    operator = await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=3))
    await product.until_active(3)
    await product.open_gateway()
    traffic = product.traffic(streams=8, plain=2, tokens=150)
    version = 0
    last = len(STEPS) - 1
    async with traffic.running():
        await traffic.streaming(6)
        for number, (step, reached) in enumerate(STEPS.items()):
            await product.kubectl("scale", "dmpool/qwen", "--replicas=2")
            await product.until(reached)
            await operator.kill()
            await traffic.flowing(5)
            operator = await product.operator(f"operator-{number + 1}")
            await product.until_active(2)
            ring = (await product.pool())["status"]["ring"]
            assert ring["version"] > version, step
            version = ring["version"]
            if number < last:
                await product.kubectl("scale", "dmpool/qwen", "--replicas=3")
                await product.until_active(3)
    print(f"operator killed at {len(STEPS)} steps of a scale-down: {dict(tally(traffic.exchanges))}")
    assert failed(traffic.exchanges) == []


@pytest.mark.timeout(180, func_only=True)
async def test_drain_cancelled_by_scale_up_keeps_the_busy_pod(product: Product) -> None:
    await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=2))
    await product.until_active(2)
    await product.open_gateway()
    traffic = product.traffic(streams=6, plain=0, tokens=400)
    async with traffic.running():
        await traffic.streaming(6)
        await product.kubectl("scale", "dmpool/qwen", "--replicas=1")
        await product.until(_draining)
        uid = (await product.pods())["qwen-1"]["metadata"]["uid"]
        await product.kubectl("scale", "dmpool/qwen", "--replicas=2")
        await product.until_active(2)
    assert uid == (await product.pods())["qwen-1"]["metadata"]["uid"], "the pod was replaced"
    assert failed(traffic.exchanges) == []


@pytest.mark.timeout(300, func_only=True)
async def test_drain_completes_after_api_restart_and_silent_watch(
    product: Product, cluster: Cluster, tmp_path: Path
) -> None:
    async with SilentProxy().running() as proxy:
        behind = proxy.kubeconfig(tmp_path / "proxy", product.kubeconfig("dualmap-operator"))
        operator = await product.operator(kubeconfig=behind)
        await product.apply(pool_manifest("qwen", product.namespace, replicas=3, abrupt=True))
        await product.until_active(3)
        await product.open_gateway()
        traffic = product.traffic(streams=8, plain=2, tokens=400)
        async with product.recording() as history, traffic.running():
            await traffic.streaming(8)
            await product.kubectl("scale", "dmpool/qwen", "--replicas=2")
            await product.until(_draining)
            assert history.shrinks() == []
            await asyncio.to_thread(cluster.restart_apiserver)
            await product.until_active(2)
            await traffic.streaming(6)
            proxy.freeze()
            await product.kubectl("scale", "dmpool/qwen", "--replicas=1")
            await product.until(_draining, timeout_s=NOTICED_S)
            await product.until_active(1)
        assert operator.returncode is None
        # The operator stops before the proxy, because it needs the API server to stop.
        assert await operator.stop() == 0
    print(f"API server restarted and a watch cut during drains: {dict(tally(traffic.exchanges))}")
    assert failed(traffic.exchanges) == []
    assert history.shrinks() == [
        Shrink(before=3, after=2, victims=("Draining",)),
        Shrink(before=2, after=1, victims=("Draining",)),
    ]
