"""A real HorizontalPodAutoscaler on the pool itself, driven by what the routers say of their traffic."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from controlplane import external_metrics
from controlplane.cluster import Cluster
from controlplane.product import Product, pool_manifest
from harness.traffic import failed, tally

METRIC = "dualmap_pool_desired_replicas"


@pytest.mark.timeout(420, func_only=True)
async def test_load_grows_the_pool_and_its_end_shrinks_it_without_a_lost_request(
    product: Product, cluster: Cluster, tmp_path: Path
) -> None:
    await product.operator()
    # So slow that a few clients ask for more than one instance.
    await product.apply(pool_manifest("qwen", product.namespace, replicas=1, engine={"prefillTokensPerSecond": 300}))
    await product.until_active(1)
    await product.open_gateway()
    ports = [router.ports["metrics"] for router in product.routers]

    def wish(namespace: str, metric: str, labels: dict[str, str]) -> float | None:
        return external_metrics.total(ports, metric, f"{namespace}/qwen")

    sizes: list[int] = []
    traffic = product.traffic(streams=10, plain=2, tokens=40)
    with ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, external_metrics.serving(cluster, tmp_path, wish))
        await product.apply(_hpa(product.namespace))
        async with traffic.running():
            await product.until(lambda status: status.get("inRing", 0) >= 2, timeout_s=150.0)
            sizes.append((await product.pool())["status"]["inRing"])
        await product.until_active(1, timeout_s=200.0)
    print(f"HPA on {METRIC}: 1 -> {sizes[0]} -> 1: {dict(tally(traffic.exchanges))}")
    assert failed(traffic.exchanges) == []


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
