"""Tests of a picker that asks simulated engines: work of other sources, and LoRA adapters."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp

import builders
from dualmap.pools.pool import Engine, Member, Model, Pool
from dualmap_extproc.engines.profiles import LOAD_PERIOD_S, EngineProfiles
from dualmap_extproc.request.picked import Picked
from dualmap_sim.http_server import EngineHttpServer
from dualmap_sim.presets import PRESETS
from dualmap_sim.server_settings import ServerSettings
from extproc.desks import Desk
from extproc.envoy_messages import chat
from waiting import until

HOST = "127.0.0.1"


@dataclass(slots=True)
class System:
    """A picker, and the addresses of the engines of its pool by member."""

    desk: Desk
    addresses: dict[str, str]
    http: aiohttp.ClientSession

    def in_flight(self, member: str) -> int:
        """Return the requests at a member, as decisions see them."""
        picked = self.desk.pick(chat(f"look {time.monotonic()}"), now=now_s())
        self.desk.picker.aborted(now_s(), picked.request_id)
        assert picked.decision is not None
        return {each.id: each.in_flight for each in picked.decision.receipt.candidates}[member]

    async def complete(self, member: str, model: str = "m", **body: object) -> int:
        """Send a request directly to an engine; return the status of its answer."""
        url, body = f"http://{self.addresses[member]}/v1/completions", {"model": model, "prompt": "a", **body}
        async with self.http.post(url, json=body) as response:
            await response.read()
            return response.status


def now_s() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def system(of: Pool, *adapters: tuple[str, ...], speed: float = 1.0) -> AsyncIterator[System]:
    """Start an engine with each of these adapters, and a picker that asks the engines."""
    config = replace(PRESETS["7b"], block_tokens=16, cache_tokens=160_016)
    desk, members, addresses = Desk(of), [], {}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for n, each in enumerate(adapters):
            engine = EngineHttpServer(
                ServerSettings(host=HOST, port=0, model="m", config=config, speed=speed, api_key=None, adapters=each)
            )
            address = await engine.start()
            stack.push_async_callback(engine.close)
            addresses[f"m-{n}"] = address
            members.append(Member(id=f"m-{n}", address=HOST, port=int(address.rpartition(":")[2])))
        pool = replace(of, members=tuple(members))
        desk.picker.set_pools(now_s(), [pool])
        engines = EngineProfiles(lambda *report: desk.picker.on_profile(now_s(), *report))
        engines.set_pools([pool])
        stack.push_async_callback(engines.close)
        await until(lambda: all(each.engine.version for each in desk.picker.statuses()[0].endpoints))
        yield System(desk, addresses, http)


async def test_work_of_other_sources_counts_within_two_seconds() -> None:
    async with system(builders.pool(0), (), ()) as running:
        assert running.in_flight("m-0") == 0
        batch = [asyncio.create_task(running.complete("m-0", max_tokens=20_000)) for _ in range(5)]
        await until(lambda: running.in_flight("m-0") == 5)
        assert running.in_flight("m-1") == 0
        engine, idle = (each.engine for each in running.desk.picker.statuses()[0].endpoints)
        assert (engine.kv_usage or 0.0) > 0.0
        assert idle.kv_usage == 0.0
        for each in batch:
            each.cancel()
        await asyncio.gather(*batch, return_exceptions=True)
        await until(lambda: running.in_flight("m-0") == 0)
    # Load of other sources counts when two requests in succession have found it.
    assert 2 * max(LOAD_PERIOD_S) < 2.0


class TestAdapters:
    async def chosen(self, running: System, count: int = 20) -> dict[str, str]:
        """Return the chosen members of requests for the adapter, with the receipts' words; all are served."""
        found = {}
        for n in range(count):
            picked = running.desk.pick(chat(f"{n}", model="sql"), now=now_s())
            assert isinstance(picked, Picked)
            assert picked.decision is not None
            receipt = picked.decision.receipt
            found[receipt.chosen] = receipt.adapter
            assert await running.complete(receipt.chosen, "sql", max_tokens=1) == 200
            running.desk.picker.finished(now_s(), picked.request_id, None)
        return found

    async def test_requests_go_only_to_engines_that_serve_the_adapter(self) -> None:
        async with system(builders.pool(0), ("sql",), (), ("sql", "math"), speed=20.0) as running:
            assert await running.complete("m-1", "sql") == 404
            assert await self.chosen(running) == {"m-0": "loaded", "m-2": "loaded"}

    async def test_specified_adapter_prefers_engines_that_have_it(self) -> None:
        of = replace(builders.pool(0, engine=Engine()), model=Model(name="m", adapters=("sql",)))
        async with system(of, (), ("sql",), speed=20.0) as running:
            assert await self.chosen(running) == {"m-1": "loaded"}
