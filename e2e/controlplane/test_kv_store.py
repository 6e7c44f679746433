"""Tests that a pool's condition says whether the routers ask its KV store, which goes down and comes back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.product import Product, pool_manifest
from harness.stack import Engine
from harness.traffic import failed, tally
from harness.waiting import until
from redis_server import RedisServer

pytestmark = pytest.mark.always_picked

# A store that is left alone is tried again after 30 s, and the operator asks the routers every 15 s.
_WITHIN_S = 120.0


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Iterator[RedisServer]:
    store = RedisServer(tmp_path / "store")
    store.start()
    yield store
    store.kill()


def available(status: dict[str, Any]) -> tuple[str, str, str]:
    """Return the status, reason and message of the condition; empty texts without it."""
    found = {each["type"]: each for each in status.get("conditions", [])}.get("KvStoreAvailable", {})
    return found.get("status", ""), found.get("reason", ""), found.get("message", "")


def new_prompt(number: int) -> str:
    """Return a prompt of several chunks, which no other request shares."""
    return f"{number} " + "All work and no play makes Jack a dull boy. " * 20


async def until_asked(store: RedisServer) -> None:
    """Wait until the routers have asked a store that was started anew."""

    async def asked() -> bool:
        return "cmdstat_zrange" in store.admin.info("commandstats")

    await until(asked, "the store is asked", timeout_s=_WITHIN_S)


@pytest.mark.timeout(400, func_only=True)
async def test_condition_of_a_kv_store_follows_it_down_and_up_and_requests_go_on(
    product: Product, store: RedisServer, tmp_path: Path
) -> None:
    async with Engine(directory=tmp_path, name="renderer") as renderer:
        await product.operator()
        await product.apply(
            pool_manifest(
                "qwen",
                product.namespace,
                replicas=1,
                engine={"type": "vLLM", "tokenizer": {"source": "Renderer", "url": f"http://{renderer.endpoint}"}},
                # A second suffices also on a busy machine.
                kvStore={"type": "Redis", "endpoint": store.url, "chunkTokens": 16, "minTokens": 16, "timeout": "1s"},
            )
        )
        await product.until_in_ring(1)
        await product.open_gateway()
        traffic = product.traffic(streams=0, plain=2, tokens=1, prompt=new_prompt)
        async with traffic.running():
            await until_asked(store)
            await product.until(lambda status: available(status)[:2] == ("True", "Asked"))

            store.kill()
            await product.until(lambda status: available(status)[:2] == ("False", "LeftAlone"), timeout_s=_WITHIN_S)
            message = available((await product.pool())["status"])[2]
            assert f"do not ask the KV store at {store.url}: {store.url}: ConnectionError" in message

            store.start()
            await until_asked(store)
            await product.until(lambda status: available(status)[:2] == ("True", "Asked"), timeout_s=_WITHIN_S)
            await traffic.flowing(10)
    print(f"a KV store went down and came back: {dict(tally(traffic.exchanges))}")
    assert failed(traffic.exchanges) == []
    assert [each for each in traffic.exchanges if not each.routed] == []
