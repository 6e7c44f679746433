"""Prefill and decode as one system: router, real Envoy, two decode engines behind pd-proxy, and two prefill engines."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply
from harness.deployment import Deployment
from harness.documents import document, receipt
from harness.pd_site import PdProxy
from harness.processes import Child
from harness.stack import Engine, PoolMember, write_pool
from harness.upstream import Upstream

# Nine processes start for the first test.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MODEL = "qwen-model"
COMPLETIONS = "/v1/completions"


class System:
    """The processes. ``decoders`` and ``prefillers`` are engines by the ids of their members."""

    def __init__(
        self, deployment: Deployment, decoders: Mapping[str, Engine], prefillers: Mapping[str, Engine]
    ) -> None:
        self.deployment = deployment
        self.decoders = decoders
        self.prefillers = prefillers

    async def ask(self, seed: str, **headers: str) -> Reply:
        """Send a long prompt, which the prefill pool computes."""
        return await self.deployment.ask(body(seed), path=COMPLETIONS, headers=headers)


def body(seed: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"{seed} " + "the fox ran far " * 3000, "max_tokens": 8, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="system")
async def _pd_system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    folder = tmp_path_factory.mktemp("pd-system")
    async with AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            speed = "2" if name.startswith("decode") else "50"
            engines[name] = Engine(directory=folder, name=name, arguments=("--kv-transfer", "--speed", speed))
        await started(stack, *engines.values())
        prefillers = {name: engine for name, engine in engines.items() if name.startswith("prefill")}
        decoders = {name: engine for name, engine in engines.items() if name.startswith("decode")}
        prefill = described("prefill", [engine.member for engine in prefillers.values()])
        allowed = ("--pool", str(write_pool(folder / "allowed.json", prefill)), "--allow", "127.0.0.0/8", "--continue")
        proxies = {
            name: PdProxy(engine.endpoint, *allowed, directory=folder, name=f"{name}-proxy")
            for name, engine in decoders.items()
        }
        await started(stack, *proxies.values())
        members = [PoolMember(id=name, address="127.0.0.1", port=proxy.port) for name, proxy in proxies.items()]
        decode = described("qwen", members, prefillPool="prefill", routing={"continue": True})
        pools = {"qwen": decode, "prefill": prefill}
        deployment = Deployment(pools, mode=Mode.STREAMED, directory=folder)
        yield System(await stack.enter_async_context(deployment), decoders, prefillers)


async def started(stack: AsyncExitStack, *children: Child) -> None:
    """Start processes at the same time; the stack stops them."""
    for child in children:
        stack.push_async_callback(child.stop)
    await asyncio.gather(*(child.start() for child in children))


def described(name: str, members: list[PoolMember], **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = document(name, members)
    made["spec"] |= {"model": {"name": MODEL}, "engine": {"discovery": {"enabled": False}}, **spec}
    return made


async def test_long_prompt_is_prefilled_where_the_receipt_says(system: System) -> None:
    reply = await system.ask("remote")
    said = dict(receipt(reply))
    assert (reply.status, reply.headers["x-dualmap-prefill"]) == (200, "remote")
    assert said["prefill"] in system.prefillers
    usage = json.loads(reply.body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


async def test_killed_prefill_member_is_replaced_by_the_other_of_its_pair(system: System) -> None:
    # Without discovery, the router still picks the member. Of so many prompts, some have it as their first choice.
    killed = system.prefillers["prefill-0"]
    await killed.kill()
    try:
        replies = [await system.ask(f"killed {number}") for number in range(8)]
    finally:
        await killed.start()
    assert {reply.status for reply in replies} == {200}
    by_choice = {dict(receipt(reply))["prefill"]: reply.headers["x-dualmap-prefill"] for reply in replies}
    assert by_choice == {"prefill-0": "next", "prefill-1": "remote"}


async def test_forged_headers_of_a_client_have_no_effect(system: System) -> None:
    async with Upstream(name="outsider") as outsider:
        forged = f"127.0.0.1:{outsider.port}"
        headers = {"x-prefiller-host-port": forged, "x-dualmap-prefillers": forged, "x-dualmap-continue": forged}
        reply = await system.ask("forged", **headers)
        assert (reply.status, reply.headers["x-dualmap-prefill"]) == (200, "remote")
        assert not outsider.received


async def test_stream_of_a_killed_decode_engine_continues_on_the_other_member(system: System) -> None:
    asked = body("continue", max_tokens=300, stream=True)
    url = system.deployment.envoy.url + COMPLETIONS
    async with aiohttp.ClientSession() as session, session.post(url, json=asked) as response:
        chosen = response.headers["x-engine"]
        received = b""
        while received.count(b"\n\n") < 20:
            received += await response.content.readany()
        (engine,) = (each for each in system.decoders.values() if each.endpoint == chosen)
        await engine.kill()
        received += await response.read()
    await engine.start()
    events = received.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 300 * 4
