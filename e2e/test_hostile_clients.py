"""Hostile clients through Envoy: crafted prompts that would change the learnt speed, and a flood of one client."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply
from harness.deployment import Deployment
from harness.documents import chat, document, member_of, prompt_of, queue
from harness.shared_engines import BUSY, SharedEngines
from harness.stack import Engine
from harness.upstream import sse
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ENGINE_SPEED = 2
# The speed of the preset 7b. An honest run teaches a little less, because a sample includes the time in Envoy.
TOKENS_PER_S = 7000.0 * ENGINE_SPEED
CLIENT = "x-gateway-inference-fairness-id"
WITH_USAGE = {"stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(loop_scope="session", name="site")
async def _site(tmp_path: Path) -> AsyncIterator[Deployment]:
    """Yield a pool of one simulated engine; without other members, nothing corrects a poisoned speed."""
    async with Engine(
        directory=tmp_path, name="engine", arguments=("--model", "pool-model", "--speed", str(ENGINE_SPEED))
    ) as engine:
        pool = document("pool", [engine.member], engine={"prefillTokensPerSecond": TOKENS_PER_S})
        async with Deployment({"pool": pool}, mode=Mode.STREAMED, directory=tmp_path) as site:
            yield site


def honest(number: int, **fields: Any) -> dict[str, Any]:
    """Return a streamed request of about 2000 tokens for one token; prompts of different numbers share no prefix."""
    return chat("pool", prompt_of(15, seed=f"{number}"), stream=True, max_tokens=1, **fields)


def crafted(number: int, **fields: Any) -> dict[str, Any]:
    """Return a streamed request that the router counts as 100,000 tokens, and the engine as 22.

    The text is the reasoning of an earlier turn. Some chat templates render this text, so the router counts it. Others
    omit the text, and so does the simulated engine.
    """
    body = chat("pool", "hi", stream=True, max_tokens=1, **fields)
    body["messages"].insert(0, {"role": "assistant", "reasoning_content": f"{number} ".ljust(400_000, "x")})
    return body


async def speed(site: Deployment) -> float:
    """Return the engine's learnt prefill speed in tokens per second."""
    return await site.metric("dualmap_endpoint_prefill_tokens_per_second", endpoint="engine")


async def test_crafted_prompts_with_usage_teach_no_speed(site: Deployment) -> None:
    replies = [await site.ask(honest(number, **WITH_USAGE)) for number in range(10)]
    replies += [await site.ask(crafted(number, **WITH_USAGE)) for number in range(32)]
    assert [reply.status for reply in replies] == [200] * 42
    await site.wait_for_rest()

    async def is_honest() -> bool:
        return await speed(site) < 1.5 * TOKENS_PER_S

    # The engine's token counts arrive with Envoy's access log, which may be later than the end of a request.
    await until(is_honest, "the router's learnt prefill speed is below 1.5 times the engine's speed")


async def test_crafted_prompts_of_one_client_change_no_learnt_speed(site: Deployment) -> None:
    replies = [await site.ask(honest(number), headers={CLIENT: "honest"}) for number in range(10)]
    for number in range(32):
        replies.append(await site.ask(crafted(number), headers={CLIENT: "hostile"}))
        if number % 2:
            replies.append(await site.ask(honest(100 + number), headers={CLIENT: "honest"}))

    assert [reply.status for reply in replies] == [200] * 58
    assert await speed(site) < 1.5 * TOKENS_PER_S


async def test_flood_of_one_client_neither_delays_nor_rejects_others(engines: SharedEngines, tmp_path: Path) -> None:
    """A client sends ten times as many requests as another one, and first.

    The test compares the order of dispatch and not times, because times of real processes depend on the machine's load.
    """
    gate = asyncio.Event()
    engines.left.answer = sse([b"data: [DONE]\n\n"], first_after=gate)
    pool = document("pool", [member_of(engines.left)], **BUSY, **queue(maxHeld=20, maxOvertaken=0))
    async with Deployment({"pool": pool}, mode=Mode.STREAMED, directory=tmp_path) as site:
        # A streamed prefill is pending until its first token, so no other request is dispatched before the gate opens.
        long = chat("pool", prompt_of(100, seed="running"), stream=True)
        running = [asyncio.create_task(site.ask(long))]
        await site.wait_for_load("pool", "one in flight", lambda flying, _: flying == 1)
        greedy = [asyncio.create_task(site.ask(short(f"greedy {n}"), headers={CLIENT: "greedy"})) for n in range(40)]
        await site.wait_for_metric("dualmap_refused_requests_total", 20, code="queue_full")
        quiet = list[asyncio.Task[Reply]]()
        for number in range(4):
            quiet.append(asyncio.create_task(site.ask(short(f"quiet {number}"), headers={CLIENT: "quiet"})))
            await site.wait_for_metric("dualmap_clients_limited_total", len(quiet), pool="llm/pool")
        gate.set()
        statuses = [[reply.status for reply in await asyncio.gather(*tasks)] for tasks in (running, quiet, greedy)]

    assert statuses[:2] == [[200], [200] * 4]
    assert Counter(statuses[2]) == {200: 16, 429: 24}
    order = [json.loads(each.body)["messages"][0]["content"].split()[0] for each in engines.left.received]
    assert order[0] == "running"
    assert order[1:10].count("quiet") == 4


def short(seed: str) -> dict[str, Any]:
    """Return a request with a short prompt; prompts of different seeds share no prefix."""
    return chat("pool", prompt_of(2, seed=seed))
