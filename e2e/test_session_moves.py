"""Sessions that move with their KV: router, real Envoy, and three engines that pull KV from each other."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply
from harness.deployment import Deployment
from harness.documents import document, receipt
from harness.stack import Engine
from harness.waiting import until

# Five processes start for the first test.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MODEL = "qwen-model"
COMPLETIONS = "/v1/completions"


class Site:
    """The processes, and the pool's states of members."""

    def __init__(self, deployment: Deployment, engines: dict[str, Engine]) -> None:
        self.deployment = deployment
        self.engines = engines
        self._version = 1

    async def turn(self, session: str, number: int) -> Reply:
        """Send a turn of a session, whose prompt begins with the turns before."""
        prompt = f"session {session}: " + "the fox ran far " * 2000 + "and then? " * number
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        return await self.deployment.ask(asked, path=COMPLETIONS, headers={"x-session-id": session})

    async def drain(self, *names: str) -> None:
        """Drain exactly these members, and wait until the router has applied it."""
        self._version += 1
        states = {name: "Draining" if name in names else "Active" for name in self.engines}
        self.deployment.write("qwen", described(self.engines, states, version=self._version))

        async def applied() -> bool:
            page = await self.deployment.page("qwen")
            return {name: endpoint["state"] for name, endpoint in page.items()} == states

        await until(applied, f"the router has {states}")


def described(engines: dict[str, Engine], states: dict[str, str], *, version: int = 1) -> dict[str, Any]:
    members = [replace(engine.member, state=states.get(name, "Active")) for name, engine in engines.items()]
    made: dict[str, Any] = document("qwen", members, version=version)
    made["spec"] |= {
        "model": {"name": MODEL},
        "engine": {"discovery": {"enabled": False}},
        "routing": {"session": {"migration": {"pull": True}}},
    }
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="site")
async def _session_site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("session-moves")
    async with AsyncExitStack() as stack:
        engines = {
            name: Engine(directory=folder, name=name, arguments=("--kv-transfer", "--speed", "50"))
            for name in ("engine-0", "engine-1", "engine-2")
        }
        for engine in engines.values():
            stack.push_async_callback(engine.stop)
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        deployment = Deployment({"qwen": described(engines, {})}, mode=Mode.STREAMED, directory=folder)
        yield Site(await stack.enter_async_context(deployment), engines)


def usage(reply: Reply) -> tuple[int, int]:
    """Return the prompt tokens, and how many of them the engine did not compute."""
    assert reply.status == 200, reply.body
    counts = json.loads(reply.body)["usage"]
    return counts["prompt_tokens"], counts["prompt_tokens_details"]["cached_tokens"]


async def test_session_of_a_draining_member_takes_its_kv_along(site: Site) -> None:
    first = await site.turn("drained", 0)
    tokens, cached = usage(first)
    assert cached == 0
    host = receipt(first)["chosen"]
    before = await site.deployment.metric("dualmap_session_moves_total", kv="fetched")
    await site.drain(host)
    try:
        second = await site.turn("drained", 1)
        third = await site.turn("drained", 2)
    finally:
        await site.drain()

    said = receipt(second)
    assert said["moved_from"] == host != said["chosen"]
    assert int(said["fetch"]) > 0.9 * tokens
    # The engine fetches whole blocks of 16 tokens.
    assert usage(second)[1] > 0.9 * tokens
    assert (receipt(third)["chosen"], "moved_from" in receipt(third)) == (said["chosen"], False)
    assert await site.deployment.metric("dualmap_session_moves_total", kv="fetched") == before + 1
    assert await site.deployment.metric("dualmap_session_move_tokens_total", kv="fetched") > 0.9 * tokens


async def test_session_whose_source_is_gone_computes_its_prompt_again(site: Site) -> None:
    first = await site.turn("killed", 0)
    host = receipt(first)["chosen"]
    await site.drain(host)
    # The router does not know yet that the engine is gone.
    await site.engines[host].kill()
    try:
        second = await site.turn("killed", 1)
    finally:
        await site.engines[host].start()
        await site.drain()

    assert receipt(second)["moved_from"] == host
    assert usage(second)[1] == 0
