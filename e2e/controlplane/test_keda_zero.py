"""Tests that real KEDA scales a pool to zero and back; the new instance answers the queued first request."""

from typing import Any

import aiohttp
import pytest

from controlplane import keda
from controlplane.product import MODEL, Product, pool_manifest
from harness.deployment import CHAT
from harness.traffic import failed
from harness.waiting import until

# The polling interval is longer than a test, so KEDA reacts only to pushed updates of the router.
SELDOM_S = 600
START_S = 60.0


@pytest.mark.timeout(420, func_only=True)
async def test_keda_scales_from_zero_on_request_and_back_to_zero(product: Product, scaler: str) -> None:
    await start_empty(product, maxWait=f"{START_S:.0f}s")
    told = keda.scaled_object(product.namespace, scaler=scaler, minReplicaCount=0, pollingInterval=SELDOM_S)
    async with keda.scaling(product, told):
        await until(lambda: ready(product), "KEDA knows the metric", timeout_s=60.0)
        assert (await product.pool())["spec"]["replicas"] == 0
        traffic = product.traffic(streams=1, plain=0, tokens=5)
        async with traffic.running():
            await traffic.flowing(1, timeout_s=START_S)
        assert failed(traffic.exchanges) == []
        await product.until_active(1)
        reasons = await product.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}")
        assert "KEDAScaleTargetActivated" in reasons.split()

        async with product.recording() as history:
            await product.apply(keda.scaled_object(product.namespace, scaler=scaler, minReplicaCount=0))
            await product.until_active(0, timeout_s=180.0)
        assert [(each.after, each.victims) for each in history.shrinks()] == [(0, ("Draining",))]


@pytest.mark.timeout(300, func_only=True)
async def test_request_at_zero_replicas_with_short_max_wait_gets_503(product: Product, scaler: str) -> None:
    await start_empty(product, maxWait="200ms")
    told = keda.scaled_object(product.namespace, scaler=scaler, minReplicaCount=0, pollingInterval=SELDOM_S)
    async with keda.scaling(product, told), aiohttp.ClientSession() as session:
        await until(lambda: ready(product), "KEDA knows the metric", timeout_s=60.0)
        status, headers = await ask(product, session)
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        # The rejected request still activated the pool.
        await product.until_active(1)

        async def answered() -> bool:
            return (await ask(product, session))[0] == 200

        await until(answered, "the instance that the first request activated answers", timeout_s=START_S)


async def start_empty(product: Product, **queue: Any) -> None:
    """Create a pool without instances and with a queue, and open the gateway."""
    await product.operator()
    routing = {"queue": {"holdWhenEmpty": True, **queue}}
    await product.apply(pool_manifest("qwen", product.namespace, replicas=0, abrupt=True, routing=routing))
    await product.until(lambda status: status.get("replicas") == 0)
    await product.open_gateway()


async def ready(product: Product) -> bool:
    """Return whether KEDA has created its HPA and receives the scaler's answers."""
    known = await product.kubectl("get", "scaledobject/qwen", "-o", "jsonpath={.status.externalMetricNames}")
    return known != ""


async def ask(product: Product, session: aiohttp.ClientSession) -> tuple[int, dict[str, str]]:
    """Send a short request; return the response's status and headers (lower case)."""
    assert product.envoy is not None
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    async with session.post(product.envoy.url + CHAT, json=body) as response:
        await response.read()
        return response.status, {name.lower(): value for name, value in response.headers.items()}
