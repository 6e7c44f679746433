"""A thousand pods in one pool: it converges, and what a pass takes is reported (bench/results/operator.md)."""

from collections import Counter

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controlplane.product import Operator, Product, pool_manifest
from harness.resources import resident_mib

PODS = 1000


@pytest.mark.timeout(600, func_only=True)
async def test_a_thousand_pods_are_one_ring(product: Product) -> None:
    operator = await product.operator()
    manifest = pool_manifest("qwen", product.namespace, replicas=PODS)
    template = manifest["spec"]["workload"]["template"]
    template["metadata"] = {"annotations": {"kubelet.dualmap.dev/fake": "true"}}
    await product.apply(manifest)
    await product.until(lambda status: status.get("inRing") == PODS, timeout_s=500.0)
    figures = await _figures(operator)
    print(
        f"{PODS} pods: {figures['passes']:.0f} passes, {1000 * figures['mean_s']:.0f} ms each on average,"
        f" operator's memory {figures['memory_mib']:.0f} MiB"
    )
    assert (await product.pool())["status"]["replicas"] == PODS


async def _figures(operator: Operator) -> dict[str, float]:
    url = f"http://127.0.0.1:{operator.ports['metrics']}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        page = await response.text()
    samples = Counter[str]()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            samples[sample.name] += sample.value
    passes = samples["dualmap_operator_reconcile_seconds_count"]
    return {
        "passes": passes,
        "mean_s": samples["dualmap_operator_reconcile_seconds_sum"] / passes,
        "memory_mib": resident_mib(operator.pid),
    }
