"""Tests of the sources of token ids: inline, in threads, by a renderer, with a deadline, and with changing files."""

import asyncio
import json
import logging
import re
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dualmap.pools.pool import Engine, Pool, Tokenizer, TokenSource
from dualmap.prompts.api import Api
from dualmap.prompts.parity import TokenClass
from dualmap.prompts.prompt import Prompt, Rendered
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.observations import Observation, Tokenized
from dualmap_extproc.request.tokens import Pending, Tokens
from dualmap_extproc.tokens import faults, renderer, sources, template
from dualmap_extproc.tokens.faults import RenderedRequests, RendererFaults
from dualmap_extproc.tokens.files import FilesTokenizer
from dualmap_extproc.tokens.renderer import RendererFault
from dualmap_extproc.tokens.rendering import PromptTexts, TokenizerError
from dualmap_extproc.tokens.sources import PoolTokenizers
from extproc.envoy_messages import pool
from extproc.tokenizer_files import write_tokenizer
from waiting import until

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Sources:
    """The sources of one pool."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pool: Pool = replace(pool(), engine=Engine(tokenizer=tokenizer))
        self.reported: list[Observation] = []
        self.tokenizers = PoolTokenizers(self.reported.append)

    def serve(self) -> None:
        self.tokenizers.start([self.pool])
        self.tokenizers.set_pools([self.pool])

    async def tokens(self, body: bytes, api: Api = Api.CHAT, *, small: bool = True) -> Tokens | None:
        """Return the tokens of a body, now or later."""
        later: asyncio.Future[Tokens | None] = asyncio.get_running_loop().create_future()
        found = self.ask([body], lambda _, tokens: later.set_result(tokens), api, small=small)
        return await later if isinstance(found, Pending) else found

    def ask(
        self,
        chunks: Sequence[bytes],
        done: Callable[[float, Tokens | None], None],
        api: Api = Api.CHAT,
        *,
        small: bool = True,
    ) -> Tokens | Pending | None:
        prompt = read(b"".join(chunks), api)
        return self.tokenizers.tokens(self.pool.id, prompt, chunks, api, small=small, done=done)


def chat(text: str = "hello", **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


def read(body: bytes, api: Api = Api.CHAT) -> Prompt:
    prompt = read_body(body, api)
    assert isinstance(prompt, Prompt)
    return prompt


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[Sources]:
    folder = write_tokenizer(tmp_path / "tokenizer")
    served = Sources(Tokenizer(source=TokenSource.FILES, path=str(folder)))
    served.serve()
    yield served
    await served.tokenizers.close()


async def rendering(answer: Answer) -> tuple[TestServer, Sources]:
    application = web.Application()
    application.router.add_post("/v1/chat/completions/render", answer)
    server = TestServer(application)
    await server.start_server()
    served = Sources(Tokenizer(source=TokenSource.RENDERER, url=str(server.make_url("/")).rstrip("/")))
    served.serve()
    return server, served


async def rendered(answer: Answer, body: bytes | None = None) -> Tokens | None:
    server, served = await rendering(answer)
    try:
        return await served.tokens(body or chat())
    finally:
        await served.tokenizers.close()
        await server.close()


async def test_pool_without_source_has_no_tokens() -> None:
    served = Sources(Tokenizer())
    served.serve()
    assert await served.tokens(chat()) is None
    assert served.tokenizers.status(served.pool.id, ())["source"] == "Estimate"


async def test_small_body_is_tokenized_at_once(files: Sources) -> None:
    found = files.ask([chat()], lambda _, __: pytest.fail("it was not pending"))
    assert isinstance(found, Tokens)
    assert found.requests == ("m", Api.CHAT, False, 1)
    assert [type(each) for each in files.reported] == [Tokenized]


async def test_long_body_is_tokenized_in_a_thread(files: Sources) -> None:
    long = "hello world " * 2000
    assert isinstance(files.ask([chat(long)], lambda _, __: None), Pending)
    found = await files.tokens(chat(long))
    assert found is not None
    assert len(found.ids) > 4000


async def test_class_has_tools(files: Sources) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    found = await files.tokens(chat(tools=[tool]))
    assert found is not None
    assert found.requests.has_tools


async def test_class_has_tools_in_any_chunks_and_spelling(files: Sources) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = chat(tools=[tool])
    inside = body.index(b"tools") + 2
    found: list[Tokens | Pending | None] = [files.ask([body[:inside], body[inside:]], lambda _, __: None)]
    found.append(await files.tokens(body.replace(b"tools", b"to\\u006fls")))
    found.append(await files.tokens(chat('a text with "tools"')))
    assert [isinstance(each, Tokens) and each.requests.has_tools for each in found] == [True, True, False]


async def test_request_beyond_the_files_has_no_tokens(files: Sources) -> None:
    assert await files.tokens(chat(chat_template="x")) is None
    assert await files.tokens(chat(chat_template="x" * 10_000)) is None
    assert await files.tokens(chat(), small=False) is None


async def test_rendered_body_is_tokenized_in_a_thread(files: Sources) -> None:
    body = chat("hello world " * 10)
    expected = await files.tokens(body)
    folder = files.pool.engine.tokenizer.path
    rendered = PromptTexts(folder).rendered(json.loads(body), Api.CHAT)
    later: asyncio.Future[Tokens | None] = asyncio.get_running_loop().create_future()
    prompt = read(body)._replace(rendered=rendered)
    pending = files.tokenizers.tokens(
        files.pool.id, prompt, (body,), Api.CHAT, small=False, done=lambda _, tokens: later.set_result(tokens)
    )
    assert isinstance(pending, Pending)
    assert await later == expected


async def test_rendered_text_that_cannot_be_tokenized_has_no_tokens(files: Sources) -> None:
    later: asyncio.Future[Tokens | None] = asyncio.get_running_loop().create_future()
    prompt = read(chat())._replace(rendered=Rendered("\ud800", special=False))
    files.tokenizers.tokens(
        files.pool.id, prompt, (b"",), Api.CHAT, small=False, done=lambda _, tokens: later.set_result(tokens)
    )
    assert await later is None


async def test_nested_arguments_have_no_tokens(files: Sources) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 3000}}
    for filling in ("", "x" * 10_000):
        messages = [{"role": "user", "content": filling}, {"role": "assistant", "tool_calls": [call]}]
        assert await files.tokens(json.dumps({"model": "m", "messages": messages}).encode()) is None


@pytest.mark.parametrize("error", [RecursionError, MemoryError, KeyError])
async def test_any_failure_of_the_tokenizer_is_logged_once(
    files: Sources, error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error("hostile")

    monkeypatch.setattr(FilesTokenizer, "ids", fail)
    for body in (chat(), chat("x" * 10_000)) * 2:
        assert await files.tokens(body) is None
    assert len([each for each in caplog.messages if "Tokenizing failed" in each]) == 1


NESTED = "{%- for a in messages %}" * 3 + "x" + "{%- endfor %}" * 3


@pytest.fixture
async def nested(tmp_path: Path) -> AsyncIterator[Sources]:
    folder = write_tokenizer(tmp_path / "tokenizer", template=NESTED)
    served = Sources(Tokenizer(source=TokenSource.FILES, path=str(folder)))
    served.serve()
    yield served
    await served.tokenizers.close()


def many_messages(size: int) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": ""}] * (size // 12 - 10)}).encode()


async def test_template_that_loops_too_long_has_no_tokens(nested: Sources) -> None:
    body = many_messages(sources.INLINE_BYTES)
    began_s = time.thread_time()
    assert await nested.tokens(body) is None
    assert time.thread_time() - began_s < 20 * sources.INLINE_RENDER_S
    assert await nested.tokens(chat()) is not None


async def test_template_that_loops_too_long_in_a_thread_has_no_tokens(nested: Sources) -> None:
    body = many_messages(4 * sources.INLINE_BYTES)
    assert await asyncio.gather(nested.tokens(body), nested.tokens(body)) == [None, None]
    # Both threads are free again.
    await asyncio.wait_for(asyncio.wrap_future(nested.tokenizers._threads.submit(lambda: None)), timeout=60)


async def test_long_texts_leave_threads_to_others(files: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    released, encoded = Event(), FilesTokenizer.encoded

    def slow(self: FilesTokenizer, rendered: Rendered) -> "array[int]":
        if len(rendered.text) > sources.LONG_TEXT:
            released.wait(30)
        return encoded(self, rendered)

    monkeypatch.setattr(FilesTokenizer, "encoded", slow)
    long = read(chat())._replace(rendered=Rendered("a" * (sources.LONG_TEXT + 1), special=False))
    for _ in range(3):
        files.tokenizers.tokens(files.pool.id, long, (b"",), Api.CHAT, small=False, done=lambda _, __: None)
    await asyncio.sleep(0)
    try:
        assert await files.tokens(chat("x" * 10_000)) is not None
    finally:
        released.set()


async def test_tokens_after_the_deadline_are_not_used(files: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TOKENIZE_MS", 0)
    assert await files.tokens(chat("x" * 10_000)) is None


async def test_cancelled_request_is_not_called(files: Sources) -> None:
    called: list[Tokens | None] = []
    pending = files.ask([chat("x" * 10_000)], lambda _, tokens: called.append(tokens))
    assert isinstance(pending, Pending)
    pending.cancel()
    await files.tokens(chat("x" * 10_000))
    assert called == []


async def test_too_many_pending_requests_have_no_tokens(files: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PENDING_MAX", 1)
    assert isinstance(files.ask([chat("x" * 10_000)], lambda _, __: None), Pending)
    assert files.ask([chat("x" * 10_000)], lambda _, __: None) is None


async def test_start_refuses_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    served = Sources(Tokenizer(source=TokenSource.FILES, path=str(tmp_path)))
    with pytest.raises(TokenizerError, match=r"llm/qwen: spec\.engine\.tokenizer\.path: .*tokenizer_?.*json"):
        served.serve()


async def test_changed_files_replace_the_tokenizer_if_valid(files: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_POLL_S", 0.01)
    folder = Path(files.pool.engine.tokenizer.path)
    running = asyncio.create_task(files.tokenizers.run())
    before = await files.tokens(chat())
    (folder / "tokenizer.json").write_text("{}")
    await until(lambda: bool(files.tokenizers.status(files.pool.id, ())["reason"]))
    assert await files.tokens(chat()) == before
    write_tokenizer(folder, template="{{ messages[0].content }}")
    await until(lambda: not files.tokenizers.status(files.pool.id, ())["reason"])
    after = await files.tokens(chat())
    assert after is not None
    assert len(after.ids) == 1
    running.cancel()


async def test_missing_template_is_reported_and_completions_have_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sources, "_POLL_S", 0.01)
    folder = write_tokenizer(tmp_path / "tokenizer", template=None)
    served = Sources(Tokenizer(source=TokenSource.FILES, path=str(folder)))
    served.serve()
    running = asyncio.create_task(served.tokenizers.run())
    await until(lambda: "no token ids" in caplog.text)
    said = served.tokenizers.status(served.pool.id, ())
    assert (said["ready"], said["reason"]) == (True, f"{folder} has no chat template")
    assert await served.tokens(chat()) is None
    assert await served.tokens(b'{"model": "m", "prompt": "hello"}', Api.COMPLETIONS) is not None
    write_tokenizer(folder)
    await until(lambda: "token ids again" in caplog.text)
    assert served.tokenizers.status(served.pool.id, ())["reason"] == ""
    assert len([each for each in caplog.messages if "no token ids" in each]) == 1
    running.cancel()
    await served.tokenizers.close()


REFUSES = "{%- if messages[0].content.startswith('bad') %}{{ raise_exception(messages[0].content) }}{%- endif %}x"


@pytest.fixture
async def refusing(tmp_path: Path) -> AsyncIterator[Sources]:
    """A source with a template that fails for texts that begin with "bad"."""
    folder = write_tokenizer(tmp_path / "tokenizer", template=REFUSES)
    served = Sources(Tokenizer(source=TokenSource.FILES, path=str(folder)))
    served.serve()
    yield served
    await served.tokenizers.close()


@pytest.mark.parametrize("text", ["bad", "bad" * 5000])
async def test_template_that_fails_for_the_first_requests_is_reported(
    text: str, refusing: Sources, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sources, "_POLL_S", 0.01)
    running = asyncio.create_task(refusing.tokenizers.run())

    def reason() -> object:
        return refusing.tokenizers.status(refusing.pool.id, ())["reason"]

    for _ in range(template.FAILURES_MAX - 1):
        assert await refusing.tokens(chat(text)) is None
    assert reason() == ""
    for _ in range(5):
        assert await refusing.tokens(chat(text)) is None
    path = refusing.pool.engine.tokenizer.path
    assert reason() == f"{path}: the chat template failed for the first 5 chat requests (TemplateError)"
    await until(lambda: "no token ids" in caplog.text)
    assert await refusing.tokens(chat("good")) is not None
    assert reason() == ""
    await until(lambda: "token ids again" in caplog.text)
    assert len([each for each in caplog.messages if "no token ids" in each]) == 1
    running.cancel()


async def test_template_that_has_worked_is_not_reported(refusing: Sources) -> None:
    assert await refusing.tokens(chat("good")) is not None
    for _ in range(template.FAILURES_MAX + 1):
        assert await refusing.tokens(chat("bad")) is None
    assert refusing.tokenizers.status(refusing.pool.id, ())["reason"] == ""


async def test_completions_do_not_hide_a_template_that_fails(refusing: Sources) -> None:
    for _ in range(template.FAILURES_MAX):
        assert await refusing.tokens(chat("bad")) is None
        assert await refusing.tokens(b'{"model": "m", "prompt": "hello"}', Api.COMPLETIONS) is not None
    assert "the chat template failed" in str(refusing.tokenizers.status(refusing.pool.id, ())["reason"])


async def class_of(served: Sources) -> TokenClass:
    found = await served.tokens(chat())
    assert found is not None
    return found.requests


async def test_new_version_of_files_is_compared_anew(files: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_POLL_S", 0.01)
    running = asyncio.create_task(files.tokenizers.run())
    before = await class_of(files)
    shown = [{"model": "m", "api": "chat", "tools": False}]
    assert files.tokenizers.status(files.pool.id, [before])["distrusted"] == shown
    assert await class_of(files) == before
    write_tokenizer(Path(files.pool.engine.tokenizer.path), template="{{ messages[0].content }}")
    await until(lambda: not files.tokenizers.status(files.pool.id, [before])["distrusted"])
    after = await class_of(files)
    assert after != before
    assert files.tokenizers.status(files.pool.id, [before, after])["distrusted"] == shown
    running.cancel()


async def test_another_source_is_compared_anew(files: Sources) -> None:
    before = await class_of(files)
    failing = FailingRenderer(200)
    server, served = await rendering(failing.answer)
    files.tokenizers.set_pools([served.pool])
    assert await class_of(files) != before
    assert files.tokenizers.status(files.pool.id, [before])["distrusted"] == []
    # Other changes of a pool keep the verdict.
    now = await class_of(files)
    files.tokenizers.set_pools([replace(served.pool, members=())])
    assert await class_of(files) == now
    await served.tokenizers.close()
    await server.close()


async def test_folder_that_does_not_answer_is_reported_and_delays_no_other(
    files: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(files.pool, name="other")
    source = Tokenizer(source=TokenSource.FILES, path=str(write_tokenizer(tmp_path / "other")))
    released, hanging, version_of = Event(), files.pool.engine.tokenizer.path, sources.version_of
    calls: list[str] = []

    def hang(folder: str, *names: str) -> object:
        calls.append(folder)
        if folder == hanging:
            released.wait(60)
        return version_of(folder, *names)

    monkeypatch.setattr(sources, "version_of", hang)
    monkeypatch.setattr(sources, "_POLL_S", 0.01)
    monkeypatch.setattr(sources, "READ_S", 0.05)
    files.tokenizers.set_pools([files.pool, replace(other, engine=Engine(tokenizer=source))])
    running = asyncio.create_task(files.tokenizers.run())
    await until(lambda: len(calls) > 5)
    monkeypatch.setattr(sources, "READ_S", 30.0)
    said = files.tokenizers.status(files.pool.id, ())
    assert (said["ready"], said["reason"]) == (True, f"{hanging} cannot be read within 0.05 s")
    assert files.tokenizers.status(other.id, ())["ready"]
    assert calls.count(hanging) == 1
    assert len([each for each in caplog.messages if "Rejected tokenizer" in each]) == 1
    assert await files.tokens(chat()) is not None
    released.set()
    await until(lambda: not files.tokenizers.status(files.pool.id, ())["reason"])
    running.cancel()


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


class FailingRenderer:
    """A renderer that answers with a status, and counts the requests."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.asked = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"token_ids": [1]}, status=self.status)


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
