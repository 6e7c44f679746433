"""Tests that the engines' token counts correct the router after an engine restarts without a pool change."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualmap_extproc.envoy.config.settings import Mode
from harness.deployment import Deployment
from harness.documents import chat, document, prompt_of, receipt
from harness.stack import Engine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

PROMPTS = 12
HITS = 3
BLOCKS = 8
POOL = "llm/qwen"
STALE = "dualmap_stale_hit_requests_total"


async def ask(deployment: Deployment, number: int) -> tuple[int, int]:
    """Send a prompt; return its cached tokens as the router predicted and as the engine reported them.

    Prompts have different lengths, so that the counts show the engine's block.
    """
    body = chat("qwen", prompt_of(BLOCKS + number, seed=f"prompt {number}"), max_tokens=2)
    measured = await deployment.metric("dualmap_completions_total", pool=POOL, outcome="finished")
    reply = await deployment.ask(body)
    assert reply.status == 200
    await deployment.wait_for_metric("dualmap_completions_total", measured + 1, pool=POOL, outcome="finished")
    usage: dict[str, Any] = json.loads(reply.body)["usage"]
    return int(receipt(reply)["matched"]), usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("mode", [Mode.STREAMED, Mode.FULL_DUPLEX], ids=lambda mode: mode.value)
async def test_usage_corrects_the_router_after_an_unnoticed_restart(mode: Mode, tmp_path: Path) -> None:
    arguments = ("--speed", "1000")
    async with Engine(directory=tmp_path, name="engine", arguments=arguments) as engine:
        # The engine's start time would tell the router about the restart.
        pools = {"qwen": document("qwen", [engine.member], engine={"discovery": {"enabled": False}})}
        async with Deployment(pools, mode=mode, directory=tmp_path) as deployment:
            assert [await ask(deployment, number) for number in range(PROMPTS)] == [(0, 0)] * PROMPTS
            for predicted, measured in [await ask(deployment, number) for number in range(HITS)]:
                assert predicted >= BLOCKS * 128
                assert measured >= BLOCKS * 128
            assert await deployment.metric(STALE, pool=POOL) == 0

            await engine.kill()
            await engine.start()

            stale = [await ask(deployment, number) for number in (PROMPTS - 1, PROMPTS - 2)]
            assert [measured for _, measured in stale] == [0, 0]
            assert all(predicted >= BLOCKS * 128 for predicted, _ in stale)
            await deployment.wait_for_metric(STALE, 2, pool=POOL)
            # The router knows now that the prompts before them are not cached any more.
            rest = range(HITS, PROMPTS - 2)
            assert [await ask(deployment, number) for number in rest] == [(0, 0)] * len(rest)
            assert await deployment.metric(STALE, pool=POOL) == 2
            predicted, measured = await ask(deployment, PROMPTS - 1)
            assert predicted >= BLOCKS * 128
            assert measured >= BLOCKS * 128
