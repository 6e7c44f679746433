"""Tests that a fault of one pool changes nothing for another pool of the same routers, Envoy and Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from harness.documents import chat, document, prompt_of
from harness.replicas import Replicas
from harness.stack import Engine
from harness.traffic import Incident, Traffic, failed
from redis_server import RedisServer, redis_server

pytestmark = pytest.mark.asyncio(loop_scope="session")

BROKEN, SOUND = "broken", "sound"
REQUESTS = 40


@dataclass(frozen=True, slots=True)
class TwoPools:
    """Two routers that share a Redis, one Envoy, and two engines for each pool; the tests break the pool BROKEN."""

    replicas: Replicas
    engines: list[Engine]
    redis: RedisServer

    def traffic(self, pool: str) -> Traffic:
        """Return clients of a pool."""

        def body(number: int) -> dict[str, Any]:
            return chat(pool, prompt_of(3, seed=f"prefix {number % 8}") + f" question {number}", max_tokens=30)

        return Traffic(lambda: self.replicas.envoy.url, body, streams=4, plain=2)

    def spoil(self) -> None:
        """Replace the keys of the pool BROKEN in Redis with invalid data."""
        with self.redis.admin as admin:
            for key in admin.scan_iter(match=f"*{{llm/{BROKEN}}}*"):
                admin.delete(key)
                admin.set(key, b"not a stream")


def engine(directory: Path, pool: str, number: int) -> Engine:
    # Twice the real speed, so that a request takes about half a second.
    arguments = ("--model", f"{pool}-model", "--speed", "2")
    return Engine(directory=directory, name=f"{pool}-{number}", arguments=arguments)


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="pools")
async def _pools(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TwoPools]:
    directory = tmp_path_factory.mktemp("two-pools")
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_server(directory / "redis"))
        engines = {pool: [engine(directory, pool, number) for number in range(2)] for pool in (BROKEN, SOUND)}
        await asyncio.gather(*(stack.enter_async_context(each) for some in engines.values() for each in some))
        documents = {pool: document(pool, [each.member for each in some]) for pool, some in engines.items()}
        replicas = Replicas(documents, directory=directory, router_arguments=("--redis", redis.url))
        yield TwoPools(await stack.enter_async_context(replicas), engines[BROKEN], redis)


@asynccontextmanager
async def undisturbed(pools: TwoPools, fault: str) -> AsyncIterator[tuple[Traffic, Incident]]:
    """Run traffic of both pools while the context's body breaks and repairs the pool BROKEN, and check the pool SOUND.

    Yields the traffic of the pool SOUND, and the requests of the pool BROKEN around the fault.
    """
    broken, sound = pools.traffic(BROKEN), pools.traffic(SOUND)
    async with broken.running(), sound.running():
        await asyncio.gather(broken.streaming(2), sound.streaming(2))
        incident, others = broken.incident(), sound.incident()
        yield sound, incident
        await asyncio.gather(broken.flowing(), sound.flowing())
    incident.report(f"{fault}: requests of the pool")
    others.report(f"{fault}: requests of the other pool")
    assert failed(others.everyone) == []
    assert all(each.routed for each in others.later)
    await pools.replicas.wait_for_rest()


async def test_killed_engines_fail_no_request_of_another_pool(pools: TwoPools) -> None:
    async with undisturbed(pools, "engines of a pool killed") as (sound, incident):
        await asyncio.gather(*(each.kill() for each in pools.engines))
        await sound.flowing(REQUESTS)
        await asyncio.gather(*(each.start() for each in pools.engines))
    assert {each.status for each in failed(incident.later)} == {503}


async def test_hung_engines_delay_no_request_of_another_pool(pools: TwoPools) -> None:
    async with undisturbed(pools, "engines of a pool hang") as (sound, incident):
        for each in pools.engines:
            each.pause()
        await sound.flowing(REQUESTS)
        waiting = sum(each.outcome is None for each in incident.everyone)
        for each in pools.engines:
            each.resume()
    assert waiting > 0
    assert failed(incident.everyone) == []


async def test_invalid_redis_data_of_a_pool_disturbs_no_other(pools: TwoPools) -> None:
    stop = asyncio.Event()

    async def keep_spoilt() -> None:
        while not stop.is_set():
            await asyncio.to_thread(pools.spoil)
            await asyncio.sleep(0.05)

    async with undisturbed(pools, "invalid data of a pool in Redis") as (sound, incident):
        spoiling = asyncio.create_task(keep_spoilt())
        await sound.flowing(REQUESTS)
        for number in range(2):
            await pools.replicas.wait_for_metric("dualmap_pool_peers", 1, of=number, pool=f"llm/{SOUND}")
        stop.set()
        await spoiling
    assert failed(incident.everyone) == []
    assert all(each.routed for each in incident.later)
