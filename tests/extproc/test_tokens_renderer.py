"""Tests of renderers as sources of token ids: their answers, their failures, and the pause after failures."""

import asyncio
import re
from dataclasses import replace

import pytest
from aiohttp import web

from dualmap.prompts.api import Api
from dualmap_extproc.request.tokens import Pending
from dualmap_extproc.tokens import faults, renderer, sources
from dualmap_extproc.tokens.faults import RenderedRequests, RendererFaults
from dualmap_extproc.tokens.renderer import RendererFault
from extproc.token_sources import Answer, FailingRenderer, chat, rendered, rendering


async def test_renderer_receives_the_body_unchanged() -> None:
    received: list[bytes] = []

    async def answer(request: web.Request) -> web.Response:
        received.append(await request.read())
        return web.json_response({"token_ids": [1, 2, 3]})

    body = b'{ "messages": [],  "model": "m", "big": 12345678901234567890 }'
    found = await rendered(answer, body)
    assert found is not None
    assert found.ids.tolist() == [1, 2, 3]
    assert received == [body]


@pytest.mark.parametrize(
    "answer",
    [
        {"token_ids": "x"},
        {"token_ids": []},
        {"token_ids": [1, -1]},
        {"token_ids": [1, "a"]},
        {"token_ids": [2**40]},
        [{"token_ids": [1]}, {"token_ids": [2]}],
        {"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}}},
        {"token_ids": [1], "content_parts": [{"type": "image_url"}]},
        "text",
        None,
    ],
)
async def test_renderer_answer_without_ids_of_one_text_is_not_used(answer: object) -> None:
    async def give(_: web.Request) -> web.Response:
        return web.json_response(answer)

    assert await rendered(give) is None


@pytest.mark.parametrize("status", [302, 403, 500])
async def test_renderer_error_is_not_used(status: int) -> None:
    async def give(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/"}, text='{"token_ids": [1]}')

    assert await rendered(give) is None


async def test_renderer_that_sends_too_much_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "ANSWER_MAX_BYTES", 100)

    async def give(_: web.Request) -> web.Response:
        return web.json_response({"token_ids": [1] * 100})

    assert await rendered(give) is None


@pytest.mark.parametrize(
    "answer", ["<html>", "", "{}", "[1, 2]", '{"token_ids": "x"}', '{"token_ids": [-1]}', "[" * 5000]
)
async def test_renderer_that_answers_junk_counts_as_failing(answer: str) -> None:
    async def give(_: web.Request) -> web.Response:
        return web.Response(text=answer)

    assert "the answer" in await reason_after_failures(give)


async def test_renderer_that_sends_too_much_counts_as_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def give(_: web.Request) -> web.Response:
        return web.json_response({"token_ids": [1] * 10_000})

    monkeypatch.setattr(renderer, "ANSWER_MAX_BYTES", 20_000)
    assert "more than 20000 bytes" in await reason_after_failures(give)
    # The ids of a long prompt may take so much, and the tensors of an image.
    for body in (chat("x" * 2000), chat("see https://pool/image.png")):
        assert await reason_after_failures(give, body) == ""


async def reason_after_failures(answer: Answer, body: bytes | None = None) -> str:
    server, served = await rendering(answer)
    for _ in range(faults.FAILURES_MAX):
        assert await served.tokens(body or chat()) is None
    reason = str(served.tokenizers.status(served.pool.id, ())["reason"])
    await served.tokenizers.close()
    await server.close()
    return reason


@pytest.mark.parametrize("answer", [{"token_ids": []}, [{"token_ids": [1]}, {"token_ids": [2]}], []])
async def test_renderer_answer_without_one_prompt_is_no_failure(answer: object) -> None:
    async def give(_: web.Request) -> web.Response:
        return web.json_response(answer)

    assert await reason_after_failures(give) == ""


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:99999", "the URL is not valid"),
        ("http://nowhere.invalid:80", "no connection ("),
        ("https://127.0.0.1:{port}", "no TLS connection (ClientConnectorSSLError)"),
    ],
)
async def test_renderer_that_cannot_be_reached_is_named_in_words(url: str, said: str) -> None:
    server, served = await rendering(FailingRenderer(200).answer)
    client = renderer.Renderer()
    with pytest.raises(RendererFault, match=re.escape(said)):
        await client.ids(url.format(port=server.port), (chat(),), Api.CHAT)
    await client.close()
    await served.tokenizers.close()
    await server.close()


async def test_renderer_that_closes_the_connection_is_named_in_words() -> None:
    async def close(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    assert "no valid HTTP answer (it ends early)" in await reason_after_failures(close)


async def test_silent_renderer_is_given_up_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TOKENIZE_MS", 50)
    released = asyncio.Event()

    async def give(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    server, served = await rendering(give)
    for _ in range(faults.FAILURES_MAX):
        assert await served.tokens(chat()) is None
    assert "did not answer within" in str(served.tokenizers.status(served.pool.id, ())["reason"])
    released.set()
    await served.tokenizers.close()
    await server.close()


async def test_slow_renderer_does_not_delay_another() -> None:
    released = asyncio.Event()

    async def wait(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    async def give(_: web.Request) -> web.Response:
        return web.json_response({"token_ids": [1]})

    slow_server, slow = await rendering(wait)
    server, healthy = await rendering(give)
    other = replace(slow.pool, name="other", engine=healthy.pool.engine)
    slow.tokenizers.set_pools([slow.pool, other])
    for _ in range(sources.PENDING_MAX):
        assert isinstance(slow.ask([chat()], lambda _, __: None), Pending)
    assert slow.ask([chat()], lambda _, __: None) is None
    slow.pool = other
    assert await slow.tokens(chat()) is not None
    assert slow.tokenizers.status(other.id, ())["reason"] == ""
    released.set()
    for served in (slow, healthy):
        await served.tokenizers.close()
    for each in (slow_server, server):
        await each.close()


@pytest.mark.parametrize("status", [302, 403, 404, 500, 503])
async def test_renderer_that_fails_is_left_alone_for_a_time(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingRenderer(status)
    server, served = await rendering(failing.answer)
    for _ in range(faults.FAILURES_MAX + 5):
        assert await served.tokens(chat()) is None
    said = served.tokenizers.status(served.pool.id, ())
    assert failing.asked == faults.FAILURES_MAX
    assert (said["ready"], said["reason"]) == (
        False,
        f"m (chat): {served.pool.engine.tokenizer.url}/v1/chat/completions/render answered with {status}",
    )
    monkeypatch.setattr(faults, "RETRY_S", 0.0)
    failing.status = 200
    served.tokenizers._faults.failed(0.0, RenderedRequests(served.pool.id, "m", Api.CHAT), "again")
    assert await served.tokens(chat()) is not None
    assert served.tokenizers.status(served.pool.id, ())["reason"] == ""
    await served.tokenizers.close()
    await server.close()


async def test_faulty_requests_do_not_count_against_the_renderer() -> None:
    failing = FailingRenderer(400)
    server, served = await rendering(failing.answer)
    for _ in range(faults.FAILURES_MAX + 5):
        assert await served.tokens(chat()) is None
    assert failing.asked == faults.FAILURES_MAX + 5
    await served.tokenizers.close()
    await server.close()


async def test_renderer_that_is_gone_is_left_alone_and_another_is_asked() -> None:
    failing = FailingRenderer(200)
    server, served = await rendering(failing.answer)
    await server.close()
    for _ in range(faults.FAILURES_MAX):
        assert await served.tokens(chat()) is None
    reason = str(served.tokenizers.status(served.pool.id, ())["reason"])
    assert reason.endswith("/v1/chat/completions/render: no connection (Connection refused)")
    other, again = await rendering(failing.answer)
    served.tokenizers.set_pools([again.pool])
    assert served.tokenizers.status(served.pool.id, ())["reason"] == ""
    assert await served.tokens(chat()) is not None
    for each in (served, again):
        await each.tokenizers.close()
    await other.close()


async def test_failures_of_one_api_do_not_count_for_another() -> None:
    now, known = 0.0, RendererFaults()
    chats = RenderedRequests("p", "m", Api.CHAT)
    for _ in range(faults.FAILURES_MAX):
        known.failed(now, chats, "404")
    assert not known.usable(now, chats)
    assert known.usable(now, chats._replace(api=Api.RESPONSES))
    assert known.usable(now, chats._replace(pool="q"))
    assert [known.usable(now + faults.RETRY_S, chats) for _ in range(2)] == [True, False]
