"""Prefill and decode on two real vLLM engines: router, real Envoy, pd-proxy, and KV in vLLM's shared-storage connector.

``make vllm ARGS=e2e/test_vllm_prefill_decode.py`` installs vLLM and runs the tests. The connector is vLLM's
ExampleConnector, which writes the KV of each prompt to a folder and finds it by the prompt's tokens. A third engine
without a connector says what a single engine answers.
"""

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply, http1
from harness.deployment import Deployment
from harness.documents import document, receipt
from harness.pd_site import PdProxy
from harness.stack import PoolMember, write_pool
from harness.vllm import BLOCK_TOKENS, MODEL, PYTHON, Vllm, make_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        PYTHON is None, reason="`make vllm ARGS=e2e/test_vllm_prefill_decode.py` runs the tests with a real vLLM"
    ),
]

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
PROMPT_TOKENS = 300
LOADED_TOKENS = 288
"""The connector loads whole blocks without the last token of the prompt."""
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The processes. ``alone`` is an engine that exchanges no KV, and ``storage`` the folder of the KV."""

    prefiller: Vllm
    decoder: Vllm
    alone: Vllm
    proxy: PdProxy
    deployment: Deployment
    storage: Path

    async def ask(self, prompt: list[int]) -> Reply:
        """Send a prompt through Envoy."""
        reply = await self.deployment.ask(body(prompt), path=COMPLETIONS)
        assert reply.status == 200, reply
        return reply

    async def answer_alone(self, prompt: list[int]) -> str:
        """Return the text of a single engine."""
        return text(await self.alone.post(COMPLETIONS, body(prompt)))


def prompt_of(seed: str) -> list[int]:
    """Return the token ids of a prompt. Its length is not one token more than whole blocks.

    Such a prompt is stored with one block more than the connector looks for.
    """
    assert (PROMPT_TOKENS - 1) % BLOCK_TOKENS
    assert (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS == LOADED_TOKENS
    return random.Random(seed).choices(range(10, 2000), k=PROMPT_TOKENS)


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    # Without ignore_eos, an answer could end before it depends on the prompt.
    fixed = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, "prompt": prompt, **fixed, **fields}


def text(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


async def tokens_by_source(engine: Vllm) -> dict[str, float]:
    """Return how many tokens of all prompts an engine has computed, and how many it had from elsewhere."""
    async with aiohttp.ClientSession() as http, http.get(f"{engine.url}/metrics") as response:
        page = await response.text()
    return {
        sample.labels["source"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:prompt_tokens_by_source_total"
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="system")
async def _system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    folder = tmp_path_factory.mktemp("vllm-pd")
    model, storage = folder / "model", folder / "kv"
    storage.mkdir()
    await asyncio.to_thread(make_model, model, size="contextual")
    async with AsyncExitStack() as stack:

        async def started(name: str, *arguments: str) -> Vllm:
            engine = Vllm(model, directory=folder, name=name, arguments=arguments)
            stack.push_async_callback(engine.stop)
            await engine.start()
            return engine

        # One after the other, because each start takes a core.
        alone = await started("alone")
        prefiller, decoder = [await started(name, *exchanging(storage)) for name in ("prefiller", "decoder")]
        prefill = described("prefill", [prefiller.member])
        allowed = ("--pool", str(write_pool(folder / "allowed.json", prefill)))
        endpoint = f"{decoder.host}:{decoder.port}"
        proxy = PdProxy(endpoint, "--kv-connector", "shared-storage", *allowed, directory=folder)
        await stack.enter_async_context(proxy)
        member = PoolMember(id=decoder.name, address="127.0.0.1", port=proxy.port)
        decode = described("tiny", [member], prefillPool="prefill", prefillMinTokens=BLOCK_TOKENS)
        deployment = Deployment({"tiny": decode, "prefill": prefill}, mode=Mode.STREAMED, directory=folder)
        await stack.enter_async_context(deployment)
        yield System(
            prefiller=prefiller, decoder=decoder, alone=alone, proxy=proxy, deployment=deployment, storage=storage
        )


def exchanging(storage: Path) -> Sequence[str]:
    """Return vLLM's options of an engine that exchanges KV by a folder."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    return ("--kv-transfer-config", json.dumps(connector))


def described(name: str, members: list[PoolMember], **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = document(name, members)
    made["spec"] |= {"model": {"name": MODEL}, "engine": {"discovery": {"enabled": False}}, **spec}
    return made


async def test_decode_engine_loads_the_kv_that_the_prefiller_computed(system: System) -> None:
    before = await tokens_by_source(system.prefiller), await tokens_by_source(system.decoder)
    prompt = prompt_of("remote")
    reply = await system.ask(prompt)

    assert (dict(receipt(reply))["prefill"], reply.headers["x-dualmap-prefill"]) == ("prefiller", "remote")
    assert text(json.loads(reply.body)) == await system.answer_alone(prompt)
    after = await tokens_by_source(system.prefiller), await tokens_by_source(system.decoder)
    computed, loaded = "local_compute", "external_kv_transfer"
    assert after[0][computed] - before[0][computed] == PROMPT_TOKENS
    assert after[1][loaded] - before[1][loaded] == LOADED_TOKENS
    assert after[1][computed] - before[1][computed] == PROMPT_TOKENS - LOADED_TOKENS
    assert await system.proxy.metric("dualmap_pd_prefills_total", where="remote") == 1


async def test_kv_of_another_prompt_gives_another_text(system: System) -> None:
    # Otherwise the equal texts of the other tests would not show whose KV the decode engine has.
    prompt, folders = prompt_of("overwritten"), []
    for each in (prompt_of("other"), prompt):
        known = set(system.storage.iterdir())
        await system.prefiller.post(COMPLETIONS, body(each, max_tokens=1))
        folders += set(system.storage.iterdir()) - known
    other, overwritten = folders
    shutil.copytree(other, overwritten, dirs_exist_ok=True)

    before = await tokens_by_source(system.decoder)
    found = text(await system.decoder.post(COMPLETIONS, body(prompt)))

    after = await tokens_by_source(system.decoder)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == LOADED_TOKENS
    assert found != await system.answer_alone(prompt)


async def test_proxy_for_nixl_reports_a_local_prefill_although_the_engine_loads_kv(
    system: System, tmp_path: Path
) -> None:
    prompt, before = prompt_of("nixl"), await tokens_by_source(system.decoder)
    endpoint = f"{system.decoder.host}:{system.decoder.port}"
    async with PdProxy(endpoint, "--allow", "127.0.0.0/8", directory=tmp_path) as proxy:
        headers = {"x-prefiller-host-port": f"{system.prefiller.host}:{system.prefiller.port}"}
        data = json.dumps(body(prompt)).encode()
        reply = await http1(f"http://127.0.0.1:{proxy.port}{COMPLETIONS}", body=data, headers={**JSON, **headers})

        assert (reply.status, reply.headers["x-dualmap-prefill"]) == (200, "local")
        assert await proxy.metric("dualmap_pd_prefill_failures_total", reason="no_parameters") == 1
    assert text(json.loads(reply.body)) == await system.answer_alone(prompt)
    after = await tokens_by_source(system.decoder)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == LOADED_TOKENS


async def test_killed_prefiller_leads_to_a_local_prefill_until_it_is_back(system: System) -> None:
    before = await tokens_by_source(system.decoder)
    prompt, later = prompt_of("killed"), prompt_of("restarted")
    await system.prefiller.kill()
    try:
        reply = await system.ask(prompt)
    finally:
        await system.prefiller.start()

    assert (dict(receipt(reply))["prefill"], reply.headers["x-dualmap-prefill"]) == ("prefiller", "local")
    assert text(json.loads(reply.body)) == await system.answer_alone(prompt)
    after = await tokens_by_source(system.decoder)
    assert after["external_kv_transfer"] == before["external_kv_transfer"]
    assert after["local_compute"] - before["local_compute"] == PROMPT_TOKENS
    assert await system.proxy.metric("dualmap_pd_prefills_total", where="local") == 1
    assert await system.proxy.metric("dualmap_pd_prefill_failures_total", reason="unreachable") == 1

    reply = await system.ask(later)
    assert reply.headers["x-dualmap-prefill"] == "remote"
    assert text(json.loads(reply.body)) == await system.answer_alone(later)
