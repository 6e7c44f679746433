"""The sidecar of llm-d between a router with a prefill pool and a decode engine, with real Envoy and simulated engines.

DUALMAP_LLM_D_SIDECAR names the sidecar's program. llm-d-router is not in the Go module proxy, so no test can build it.
In a checkout of github.com/llm-d/llm-d-router, this command does::

    CGO_ENABLED=0 go build -o pd-sidecar ./cmd/pd-sidecar
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply
from harness.deployment import Deployment
from harness.documents import document, receipt
from harness.processes import START_TIMEOUT_S, Child
from harness.stack import Engine, PoolMember
from harness.upstream import Received, Upstream
from harness.waiting import until
from ports import reserved_port

PROGRAM = os.environ.get("DUALMAP_LLM_D_SIDECAR")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROGRAM is None, reason="DUALMAP_LLM_D_SIDECAR names no pd-sidecar of llm-d"),
]

MODEL = "qwen-model"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
FAILURES_UNTIL_SUSPENDED = 3
PROMPTS_MAX = 40
"""Half of the prompts have the dead member as their first choice."""


class Sidecar(Child):
    """A running sidecar of llm-d in front of an engine at a port. It listens on all addresses."""

    def __init__(self, engine: int, *, directory: Path) -> None:
        assert PROGRAM is not None
        self.port = reserved_port()
        argv = (PROGRAM, "--port", str(self.port), "--model-server-port", str(engine), "--secure-proxy=false")
        super().__init__("llm-d-sidecar", argv, directory=directory)

    @property
    def member(self) -> PoolMember:
        """The sidecar as a member of the decode pool."""
        return PoolMember(id="decode", address="127.0.0.1", port=self.port)

    async def start(self) -> None:
        """Start the sidecar and wait until it passes requests to its engine."""
        await super().start()

        async def answers() -> bool:
            assert self.returncode is None, self.output()[-4000:]
            try:
                url = f"http://127.0.0.1:{self.port}/health"
                async with aiohttp.ClientSession() as session, session.get(url) as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await until(answers, "the sidecar answers", timeout_s=START_TIMEOUT_S)


class Tap:
    """Passes the sidecar's requests to the decode engine, and keeps the engine's answers.

    The sidecar itself replaces the cached tokens in the answers.
    """

    def __init__(self, engine: Engine) -> None:
        self.upstream = Upstream(name="tap", answer=self._answer)
        self.answers: list[Any] = []
        self._engine = engine

    async def _answer(self, _: web.Request, received: Received) -> web.StreamResponse:
        url = f"http://{self._engine.endpoint}{received.path}"
        async with (
            aiohttp.ClientSession() as http,
            http.request(received.method, url, data=received.body, headers=JSON) as response,
        ):
            answer = await response.read()
            if received.path == COMPLETIONS:
                self.answers.append(json.loads(answer))
            return web.Response(status=response.status, body=answer, content_type=response.content_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The processes. ``prefillers`` are engines by the ids of their members."""

    deployment: Deployment
    decoder: Tap
    prefillers: dict[str, Engine]

    async def ask(self, seed: str, words: int = 12000) -> Reply:
        """Send a prompt of at least three tokens for four words."""
        prompt = f"{seed} " + "the fox ran far " * (words // 4)
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
        return await self.deployment.ask(asked, path=COMPLETIONS)


@pytest_asyncio.fixture(name="system")
async def _llm_d_system(tmp_path: Path) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:

        async def started(name: str) -> Engine:
            engine = Engine(directory=tmp_path, name=name, arguments=("--kv-transfer", "--speed", "50"))
            return await stack.enter_async_context(engine)

        decoder, *prefillers = await asyncio.gather(*map(started, ("decode", "prefill-0", "prefill-1")))
        tap = Tap(decoder)
        await stack.enter_async_context(tap.upstream)
        sidecar = await stack.enter_async_context(Sidecar(tap.upstream.port, directory=tmp_path))
        prefill = described("prefill", [engine.member for engine in prefillers])
        decode = described("qwen", [sidecar.member], prefillPool="prefill")
        deployment = Deployment({"qwen": decode, "prefill": prefill}, mode=Mode.STREAMED, directory=tmp_path)
        await stack.enter_async_context(deployment)
        yield System(deployment=deployment, decoder=tap, prefillers={each.name: each for each in prefillers})


def described(name: str, members: list[PoolMember], **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = document(name, members)
    made["spec"] |= {"model": {"name": MODEL}, "engine": {"discovery": {"enabled": False}}, **spec}
    return made


async def computed(engine: Engine) -> float:
    """Return the tokens of all prompts that an engine has computed."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{engine.endpoint}/metrics") as response:
        page = await response.text()
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(each.value for each in samples if each.name == "vllm:prompt_tokens_total")


async def test_sidecar_of_llm_d_has_long_prompts_prefilled_where_the_router_says(system: System) -> None:
    reply = await system.ask("long")
    said = dict(receipt(reply))
    assert (reply.status, said["chosen"]) == (200, "decode")
    usage = system.decoder.answers[-1]["usage"]
    # The decode engine has the KV of the whole prompt without its last token.
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    for name, prefiller in system.prefillers.items():
        assert await computed(prefiller) == (usage["prompt_tokens"] if name == said["prefill"] else 0)

    reply = await system.ask("short", words=40)
    said = dict(receipt(reply))
    assert (reply.status, said["prefill"], said["prefill_reason"]) == (200, "local", "short")
    assert system.decoder.answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_dead_prefiller_behind_llm_ds_sidecar_is_an_error_until_the_router_suspends_it(system: System) -> None:
    await system.prefillers["prefill-0"].kill()
    seen: list[tuple[str, int]] = []
    while not (suspended := (await system.deployment.page("prefill"))["prefill-0"]["suspended"]):
        assert len(seen) < PROMPTS_MAX, seen
        reply = await system.ask(f"dead {len(seen)}")
        seen.append((dict(receipt(reply))["prefill"], reply.status))

    assert suspended
    assert set(seen) <= {("prefill-0", 502), ("prefill-1", 200)}
    assert seen.count(("prefill-0", 502)) == FAILURES_UNTIL_SUSPENDED
    for number in range(4):
        reply = await system.ask(f"suspended {number}")
        assert (reply.status, dict(receipt(reply))["prefill"]) == (200, "prefill-1")
