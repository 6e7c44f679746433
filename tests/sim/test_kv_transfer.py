"""Simulated engines that prefill for others, and that decode what others have prefilled."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from typing import Any

import aiohttp
import pytest

from dualmap_sim.engine import Engine
from dualmap_sim.http_server import EngineHttpServer
from dualmap_sim.kv_handover import CACHE_PATH, SOURCE_HEADER
from dualmap_sim.presets import PRESETS
from dualmap_sim.server_settings import KvTransferSettings, ServerSettings
from engines import ROUND, ask, run_out
from waiting import until

PROMPT = "the fox ran far and saw one red hen " * 40
TOKENS = len(PROMPT) // 4
ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


class Servers:
    """Engine servers, and a client for them."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self.client = client
        self.servers: dict[str, EngineHttpServer] = {}

    async def start(self, *, settings: KvTransferSettings | None, preset: str = "7b", speed: float = 100.0) -> str:
        """Start an engine and return its URL."""
        config = replace(PRESETS[preset], block_tokens=16, pull_tokens_per_s=inf)
        server = EngineHttpServer(
            ServerSettings(
                host="127.0.0.1", port=0, model="qwen", config=config, speed=speed, api_key=None, kv_transfer=settings
            )
        )
        url = f"http://{await server.start()}"
        self.servers[url] = server
        return url

    async def stop(self, url: str) -> None:
        await self.servers.pop(url).close()

    async def complete(self, url: str, **body: Any) -> tuple[int, dict[str, Any]]:
        document = {"model": "qwen", "prompt": PROMPT, "max_tokens": 4, **body}
        async with self.client.post(f"{url}/v1/completions", json=document) as response:
            return response.status, await response.json()

    async def complete_from(self, url: str, source: str) -> tuple[int, dict[str, Any]]:
        """Complete the prompt; the request names the engine at ``source`` for its KV."""
        document = {"model": "qwen", "prompt": PROMPT, "max_tokens": 4}
        headers = {SOURCE_HEADER: source.removeprefix("http://")}
        async with self.client.post(f"{url}/v1/completions", json=document, headers=headers) as response:
            return response.status, await response.json()

    async def prefill(self, url: str) -> dict[str, Any]:
        """Prefill the prompt for another engine; return the parameters of its KV."""
        status, answer = await self.complete(url, max_tokens=1, kv_transfer_params=ASKS)
        assert status == 200
        parameters: dict[str, Any] = answer["kv_transfer_params"]
        return parameters

    async def metric(self, url: str, name: str) -> float:
        async with self.client.get(f"{url}/metrics") as response:
            page = await response.text()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))


@asynccontextmanager
async def servers() -> AsyncGenerator[Servers, None]:
    async with aiohttp.ClientSession() as client:
        made = Servers(client)
        try:
            yield made
        finally:
            for url in tuple(made.servers):
                await made.stop(url)


async def test_decode_engine_does_not_compute_what_it_pulls() -> None:
    async with servers() as made:
        prefiller = await made.start(settings=KvTransferSettings())
        decoder = await made.start(settings=KvTransferSettings())
        parameters = await made.prefill(prefiller)
        assert (parameters["do_remote_prefill"], parameters["do_remote_decode"]) == (True, False)
        assert len(parameters["remote_block_ids"][0]) == -(-TOKENS // 16)
        status, answer = await made.complete(decoder, kv_transfer_params=parameters)
        alone = await made.complete(prefiller)
        assert status == 200
        assert answer["choices"] == alone[1]["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == TOKENS - 1
        assert "kv_transfer_params" not in answer


async def test_kv_is_pulled_once() -> None:
    async with servers() as made:
        prefiller = await made.start(settings=KvTransferSettings())
        decoder = await made.start(settings=KvTransferSettings())
        parameters = await made.prefill(prefiller)
        assert (await made.complete(decoder, kv_transfer_params=parameters))[0] == 200
        assert (await made.complete(decoder, kv_transfer_params=parameters))[0] == 500


@pytest.mark.parametrize("change", [{"remote_engine_id": "old"}, {"remote_block_ids": [[99]]}, {"remote_port": 1}])
async def test_kv_that_is_not_there_fails_or_is_computed(change: dict[str, Any]) -> None:
    async with servers() as made:
        prefiller = await made.start(settings=KvTransferSettings())
        failing = await made.start(settings=KvTransferSettings())
        computing = await made.start(settings=KvTransferSettings(recompute=True))
        parameters = {**await made.prefill(prefiller), **change}
        status, answer = await made.complete(failing, kv_transfer_params=parameters)
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        status, answer = await made.complete(computing, kv_transfer_params=parameters)
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_stream_whose_kv_is_lost_begins_with_an_error() -> None:
    async with servers() as made:
        prefiller = await made.start(settings=KvTransferSettings())
        decoder = await made.start(settings=KvTransferSettings())
        parameters = await made.prefill(prefiller)
        await made.stop(prefiller)
        body = {"model": "qwen", "prompt": PROMPT, "stream": True, "kv_transfer_params": parameters}
        async with made.client.post(f"{decoder}/v1/completions", json=body) as response:
            assert response.status == 200
            lines = (await response.text()).split("\n\n")
        assert json.loads(lines[0].removeprefix("data: "))["error"]["code"] == 500
        assert lines[1:] == ["data: [DONE]", ""]


async def test_prefiller_that_ends_within_the_transfer_hands_over_nothing() -> None:
    async with servers() as made:
        prefiller = await made.start(settings=KvTransferSettings(tokens_per_s=0.001))
        decoder = await made.start(settings=KvTransferSettings())
        parameters = await made.prefill(prefiller)
        asked = asyncio.create_task(made.complete(decoder, kv_transfer_params=parameters))
        server = made.servers[prefiller]
        await until(lambda: server._unanswered == 1)
        await made.stop(prefiller)
        assert (await asked)[0] == 500


async def test_kv_that_no_engine_pulls_is_released_in_time() -> None:
    async with servers() as made:
        prefiller = await made.start(settings=KvTransferSettings(hold_s=0.2))
        decoder = await made.start(settings=KvTransferSettings())
        parameters = await made.prefill(prefiller)
        assert made.servers[prefiller]._engine.kv_tokens_reserved > 0
        await until(lambda: made.servers[prefiller]._engine.kv_tokens_reserved == 0)
        assert (await made.complete(decoder, kv_transfer_params=parameters))[0] == 500


async def test_prefill_only_engine_hands_over_kv() -> None:
    async with servers() as made:
        prefiller = await made.start(settings=KvTransferSettings(), preset="pd")
        decoder = await made.start(settings=KvTransferSettings())
        assert (await made.complete(decoder, kv_transfer_params=await made.prefill(prefiller)))[0] == 200


async def test_engine_without_a_connector_ignores_the_parameters() -> None:
    async with servers() as made:
        engine = await made.start(settings=None)
        status, answer = await made.complete(engine, max_tokens=1, kv_transfer_params=ASKS)
        assert status == 200
        assert "kv_transfer_params" not in answer


@pytest.mark.parametrize(
    ("parameters", "where"),
    [
        ("x", "kv_transfer_params"),
        ({"do_remote_prefill": True}, "kv_transfer_params.remote_block_ids"),
        ({"do_remote_prefill": True, "remote_block_ids": [[1]]}, "kv_transfer_params.remote_port"),
        (
            {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_port": 1},
            "kv_transfer_params.remote_engine_id",
        ),
    ],
)
async def test_invalid_parameters_are_refused(parameters: object, where: str) -> None:
    async with servers() as made:
        engine = await made.start(settings=KvTransferSettings())
        status, answer = await made.complete(engine, kv_transfer_params=parameters)
        assert (status, answer["error"]["param"]) == (400, where)


def test_kept_kv_takes_memory_until_its_release() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, replace(ask("a", prompt=500, output=10), keeps_kv=True))
    run_out(engine)
    assert engine.kv_tokens_reserved == 510
    engine.submit(engine.now_s, ask("b", prompt=490, output=10))
    run_out(engine)
    assert engine.waiting == 1
    engine.release_kv(engine.now_s, "a")
    engine.release_kv(engine.now_s, "a")
    run_out(engine)
    assert (engine.waiting, engine.kv_tokens_reserved) == (0, 0)


def test_aborted_request_keeps_no_kv() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, replace(ask("a", prompt=100, output=50), keeps_kv=True))
    engine.abort(5.0, "a")
    run_out(engine)
    assert engine.kv_tokens_reserved == 0


async def test_engine_pulls_what_the_cache_of_the_named_engine_holds() -> None:
    async with servers() as made:
        source = await made.start(settings=KvTransferSettings())
        engine = await made.start(settings=KvTransferSettings())
        assert (await made.complete(source))[0] == 200

        status, answer = await made.complete_from(engine, source)

        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (TOKENS - 1) // 16 * 16
        assert answer["choices"] == (await made.complete(source))[1]["choices"]


@pytest.mark.parametrize("state", ["cold", "gone", "without transfers"])
async def test_engine_computes_what_it_cannot_pull(state: str) -> None:
    async with servers() as made:
        source = await made.start(settings=None if state == "without transfers" else KvTransferSettings())
        engine = await made.start(settings=KvTransferSettings())
        if state != "cold":
            assert (await made.complete(source))[0] == 200
        if state == "gone":
            await made.stop(source)

        status, answer = await made.complete_from(engine, source)

        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_engine_computes_what_an_engine_that_never_answers_holds() -> None:
    connections: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _reader, writer: connections.append(writer), "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    async with silent, servers() as made:
        engine = await made.start(settings=KvTransferSettings(hold_s=0.2))
        async with asyncio.timeout(60):
            status, answer = await made.complete_from(engine, f"http://{host}:{port}")
        for each in connections:
            each.close()
    assert status == 200
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "body", [{}, {"blocks": "x", "cached_tokens": 0}, {"blocks": [1], "cached_tokens": -1}, {"blocks": [True]}]
)
async def test_invalid_request_for_cached_kv_is_rejected(body: dict[str, Any]) -> None:
    async with servers() as made:
        source = await made.start(settings=KvTransferSettings())
        async with made.client.post(f"{source}{CACHE_PATH}", json=body) as response:
            assert response.status == 400
            assert "is not a" in (await response.json())["error"]["message"]
