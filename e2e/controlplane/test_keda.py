"""Tests that real KEDA scales the pool by a router's scaler, and keeps the size while the scaler is down."""

import json
from typing import Any

import pytest

from controlplane import keda, waves
from controlplane.product import Product
from harness.traffic import failed
from harness.waiting import until

HPA = "keda-hpa-qwen"
HPA_CONTROLLER = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
# The HPA queries every 2 s and can scale down at once.
LOOKS_IN_VAIN = 10


@pytest.mark.timeout(480, func_only=True)
async def test_keda_scale_up_and_down_loses_no_request(product: Product, scaler: str) -> None:
    await product.operator()
    await product.apply(waves.pool(product.namespace))
    await product.until_active(1)
    await product.open_gateway()
    async with keda.scaling(product, keda.scaled_object(product.namespace, scaler=scaler)):
        wave = await waves.ride(product)
    wave.say("KEDA")
    assert failed(wave.exchanges) == []
    assert wave.shrinks
    assert {state for each in wave.shrinks for state in each.victims} == {"Draining"}


@pytest.mark.timeout(420, func_only=True)
async def test_keda_without_scaler_removes_no_instance(product: Product, scaler: str) -> None:
    await product.operator()
    await product.apply(waves.pool(product.namespace))
    await product.until_active(1)
    await product.open_gateway()
    async with keda.scaling(product, keda.scaled_object(product.namespace, scaler=scaler)):
        async with waves.flood(product).running():
            await product.until(lambda status: status.get("inRing", 0) >= 2, timeout_s=120.0)
            for router in product.routers:
                await router.kill()
        size = (await product.pool())["spec"]["replicas"]
        await until(lambda: _blind(product), "the HPA misses its metric", timeout_s=60.0)
        looked = _looks(product)

        async def in_vain() -> bool:
            return _looks(product) >= looked + LOOKS_IN_VAIN

        await until(in_vain, f"the HPA looks {LOOKS_IN_VAIN} times", timeout_s=90.0)
        assert await _blind(product)
        assert (await product.pool())["spec"]["replicas"] == size >= 2
        # When the routers run again, the metric returns and reports no load.
        for router in product.routers:
            router.keep_ports()
            await router.start()
        await product.until_active(1, timeout_s=180.0)


async def _blind(product: Product) -> bool:
    """Return whether the HPA's status reports a missing metric."""
    hpa: dict[str, Any] = json.loads(await product.kubectl("get", "hpa", HPA, "-o", "json"))
    conditions = hpa.get("status", {}).get("conditions", [])
    return any(each["type"] == "ScalingActive" and each["status"] == "False" for each in conditions)


def _looks(product: Product) -> int:
    """Return how often the HPA controller has queried the metric."""
    return sum(
        entry["user"]["username"] == HPA_CONTROLLER
        and entry["objectRef"].get("apiGroup") == "external.metrics.k8s.io"
        and entry["objectRef"].get("namespace") == product.namespace
        for entry in product.audit()
        if entry["stage"] == "ResponseComplete"
    )
