"""Tests of recordings through the real Envoy and router: every outcome of a request, and no text in clear."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from dualmap.recordings.values import Missing, PoolChanged, RecordedRequest
from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import opened
from harness.deployment import CHAT, Deployment
from harness.documents import chat, document, member_of, prompt_of, queue
from harness.upstream import Received, Upstream, sse
from harness.waiting import until
from recorded_folder import everything_in, lines_of, requests_of

modes = pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
USAGE = b'{"prompt_tokens":11,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":8}}'
EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[],"usage":' + USAGE + b"}\n\ndata: [DONE]\n\n",
]


@pytest_asyncio.fixture(name="engine")
async def _engine() -> AsyncIterator[Upstream]:
    async with Upstream(name="engine") as engine:
        yield engine


async def fails(_: web.Request, __: Received) -> web.StreamResponse:
    return web.json_response({"error": {"message": "out of memory"}}, status=500)


async def recorded(folder: Path, count: int) -> list[RecordedRequest]:
    """Return the requests of a recording when there are ``count``."""

    async def there() -> bool:
        return len(requests_of(folder)) >= count

    await until(there, f"{count} requests are recorded")
    found = requests_of(folder)
    assert len(found) == count
    return found


@modes
async def test_recording_has_the_outcome_and_measurements_of_each_request(
    mode: Mode, engine: Upstream, tmp_path: Path
) -> None:
    folder = tmp_path / "recording"
    pools = {
        "pool": document("pool", [member_of(engine)]),
        "empty": document("empty", [], **queue(holdWhenEmpty=False)),
    }
    secret = "Paragraph 7 of the merger"
    named = {"x-session-id": "session of Ada", "x-team": "the red team"}
    body = chat("pool", prompt_of(3, seed=secret), cache_salt="salt of Ada")
    async with Deployment(
        pools, mode=mode, directory=tmp_path, router_arguments=("--record", str(folder))
    ) as deployment:
        assert (await deployment.ask(body, headers=named)).status == 200
        engine.answer = sse(EVENTS)
        assert (await deployment.ask({**body, "stream": True}, headers=named)).status == 200
        engine.answer = fails
        assert (await deployment.ask(body)).status == 500
        engine.answer = sse(EVENTS, then=(forever := asyncio.Event()))
        async with opened(deployment.envoy.url + CHAT, json.dumps({**body, "stream": True}).encode()) as response:
            assert await response.content.readany()
        await recorded(folder, 4)
        forever.set()
        assert (await deployment.ask(chat("empty"))).status == 503
        assert (await deployment.ask(chat("nobody"))).status == 404
        assert (await deployment.ask(b"{}")).status == 400
        whole, streamed, failed, gone, refused = await recorded(folder, 5)
        # SIGTERM writes what is not on disk yet.
        await deployment.router.stop()

    assert [each.outcome.value for each in (whole, streamed, failed, gone, refused)] == [
        *("ok", "ok", "engine_error", "client_gone", "refused")
    ]
    assert (whole.streamed, whole.ttft_s) == (False, None)
    assert streamed.ttft_s is not None
    assert streamed.duration_s is not None
    assert 0 < streamed.ttft_s <= streamed.duration_s
    assert whole.receipt is not None
    assert whole.receipt.chosen == "engine"
    assert whole.blocks == streamed.blocks == failed.blocks != ()
    assert whole.session == streamed.session is not None
    assert failed.session is None
    assert len({each.request for each in (whole, streamed, failed, gone, refused)} - {None}) == 5
    assert (refused.pool, refused.code, refused.receipt) == ("llm/empty", "no_endpoint", None)
    lines = lines_of(folder)
    assert sum(each.unrouted for each in lines if isinstance(each, Missing)) == 2
    assert {each.pool.id for each in lines if isinstance(each, PoolChanged)} == {"llm/pool", "llm/empty"}
    everything = everything_in(folder)
    request_id = engine.received[0].headers["x-request-id"]
    for text in (secret, "All work and no play", "salt of Ada", "session of Ada", "red team", request_id):
        assert text.encode() not in everything


@modes
async def test_recording_has_the_usage_of_answers(mode: Mode, engine: Upstream, tmp_path: Path) -> None:
    folder, body = tmp_path / "recording", chat("pool")
    pools = {"pool": document("pool", [member_of(engine)])}
    whole, streaming = engine.answer, sse(EVENTS)

    async def usages() -> set[tuple[bool, int | None, int | None, int | None]]:
        return {
            (each.streamed, each.engine_prompt_tokens, each.output_tokens, each.cached_tokens)
            for each in requests_of(folder)
        }

    async with Deployment(
        pools, mode=mode, directory=tmp_path, router_arguments=("--record", str(folder))
    ) as deployment:

        async def both_recorded() -> bool:
            engine.answer = whole
            assert (await deployment.ask(body)).status == 200
            engine.answer = streaming
            assert (await deployment.ask({**body, "stream": True})).status == 200
            return await usages() >= {(False, 10, 3, 8), (True, 11, 4, 8)}

        # A line lacks the usage if Envoy reports it late, on a slow machine.
        await until(both_recorded, "the usage of both kinds of answers is recorded")
