"""Tests `kubectl apply` to the first request, and `kubectl scale` under streams: no request fails, and no stream
breaks.
"""

import pytest

from controlplane.history import Shrink
from controlplane.product import Product, pool_manifest
from harness.traffic import failed, tally
from harness.waiting import until

pytestmark = pytest.mark.always_picked


async def test_new_pool_becomes_ready_and_serves_first_requests(product: Product) -> None:
    await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=2))
    await product.until_in_ring(2)
    await product.open_gateway()
    traffic = product.traffic(streams=2, plain=1, tokens=5)
    async with traffic.running():
        await traffic.flowing(6)
    assert failed(traffic.exchanges) == []
    assert all(each.routed for each in traffic.exchanges if each.status)


@pytest.mark.timeout(300, func_only=True)
async def test_scaling_under_open_streams_fails_no_request(product: Product) -> None:
    # Only the operator's drain protects streams, because these engines end at SIGTERM. Only routers report requests in
    # flight, because this engine type has other metrics. The operator discovers the routers by a Service, as in
    # production.
    await product.publish_routers()
    await product.operator("operator-0", finds_routers=True)
    engine = {"type": "TensorRTLLM"}
    await product.apply(pool_manifest("qwen", product.namespace, replicas=3, abrupt=True, engine=engine))
    await product.until_active(3)
    await product.open_gateway()
    traffic = product.traffic(streams=12, plain=3, tokens=150)
    async with product.recording() as history, traffic.running():
        await traffic.streaming(8)
        for size in (4, 2, 3, 1):
            await product.kubectl("scale", "dmpool/qwen", f"--replicas={size}")
            await product.until_in_ring(size)
            await traffic.flowing(10)

        async def gone() -> bool:
            return set(await product.pods()) == {"qwen-0"}

        await until(gone, "only qwen-0 is left", timeout_s=60.0)
    print(f"scaling 3 -> 4 -> 2 -> 3 -> 1 under 15 clients: {dict(tally(traffic.exchanges))}")
    assert failed(traffic.exchanges) == []
    assert history.shrinks() == [
        Shrink(before=4, after=2, victims=("Draining", "Draining")),
        Shrink(before=3, after=1, victims=("Draining", "Draining")),
    ]
    reasons = await product.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}")
    assert "DrainTimedOut" not in reasons.split(), "drains timed out: the routers' reports were missing"
    # The status has the routers' traffic figures.
    await product.until(lambda status: {"cacheHitRate", "sloAttainment"} <= status.get("traffic", {}).keys())
