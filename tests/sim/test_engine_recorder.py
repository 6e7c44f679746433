"""Tests of the recorder in ``bench.engine`` with an engine that answers like vLLM, and with faulty engines.

``e2e/test_real_vllm.py`` tests the recorder with a real vLLM.
"""

import importlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

ROOT = Path(__file__).parents[2]
ANSWERS = {
    "/v1/models": '{"data": [{"id": "tiny"}]}',
    "/version": '{"version": "1.2.3"}',
    "/metrics": 'other 1\nvllm:cache_config_info{block_size="32",num_gpu_blocks="100",engine="0"} 1.0\n',
}


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.engine.{name}")


class FakeVllm:
    """An engine that answers at once with two tokens per chunk, and records its requests."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.details: dict | None = {"cached_tokens": 64}
        self.status = 200

    def app(self) -> web.Application:
        app = web.Application()
        for path in ANSWERS:
            app.router.add_get(path, self.tell)
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def tell(self, request: web.Request) -> web.Response:
        return web.Response(text=ANSWERS[request.path], content_type="application/json")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        if self.status != 200:
            return web.Response(status=self.status, text="no room")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for tokens in [*range(2, asked["max_tokens"], 2), asked["max_tokens"], asked["max_tokens"]]:
            usage = {"completion_tokens": tokens, "prompt_tokens_details": self.details}
            await response.write(b"data: " + json.dumps({"usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture(name="vllm")
def _vllm() -> FakeVllm:
    return FakeVllm()


@pytest.fixture(name="url")
async def _url(vllm: FakeVllm) -> AsyncIterator[str]:
    async with TestServer(vllm.app()) as server:
        yield str(server.make_url("/"))


async def test_recorder_sends_planned_requests_and_times_each_token(bench, vllm: FakeVllm, url: str) -> None:
    ask = bench("scenarios").Ask(pieces=((5, 70), (6, 10)), output_tokens=5, setup=True)

    async with bench("client").Client(url) as client:
        (seen,) = await client.wave((ask,), number=3, began_s=0.0)

    (asked,) = vllm.asked
    assert asked["prompt"] == bench("scenarios").token_ids(ask.pieces)
    assert (asked["max_tokens"], asked["ignore_eos"], asked["model"]) == (5, True, "tiny")
    assert (seen.prompt_tokens, seen.cached_tokens, seen.setup, seen.wave) == (80, 64, True, 3)
    assert len(seen.token_s) == 5
    assert list(seen.token_s) == sorted(seen.token_s)
    assert seen.sent_s <= seen.token_s[0]
    assert seen.token_s[0] == seen.token_s[1], "two tokens came in one chunk"


async def test_recorder_reports_rejections_and_missing_fields(bench, vllm: FakeVllm, url: str) -> None:
    ask, error = bench("scenarios").Ask(pieces=((5, 70),)), bench("client").EngineError

    async with bench("client").Client(url) as client:
        vllm.details = None
        with pytest.raises(error, match="--enable-prompt-tokens-details"):
            await client.wave((ask, ask), number=0, began_s=0.0)
        vllm.status = 400
        with pytest.raises(error, match="status 400: no room"):
            await client.wave((ask,), number=0, began_s=0.0)
        with pytest.raises(error, match="no line that begins"):
            await client.line("/metrics", "vllm:nothing")
        with pytest.raises(error, match="404"):
            await client.get("/nowhere")


async def test_recorder_without_engine_reports_a_connection_error(bench) -> None:
    with pytest.raises(bench("client").EngineError, match=r"127\.0\.0\.1:9/v1/models"):
        async with bench("client").Client("http://127.0.0.1:9"):
            pass


async def test_recording_contains_every_planned_request(
    bench, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenarios, record, recording = bench("scenarios"), bench("record"), bench("recording")
    asks = tuple(scenarios.Ask(pieces=((n, 64 + n),), output_tokens=n) for n in (1, 2))
    plan = [scenarios.PlannedGroup(scenario="queue cold", round=r, waves=(asks, asks[:1])) for r in range(2)]
    monkeypatch.setattr(record, "planned", lambda rounds, tokens_per_s: iter(plan))

    made = await record.record(url, rounds=2, step_tokens=512, options="--x", say=lambda line: None)

    assert [(each.scenario, each.round, [seen.wave for seen in each.requests]) for each in made.groups] == [
        ("queue cold", 0, [0, 0, 1]),
        ("queue cold", 1, [0, 0, 1]),
    ]
    assert {name: made.tokens(name) for name in ("block_tokens", "kv_tokens", "step_tokens")} == {
        "block_tokens": 32,
        "kv_tokens": 3200,
        "step_tokens": 512,
    }
    assert made.engine["version"] == "vLLM 1.2.3"
    recording.write_recording(tmp_path / "made", made)
    again = recording.read_recording(tmp_path / "made")
    assert [[seen.pieces for seen in each.requests] for each in again.groups] == [
        [seen.pieces for seen in each.requests] for each in made.groups
    ]
