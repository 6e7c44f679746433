"""Engines of another project: llm-d-inference-sim behind Envoy and a router, with profile, usage and KV events.

The simulators differ from vLLM: no ``/version``, no replay, numbers from 1, and in arrays a parent of 0 at the start of
a prompt. The test needs no control plane, only the program that ``make e2e`` builds.
"""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import http1
from harness.deployment import CHAT, Deployment
from harness.documents import chat, document, receipt
from harness.llm_d_sim import LlmDSim
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

POOL = "qwen"
POOL_ID = f"llm/{POOL}"
STORED = "dualmap_kv_events_total"
STALE = "dualmap_stale_hit_requests_total"
BLOCKS = 256
PROMPTS = 4
TIMEOUT_S = 30.0
WAYS = {"arrays": (16, ()), "maps": (16, ("--use-vllm-map-event-format",)), "large": (64, ())}
"""The block size and the arguments of each engine."""


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="sims")
async def _sims(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, LlmDSim]]:
    directory = tmp_path_factory.mktemp("llm-d-sim")
    sims: dict[str, LlmDSim] = {}
    async with AsyncExitStack() as stack:
        port = 0
        for number, (name, (block, more)) in enumerate(WAYS.items()):
            # The simulator reports no ports, so all members have the port of the pool, each at its own address.
            sims[name] = LlmDSim(
                directory=directory,
                name=name,
                host=f"127.0.0.{11 + number}",
                events_port=port,
                arguments=("--block-size", str(block), "--kv-cache-size", str(BLOCKS), *more),
            )
            await stack.enter_async_context(sims[name])
            port = sims[name].events_port
        yield sims


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="routed")
async def _routed(sims: dict[str, LlmDSim], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    first = sims["arrays"]
    engine = {
        "tokenizer": {"source": "Renderer", "url": f"http://{first.endpoint}"},
        # Nothing listens at the port of replays.
        "kvEvents": {"enabled": True, "port": first.events_port, "replayPort": 9},
    }
    pool = document(
        POOL, [each.member for each in sims.values()], engine=engine, routing={"policy": "cache_affinity_global"}
    )
    async with Deployment({POOL: pool}, mode=Mode.STREAMED, directory=tmp_path_factory.mktemp("routed")) as deployment:
        await until(lambda: partial(deployment), "the router has given up replays", timeout_s=TIMEOUT_S)
        yield deployment


async def partial(deployment: Deployment) -> bool:
    return all(each["engine"]["events"]["state"] == "Partial" for each in (await deployment.page(POOL)).values())


def prompt_of(words: int, *, seed: str) -> str:
    """Return a prompt of so many words, each of which is a token."""
    return " ".join(f"{seed}{number}" for number in range(words))


async def ask(deployment: Deployment, text: str) -> tuple[str, str, int, int]:
    """Return the member and the source of a request's receipt, and its predicted and its measured cached tokens."""
    reply = await deployment.ask(chat(POOL, text, max_tokens=4))
    assert reply.status == 200, reply
    usage, said = json.loads(reply.body)["usage"], receipt(reply)
    predicted = round(int(said["matched"]) * usage["prompt_tokens"] / int(said["prompt"]))
    return said["chosen"], said["source"], predicted, usage["prompt_tokens_details"]["cached_tokens"]


async def ask_directly(sim: LlmDSim, text: str) -> int:
    """Send a prompt past the router; return its number of tokens."""
    body = json.dumps(chat(POOL, text, max_tokens=4)).encode()
    reply = await http1(f"http://{sim.endpoint}{CHAT}", body=body, headers={"content-type": "application/json"})
    assert reply.status == 200, reply
    return int(json.loads(reply.body)["usage"]["prompt_tokens"])


async def test_profile_says_what_the_engine_says(routed: Deployment) -> None:
    page = await routed.page(POOL)
    for name, (block, _) in WAYS.items():
        engine = page[name]["engine"]
        assert engine["reason"] == "serves [qwen-model], not qwen; /version was answered with 404"
        assert engine["version"] == ""
        assert engine["block_tokens"] == block
        # The router keeps one block as a placeholder, as vLLM does.
        assert engine["kv_tokens"] == block * (BLOCKS - 1)
        assert engine["adapters"] == []
        assert engine["events"]["reason"] == "the publisher's replay is incomplete (replay port 9: connection refused)"


@pytest.mark.parametrize("name", WAYS)
async def test_events_predict_what_the_engine_measures(sims: dict[str, LlmDSim], routed: Deployment, name: str) -> None:
    block, _ = WAYS[name]
    texts = [prompt_of(300 + 40 * number, seed=f"{name}x{number}x") for number in range(PROMPTS)]
    before = await routed.metric(STORED, pool=POOL_ID, kind="stored")
    blocks = sum([await ask_directly(sims[name], text) // block for text in texts])

    async def known() -> bool:
        return await routed.metric(STORED, pool=POOL_ID, kind="stored") >= before + blocks

    await until(known, "the events are known", timeout_s=TIMEOUT_S)
    stale = await routed.metric(STALE, pool=POOL_ID)
    asked = [await ask(routed, text) for text in texts]

    # A request whose token ids are late is routed by the router's own record.
    told = [each for each in asked if each[1] == "events"]
    assert told, asked
    for member, _, predicted, measured in told:
        assert member == name
        assert measured > 300 - block
        assert abs(predicted - measured) < block, asked
    assert await routed.metric(STALE, pool=POOL_ID) == stale


async def test_full_cache_does_no_harm(sims: dict[str, LlmDSim], routed: Deployment) -> None:
    """The simulator's last block is in use as well, so it holds more blocks than the router expects."""
    sim = sims["arrays"]
    for number in range(2 * BLOCKS * 16 // 1000):
        await ask_directly(sim, prompt_of(1000, seed=f"full{number}x"))

    asked = [await ask(routed, prompt_of(300, seed=f"after{number}x")) for number in range(2 * PROMPTS)]

    assert [(predicted, measured) for _, _, predicted, measured in asked] == [(0, 0)] * len(asked)
