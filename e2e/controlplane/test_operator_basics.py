"""The operator on a real control plane: a pool becomes pods and a status that is true, and stays so with nothing done."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import until

from controlplane.cluster import Cluster
from controlplane.kubelet.process_kubelet import ProcessKubelet
from controlplane.product import Product, pool_manifest


@pytest.fixture
async def product(cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> AsyncIterator[Product]:
    async with Product(cluster, tmp_path, routers=1) as product:
        yield product


def condition(status: dict[str, Any], kind: str) -> str:
    return {each["type"]: each["status"] for each in status.get("conditions", [])}.get(kind, "absent")


async def test_a_pool_becomes_ready_pods_and_says_so(product: Product) -> None:
    await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=2))
    await product.until_active(2)

    await product.until(lambda status: status.get("readyReplicas") == 2 and condition(status, "Available") == "True")
    pool = await product.pool()
    status = pool["status"]
    assert status["replicas"] == 2
    assert status["inRing"] == 2
    assert status["selector"] == "serving.dualmap.dev/pool=qwen"
    assert status["observedGeneration"] == pool["metadata"]["generation"]
    assert pool["metadata"]["finalizers"] == ["serving.dualmap.dev/drain"]
