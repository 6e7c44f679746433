"""Tests that a real HorizontalPodAutoscaler scales the pool by the routers' metrics."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from controlplane import external_metrics, waves
from controlplane.product import Product
from emulated_cluster.control_plane.cluster import Cluster
from harness.traffic import failed

pytestmark = pytest.mark.always_picked

METRIC = "dualmap_pool_desired_replicas"


@pytest.mark.timeout(480, func_only=True)
async def test_hpa_scale_up_and_down_loses_no_request(product: Product, cluster: Cluster, tmp_path: Path) -> None:
    await product.operator()
    await product.apply(waves.pool(product.namespace))
    await product.until_active(1)
    await product.open_gateway()
    ports = [router.ports["metrics"] for router in product.routers]

    def wish(namespace: str, metric: str, labels: dict[str, str]) -> float | None:
        return external_metrics.total(ports, metric, f"{namespace}/qwen")

    with ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, external_metrics.serving(cluster, tmp_path, wish))
        await product.apply(_hpa(product.namespace))
        wave = await waves.ride(product)
    wave.say(f"HPA on {METRIC}")
    assert failed(wave.exchanges) == []
    assert wave.shrinks
    assert {state for each in wave.shrinks for state in each.victims} == {"Draining"}


def _hpa(namespace: str) -> dict[str, object]:
    target = {"apiVersion": "serving.dualmap.dev/v1alpha1", "kind": "InferencePool", "name": "qwen"}
    metric = {"metric": {"name": METRIC}, "target": {"type": "AverageValue", "averageValue": "1"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "qwen", "namespace": namespace},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": 1,
            "maxReplicas": 3,
            "metrics": [{"type": "External", "external": metric}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }
