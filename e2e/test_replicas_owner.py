"""Tests of three routers that know each other (``--peer``) behind one Envoy: one router decides for all of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from harness.replicas import Replicas
from harness.replicated_system import POOL, ReplicatedSystem
from harness.stack import Router
from harness.traffic import failed
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROUTERS = 3


@pytest_asyncio.fixture(loop_scope="session", name="replicas")
async def _replicas(system: ReplicatedSystem, tmp_path: Path) -> AsyncIterator[Replicas]:
    pools = {POOL: system.document(*system.engines)}
    async with Replicas(pools, directory=tmp_path / "mesh", routers=ROUTERS, peers=True) as replicas:
        await agreed(replicas)
        yield replicas


async def owner_at(router: Router) -> str:
    url = f"http://127.0.0.1:{router.ports['metrics']}/pools/llm/{POOL}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        owner: str = json.loads(await response.read())["owner"]
        return owner


async def agreed(replicas: Replicas, *, without: str = "") -> str:
    """Wait until all running routers but ``without`` name the same owner, one of them; return it."""
    asked = [each for each in replicas.routers if each.returncode is None and each.name != without]
    owners: set[str] = set()

    async def same() -> bool:
        nonlocal owners
        owners = {await owner_at(router) for router in asked}
        peers = [await router.metric("dualmap_peers") for router in asked]
        return len(owners) == 1 and owners <= {each.name for each in asked} and set(peers) == {len(asked) - 1}

    await until(same, "the routers agree on the owner")
    return owners.pop()


def number_of(replicas: Replicas, name: str) -> int:
    return next(number for number, each in enumerate(replicas.routers) if each.name == name)


async def answered(replicas: Replicas) -> float:
    results = [await each.metric("dualmap_remote_decisions_total", result="answered") for each in replicas.routers]
    return sum(results)


async def test_owner_decides_for_all_routers(system: ReplicatedSystem, replicas: Replicas) -> None:
    owner = await agreed(replicas)
    traffic = system.traffic(of=replicas)
    async with traffic.running():
        incident = traffic.incident()
        await traffic.flowing(60)
    assert failed(incident.everyone) == []
    assert await answered(replicas) > 0
    assert await agreed(replicas) == owner
    # On a busy machine, routers may lose each other for a moment. Another router then owns the pool.
    were_lost = any("Lost the connection" in router.output() for router in replicas.routers)
    for router in replicas.routers:
        assert await router.metric("dualmap_pool_owner", router=owner) == 1
        refused = await router.metric("dualmap_remote_decisions_total", result="refused")
        assert refused == 0 or were_lost
    await replicas.wait_for_rest()


async def test_killed_owner_is_replaced_and_loses_no_request(system: ReplicatedSystem, replicas: Replicas) -> None:
    owner = await agreed(replicas)
    number = number_of(replicas, owner)
    traffic = system.traffic(of=replicas)
    async with traffic.running():
        await traffic.streaming(4)
        incident = traffic.incident()
        await replicas.routers[number].kill()
        await agreed(replicas)
        await traffic.flowing(40)
        await replicas.restart_router(number)
        await agreed(replicas)
        await traffic.flowing(40)
    assert failed(incident.everyone) == []
    await replicas.wait_for_rest()


async def test_hung_owner_is_replaced_and_returns(system: ReplicatedSystem, replicas: Replicas) -> None:
    owner = await agreed(replicas)
    router = replicas.routers[number_of(replicas, owner)]
    traffic = system.traffic(of=replicas)
    async with traffic.running():
        await traffic.streaming(4)
        incident = traffic.incident()
        router.pause()
        await agreed(replicas, without=owner)
        await traffic.flowing(40)
        router.resume()
        assert await agreed(replicas) == owner
        await traffic.flowing(40)
    assert failed(incident.everyone) == []
    await replicas.wait_for_rest()


async def test_ended_owner_loses_no_request(system: ReplicatedSystem, replicas: Replicas) -> None:
    owner = await agreed(replicas)
    number = number_of(replicas, owner)
    traffic = system.traffic(of=replicas)
    async with traffic.running():
        await traffic.streaming(4)
        incident = traffic.incident()
        ending = asyncio.create_task(replicas.end_router(number))
        await traffic.flowing(60)
        await ending
        await agreed(replicas)
    assert failed(incident.everyone) == []
    await replicas.wait_for_rest()
