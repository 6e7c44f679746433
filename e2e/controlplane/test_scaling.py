"""`kubectl apply`, ready, first request; `kubectl scale` up and down under streams: no failed request, none cut."""

import pytest

from controlplane.product import Product, pool_manifest
from harness.traffic import failed, tally
from harness.waiting import until


async def test_apply_ready_first_request(product: Product) -> None:
    await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=2))
    await product.until_active(2)
    await product.open_gateway()
    traffic = product.traffic(streams=2, plain=1, tokens=5)
    async with traffic.running():
        await traffic.flowing(6)
    assert failed(traffic.exchanges) == []
    assert all(each.routed for each in traffic.exchanges if each.status)


@pytest.mark.timeout(300, func_only=True)
async def test_scaling_under_streams_fails_no_request_and_cuts_none(product: Product) -> None:
    await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=3))
    await product.until_active(3)
    await product.open_gateway()
    traffic = product.traffic(streams=12, plain=3, tokens=150)
    async with traffic.running():
        await traffic.streaming(8)
        for size in (4, 2, 3, 1):
            await product.kubectl("scale", "dmpool/qwen", f"--replicas={size}")
            await product.until_active(size)
            await traffic.flowing(10)

        async def gone() -> bool:
            return set(await product.pods()) == {"qwen-0"}

        await until(gone, "only qwen-0 is left", timeout_s=60.0)
    print(f"scaling 3 -> 4 -> 2 -> 3 -> 1 under 15 clients: {dict(tally(traffic.exchanges))}")
    assert failed(traffic.exchanges) == []
