"""Tests that a pool of a thousand pods converges and shrinks.

The test prints the time per reconcile (bench/results/operator.md).

The kubelet's fake pods have a status without processes. The control plane, operator and routers are real.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controlplane.product import Operator, Product, pool_manifest
from harness.resources import resident_mib
from harness.waiting import until

PODS = 1000
FEWER = 998
# The polling interval is long, because each poll of a thousand members adds load.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Return an operator's number of reconciles and their total time."""

    count: float
    seconds: float

    def since(self, before: "Passes") -> str:
        count = self.count - before.count
        return f"{count:.0f} passes, {1000 * (self.seconds - before.seconds) / count:.0f} ms each on average"


@pytest.mark.timeout(600, func_only=True)
async def test_pool_of_a_thousand_pods_converges_and_shrinks(product: Product) -> None:
    operator = await product.operator("operator-0", "--log-level", "info")
    manifest = pool_manifest("qwen", product.namespace, replicas=PODS)
    template = manifest["spec"]["workload"]["template"]
    template["metadata"] = {"annotations": {"kubelet.dualmap.dev/fake": "true"}}
    before = await passes(operator)
    started_s = asyncio.get_running_loop().time()
    await product.apply(manifest)
    await in_ring(product, PODS)
    converged_s = asyncio.get_running_loop().time() - started_s
    made = await passes(operator)
    await product.kubectl("scale", "dmpool/qwen", f"--replicas={FEWER}")
    await in_ring(product, FEWER)
    shrunk = await passes(operator)
    print(
        f"{PODS} pods in the ring after {converged_s:.0f} s: {made.since(before)};"
        f" then {PODS} -> {FEWER}: {shrunk.since(made)};"
        f" the operator's memory {resident_mib(operator.pid):.0f} MiB"
    )
    states = Counter((await product.states()).values())
    assert states == {"Active": FEWER}


async def in_ring(product: Product, count: int) -> None:
    async def all_active() -> bool:
        await asyncio.sleep(LOOK_S)
        status = (await product.pool()).get("status", {})
        members = len(status.get("ring", {}).get("members", ()))
        return (status.get("inRing"), status.get("replicas"), members) == (count, count, count)

    await until(all_active, f"{count} pods are in the ring", timeout_s=500.0)


async def passes(operator: Operator) -> Passes:
    url = f"http://127.0.0.1:{operator.ports['metrics']}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        page = await response.text()
    samples = Counter[str]()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            samples[sample.name] += sample.value
    name = "dualmap_operator_reconcile_seconds"
    return Passes(count=samples[f"{name}_count"], seconds=samples[f"{name}_sum"])
