"""The operator is killed at every step of a scale-down under streams, and another goes on where it stopped."""

from collections.abc import Callable
from typing import Any

import pytest

from controlplane.product import Product, pool_manifest
from harness.traffic import failed, tally

Status = dict[str, Any]


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
async def test_a_drain_survives_operators_killed_at_each_of_its_steps(product: Product) -> None:
    operator = await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=3))
    await product.until_active(3)
    await product.open_gateway()
    traffic = product.traffic(streams=8, plain=2, tokens=150)
    version = 0
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
            await product.kubectl("scale", "dmpool/qwen", "--replicas=3")
            await product.until_active(3)
    print(f"operator killed at {len(STEPS)} steps of a scale-down: {dict(tally(traffic.exchanges))}")
    assert failed(traffic.exchanges) == []


@pytest.mark.timeout(180, func_only=True)
async def test_a_larger_wish_takes_a_busy_victim_back(product: Product) -> None:
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


@pytest.mark.timeout(180, func_only=True)
async def test_two_operators_one_acts_and_the_other_takes_over(product: Product) -> None:
    first = await product.operator("operator-a", "--leader-election")
    await product.apply(pool_manifest("qwen", product.namespace, replicas=1))
    await product.until_active(1)
    second = await product.operator("operator-b", "--leader-election")
    assert await second.healthy()
    written = len(_writes(product))
    await first.kill()
    await product.kubectl("scale", "dmpool/qwen", "--replicas=2")
    await product.until_active(2)
    assert len(_writes(product)) > written
    second.terminate()
    assert await second.wait() == 0
    leases = await product.kubectl("get", "leases", "-n", "dualmap-system", "-o", "name")
    assert len(leases.split()) == 1


def _writes(product: Product) -> list[dict[str, Any]]:
    """What the operator's account wrote to pools and pods, by the audit log."""
    return [
        entry
        for entry in product.cluster.audit()
        if entry["user"]["username"].endswith(":dualmap-operator")
        and entry["verb"] in ("create", "patch", "update", "delete")
        and entry["objectRef"]["resource"] != "leases"
    ]
