"""Tests of the sources of token ids that read files: inline, in threads, with a deadline, and with changing files."""

import asyncio
import json
import logging
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from dualmap.pools.pool import Engine, Tokenizer, TokenSource
from dualmap.prompts.api import Api
from dualmap.prompts.parity import TokenClass
from dualmap.prompts.prompt import Rendered
from dualmap_extproc.request.observations import Tokenized
from dualmap_extproc.request.tokens import Pending, Tokens
from dualmap_extproc.tokens import sources, template
from dualmap_extproc.tokens.files import FilesTokenizer
from dualmap_extproc.tokens.rendering import PromptTexts, TokenizerError
from extproc.token_sources import FailingRenderer, Sources, chat, read, rendering
from extproc.tokenizer_files import write_tokenizer
from waiting import until


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[Sources]:
    folder = write_tokenizer(tmp_path / "tokenizer")
    served = Sources(Tokenizer(source=TokenSource.FILES, path=str(folder)))
    served.serve()
    yield served
    await served.tokenizers.close()


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
    # A busy machine may need several polls to read the other folder in time.
    await until(lambda: len(calls) > 5 and files.tokenizers.status(other.id, ())["ready"])
    monkeypatch.setattr(sources, "READ_S", 30.0)
    said = files.tokenizers.status(files.pool.id, ())
    assert (said["ready"], said["reason"]) == (True, f"{hanging} cannot be read within 0.05 s")
    assert calls.count(hanging) == 1
    rejected = [each.__dict__["details"] for each in caplog.records if each.getMessage() == "Rejected tokenizer"]
    assert [each["pool"] for each in rejected].count(files.pool.id) == 1
    assert await files.tokens(chat()) is not None
    released.set()
    await until(lambda: not files.tokenizers.status(files.pool.id, ())["reason"])
    running.cancel()
