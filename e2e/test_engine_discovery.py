"""What the router learns from engines by itself: their profile, their sleep, and work that passed no router."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from dualmap_extproc.envoy.config.settings import Mode
from harness.deployment import Deployment
from harness.documents import receipt
from harness.stack import Engine, pool_document
from harness.waiting import until
from web_server import WebServer

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

POOL = "qwen"
OTHERS = 8


@pytest_asyncio.fixture(loop_scope="session", name="sims")
async def _sims(tmp_path: Path) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two slow engines that decode for minutes."""
    slow = ("--speed", "0.2", "--adapter", "sql")
    left, right = (Engine(directory=tmp_path, name=name, arguments=slow) for name in ("left", "right"))
    async with left, right:
        yield left, right


@pytest_asyncio.fixture(loop_scope="session", name="routed")
async def _routed(sims: tuple[Engine, Engine], tmp_path: Path) -> AsyncIterator[Deployment]:
    document = pool_document([each.member for each in sims], spec={"routing": {"policy": "least_requests"}})
    async with Deployment({POOL: document}, mode=Mode.STREAMED, directory=tmp_path) as deployment:
        await until(lambda: described(deployment), "the engines are described")
        yield deployment


async def served_and_lost(deployment: Deployment, count: int = 20) -> tuple[set[str], int]:
    """Return the members of several short requests, and the number of requests that were not answered with 200."""
    members, lost = set(), 0
    for number in range(count):
        body = {"model": "qwen-model", "messages": [{"role": "user", "content": f"hi {number}"}], "max_tokens": 1}
        reply = await deployment.ask(body)
        members.add(receipt(reply)["chosen"])
        lost += reply.status != 200
    return members, lost


async def described(deployment: Deployment) -> bool:
    return all(each["engine"]["version"] for each in (await deployment.page(POOL)).values())


async def chosen(deployment: Deployment, count: int = 6) -> set[str]:
    """Return the members of several short requests, one after the other."""
    members = set()
    for number in range(count):
        body = {"model": "qwen-model", "messages": [{"role": "user", "content": f"hi {number}"}], "max_tokens": 1}
        reply = await deployment.ask(body)
        assert reply.status == 200
        members.add(receipt(reply)["chosen"])
    return members


async def test_engines_are_described_and_their_adapters_served(routed: Deployment) -> None:
    for each in (await routed.page(POOL)).values():
        assert each["engine"] == {
            "version": each["engine"]["version"],
            "block_tokens": 16,
            "kv_tokens": 190_000,
            "adapters": ["sql"],
            "events": {"state": "Off", "sequence": None, "blocks": 0, "gaps": 0, "resyncs": 0, "reason": ""},
            "reason": "",
        }
    reply = await routed.ask({"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    assert (reply.status, json.loads(reply.body)["model"]) == (200, "sql")


async def test_work_past_the_router_keeps_requests_away(routed: Deployment, sims: tuple[Engine, Engine]) -> None:
    left, _ = sims
    body = {"model": "qwen-model", "prompt": "a batch job", "max_tokens": 5000, "stream": True}

    async def decode(session: aiohttp.ClientSession) -> None:
        async with session.post(f"http://{left.endpoint}/v1/completions", json=body) as response:
            await response.read()

    async def right_alone() -> bool:
        return await chosen(routed) == {"right"}

    async def both() -> bool:
        return await chosen(routed) == {"left", "right"}

    # Of two idle members, the router chooses one by the hash of the request id.
    await until(both, "both engines get requests")
    async with aiohttp.ClientSession() as session:
        jobs = [asyncio.create_task(decode(session)) for _ in range(OTHERS)]
        try:
            await until(right_alone, "the router counts the work")
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    await until(both, "the work has ended")


async def test_asleep_engine_gets_requests_only_if_all_are_asleep(
    routed: Deployment, sims: tuple[Engine, Engine]
) -> None:
    left, _ = sims
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{left.endpoint}/sleep") as response:
            assert response.status == 200

        async def asleep() -> bool:
            return bool((await routed.page(POOL))["left"]["engine"]["reason"] == "the engine is asleep")

        await until(asleep, "the router knows that the engine is asleep")
        assert await chosen(routed) == {"right"}
        async with session.post(f"http://{left.endpoint}/wake_up") as response:
            assert response.status == 200

        async def awake() -> bool:
            return not await asleep()

        await until(awake, "the engine is awake")

        async def both() -> bool:
            return await chosen(routed) == {"left", "right"}

        await until(both, "both engines get requests")


@pytest.fixture(name="qwen_engines")
def _qwen_engines(tmp_path: Path) -> tuple[Engine, Engine]:
    """Two engines that are not started; the second one can be replaced."""
    kept, replaced = (Engine(directory=tmp_path, name=name, arguments=("--speed", "10")) for name in ("kept", "gone"))
    return kept, replaced


async def test_member_whose_engine_has_another_model_gets_no_requests(
    qwen_engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    kept, replaced = qwen_engines
    async with kept, replaced:
        document = pool_document([kept.member, replaced.member], spec={"routing": {"policy": "round_robin"}})
        async with Deployment({POOL: document}, mode=Mode.STREAMED, directory=tmp_path) as deployment:
            await until(lambda: described(deployment), "the engines are described")
            assert await served_and_lost(deployment) == ({"kept", "gone"}, 0)
            await replaced.stop()
            other = ("--speed", "10", "--model", "other")
            async with Engine(directory=tmp_path, name="other", port=replaced.port, arguments=other):
                await until_reason(deployment, "serves [other], not qwen-model")
                assert await served_and_lost(deployment, 60) == ({"kept"}, 0)
            assert deployment.router.output().count("Engine does not fit its pool") == 1
            await replaced.start()
            await until_reason(deployment, "")
            assert await served_and_lost(deployment) == ({"kept", "gone"}, 0)


async def test_member_without_an_engine_is_named(qwen_engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    kept, replaced = qwen_engines
    async with kept, replaced:
        discovery = {"discovery": {"interval": "1s"}}
        spec = {"routing": {"policy": "round_robin"}, "engine": discovery}
        document = pool_document([kept.member, replaced.member], spec=spec)
        async with Deployment({POOL: document}, mode=Mode.STREAMED, directory=tmp_path) as deployment:
            await until(lambda: described(deployment), "the engines are described")
            await replaced.stop()
            async with WebServer(web.Application(), port=replaced.port):
                await until_reason(deployment, "no vLLM engine answers: /metrics and /v1/models are not there")
                assert deployment.router.output().count("Engine does not fit its pool") == 1


async def until_reason(deployment: Deployment, text: str) -> None:
    """Wait until the second engine's reason begins with a text, or is empty for an empty text."""

    async def found() -> bool:
        reason = (await deployment.page(POOL))["gone"]["engine"]["reason"]
        return bool(reason.startswith(text) if text else not reason)

    await until(found, f"the reason is {text!r}")
