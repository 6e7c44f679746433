"""Shadow policies of a running router: real Envoy and simulated engines, and the figures on the metrics page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness.deployment import Deployment
from harness.documents import document, receipt
from harness.stack import Engine

# Four processes start for the first test.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MODEL = "qwen-model"
REQUESTS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="deployment")
async def _shadowed_deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    folder = tmp_path_factory.mktemp("shadows")
    async with AsyncExitStack() as stack:
        engines = [
            Engine(directory=folder, name=name, arguments=("--speed", "50")) for name in ("engine-0", "engine-1")
        ]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        await asyncio.gather(*(engine.start() for engine in engines))
        described = document("qwen", [engine.member for engine in engines])
        described["spec"] |= {
            "model": {"name": MODEL},
            "engine": {"discovery": {"enabled": False}},
            "routing": {"policy": "round_robin", "shadow": ["round_robin", "cache_affinity"], "shadowSample": 1},
        }
        deployment = Deployment({"qwen": described}, mode=Mode.STREAMED, directory=folder)
        yield await stack.enter_async_context(deployment)


async def test_shadow_policy_is_counted_beside_the_own_policy(deployment: Deployment) -> None:
    """Round robin takes turns for one conversation; cache affinity would keep it at one engine."""
    replies = [
        await deployment.ask(
            {"model": MODEL, "prompt": "the fox ran far " * 200 + "and then? " * turn, "max_tokens": 2},
            path="/v1/completions",
        )
        for turn in range(REQUESTS)
    ]
    assert [reply.status for reply in replies] == [200] * REQUESTS
    receipts = [receipt(reply) for reply in replies]
    assert {each["policy"] for each in receipts} == {"round_robin"}
    assert len({each["chosen"] for each in receipts}) == 2

    async def shown(name: str, policy: str, **labels: str) -> float:
        return await deployment.metric(f"dualmap_shadow_{name}", pool="llm/qwen", policy=policy, **labels)

    assert await shown("decisions_total", "round_robin", agreed="true") == REQUESTS
    assert await shown("decisions_total", "round_robin", agreed="false") == 0
    assert await shown("decisions_total", "cache_affinity", agreed="true") == REQUESTS / 2
    assert await shown("decisions_total", "cache_affinity", agreed="false") == REQUESTS / 2
    matched = sum(int(each["matched"]) for each in receipts)
    assert await shown("predicted_cached_tokens_total", "round_robin") == matched > 0
    assert await shown("predicted_cached_tokens_total", "cache_affinity") > 0
    for policy in ("round_robin", "cache_affinity"):
        assert await shown("predicted_ttft_seconds_count", policy) == REQUESTS
        assert await shown("predicted_ttft_seconds_sum", policy) > 0
