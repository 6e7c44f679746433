"""Tests of token usage from responses (``envoy/usage.lua``): the script reads some responses, and changes and delays no
response.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from dualmap_extproc import names
from harness.clients import Reply, http1, http2, opened, sha256
from harness.deployment import CHAT, Deployment
from harness.documents import chat
from harness.envoy import Envoy
from harness.picker import Picker, always
from harness.settings import pool_of, settings_for
from harness.shared_engines import SharedEngines
from harness.upstream import Answer, Received, Upstream, sse

JSON = "application/json"
EVENTS = "text/event-stream"
USAGE = b'{"prompt_tokens":10,"total_tokens":13,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}'
LAST_EVENTS = b'data: {"choices":[],"usage":' + USAGE + b"}\n\ndata: [DONE]\n\n"
# The usage of the Messages API: the prompt has all three kinds of tokens.
MESSAGES = b'{"input_tokens":1,"output_tokens":3,"cache_creation_input_tokens":1,"cache_read_input_tokens":8}'
# The usage of the Responses API if the engine calls its own tools: the sum of two prompts, and each prompt.
TURNS = (
    b'{"input_tokens":30,"input_tokens_details":{"cached_tokens":27,"cache_write_tokens":0,'
    b'"input_tokens_per_turn":[10,20],"cached_tokens_per_turn":[8,19]},"output_tokens":3,"output_tokens_details":'
    b'{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[1,2]},"total_tokens":33}'
)
FOUND = {names.TAG_PROMPT_TOKENS: "10", names.TAG_COMPLETION_TOKENS: "3", names.TAG_CACHED_TOKENS: "8"}
UNKNOWN_CACHE = {names.TAG_PROMPT_TOKENS: "10", names.TAG_COMPLETION_TOKENS: "3"}
TOTAL = {names.TAG_PROMPT_TOKENS: "30", names.TAG_COMPLETION_TOKENS: "3", names.TAG_CACHED_TOKENS: "27"}
# Tests insert an error at this line of the script.
LOOP = "for chunk in handle:bodyChunks() do"
POOL = names.cluster_name("llm", "qwen")
SCALARS = [b"data: null\n\n", b'data: "text"\n\n', b"data: 5\n\n", b"data: true\n\n", b"data:\n\n", b"data: {\n\n"]


def quoted(text: bytes) -> bytes:
    """Return a response body whose content is ``text`` as a JSON string."""
    return b'{"choices":[{"text":' + json.dumps(text.decode()).encode() + b"}]}"


def message_events(start: bytes, end: bytes) -> bytes:
    """Return a stream of the Messages API with these usages in its events message_start and message_delta."""
    return (
        b'event: message_start\ndata: {"type":"message_start","message":{"content":[],"usage":' + start + b"}}\n\n"
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a \\"usage\\":{"}}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":' + end + b"}"
        b'\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


# Content type, body and expected tags by the case's name.
READ: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "whole, written by json.dumps": (JSON, json.dumps({"choices": [], "usage": json.loads(USAGE)}).encode(), FOUND),
    "whole, indented": (JSON, json.dumps({"usage": json.loads(USAGE), "z": [1]}, indent=4).encode(), FOUND),
    "charset in the content type": ("Application/JSON; charset=utf-8", b'{"usage":' + USAGE + b"}", FOUND),
    "stream": (EVENTS, b'data: {"choices":[1],"usage":null}\n\n' + LAST_EVENTS, FOUND),
    "stream, null after it": (EVENTS, LAST_EVENTS + b'data: {"usage":null}\n\n', FOUND),
    "stream, with lines that end in CRLF": (EVENTS + "; charset=utf-8", LAST_EVENTS.replace(b"\n", b"\r\n"), FOUND),
    "stream, the last one counts": (
        EVENTS,
        b"".join(b'data: {"usage":{"completion_tokens":%d}}\n\n' % number for number in range(300)) + LAST_EVENTS,
        FOUND,
    ),
    "stream of responses": (
        EVENTS,
        b'event: response.created\ndata: {"response":{"tools":[{"usage":{"type":"object"}}],"usage":null}}\n\n'
        b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":10,'
        b'"input_tokens_details":{"cached_tokens":8},"output_tokens":3,"output_tokens_details":{"cached_tokens":1}}}}'
        b"\n\n",
        FOUND,
    ),
    "responses, the first turn of several": (JSON, b'{"output":[],"usage":' + TURNS + b"}", FOUND),
    "responses, without turns": (JSON, b'{"usage":' + TURNS.replace(b"10,20", b"").replace(b"8,19", b"") + b"}", TOTAL),
    "messages": (JSON, b'{"content":[],"usage":' + MESSAGES + b"}", FOUND),
    "messages, written by json.dumps": (JSON, json.dumps({"usage": json.loads(MESSAGES)}).encode(), FOUND),
    "messages, all tokens cached": (
        JSON,
        b'{"usage":{"input_tokens":0,"cache_read_input_tokens":10,"output_tokens":3}}',
        {**FOUND, names.TAG_CACHED_TOKENS: "10"},
    ),
    "messages, cache not reported": (JSON, b'{"usage":{"input_tokens":10,"output_tokens":3}}', UNKNOWN_CACHE),
    "messages, cache unknown": (
        JSON,
        b'{"usage":{"input_tokens":10,"cache_creation_input_tokens":null,"cache_read_input_tokens":null,'
        b'"output_tokens":3}}',
        UNKNOWN_CACHE,
    ),
    "stream of messages": (EVENTS, message_events(b'{"input_tokens":10,"output_tokens":0}', MESSAGES), FOUND),
    "stream of messages, cache not reported": (
        EVENTS,
        message_events(b'{"input_tokens":10,"output_tokens":0}', b'{"input_tokens":10,"output_tokens":3}'),
        UNKNOWN_CACHE,
    ),
    "stream of messages, prompt at its start only": (
        EVENTS,
        message_events(b'{"input_tokens":2,"output_tokens":0,"cache_read_input_tokens":8}', b'{"output_tokens":3}'),
        FOUND,
    ),
    **{
        f"messages, {value.decode()[:8]} cached tokens": (
            JSON,
            b'{"usage":{"input_tokens":2,"output_tokens":3,"cache_read_input_tokens":' + value + b"}}",
            {names.TAG_COMPLETION_TOKENS: "3"},
        )
        for value in (b"-8", b"true", b'"8"', b"8.5", b"[8]", b"{}")
    },
    "total beside the cached tokens of messages": (
        JSON,
        b'{"usage":{"prompt_tokens":10,"completion_tokens":3,"cache_read_input_tokens":8}}',
        FOUND,
    ),
    "embeddings": (JSON, b'{"data":[],"usage":{"prompt_tokens":7}}', {names.TAG_PROMPT_TOKENS: "7"}),
    "more digits than a float shows": (
        JSON,
        b'{"usage":{"prompt_tokens":1234567}}',
        {names.TAG_PROMPT_TOKENS: "1234567"},
    ),
    "in the text only": (JSON, quoted(b'see "usage":' + USAGE), {}),
    "in the text, at its start and end": (JSON, quoted(b'"usage":' + USAGE), {}),
    "in the text, escaped twice": (JSON, quoted(quoted(b',"usage":' + USAGE)), {}),
    "in the text too": (
        JSON,
        b'{"usage":' + USAGE + b',"text":' + quoted(b',"usage":{"prompt_tokens":1}') + b"}",
        FOUND,
    ),
    "as a value": (JSON, b'{"a":"usage","b":["usage",' + USAGE + b"]}", {}),
    "no key but its end": (JSON, b'{"my\\"usage":' + USAGE + b"}", {}),
    "without counts": (JSON, b'{"usage":{"seconds":1,"prompt_tokens":1.5,"completion_tokens":"3"}}', {}),
    "details that are no object": (EVENTS, b'data: {"usage":{"prompt_tokens_details":null}}\n\n', {}),
    "absent": (EVENTS, b'data: {"choices":[]}\n\ndata: [DONE]\n\n', {}),
    "never closed": (JSON, b'{"usage":{"prompt_tokens":10', {}),
    "empty": (JSON, b"", {}),
    "other content": ("text/plain", b'{"usage":' + USAGE + b"}", {}),
    "scalar events": (EVENTS, b"".join(SCALARS) + LAST_EVENTS, FOUND),
    "bytes of every kind": (EVENTS, bytes(range(256)) * 300 + LAST_EVENTS, FOUND),
    "nothing but keys": (JSON, b'{"usage":{' * 400_000, {}),
    "nothing but blanks": (JSON, b'{"usage"' + b" " * 4_000_000, {}),
}


def whole(body: bytes, content_type: str = JSON, **headers: str) -> Answer:
    """Return an answer with a complete body."""

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return web.Response(body=body, headers={"content-type": content_type, **headers})

    return answer


class InPieces:
    """Answers in pieces.

    The next piece follows when ``passed`` is set, so that Envoy receives each piece as a separate chunk.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.passed = asyncio.Event()

    async def __call__(self, request: web.Request, received: Received) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": EVENTS})
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await self.passed.wait()
            self.passed.clear()
        return response

    async def read(self, envoy: Envoy) -> None:
        """Send a request through Envoy; each piece must arrive before the engine sends the next."""
        async with opened(envoy.url, b"{}") as response:
            for piece in self.pieces:
                assert await response.content.readexactly(len(piece)) == piece
                self.passed.set()
            assert await response.read() == b""


@pytest_asyncio.fixture(name="engine")
async def _engine() -> AsyncIterator[Upstream]:
    async with Upstream(name="engine") as engine:
        yield engine


@pytest_asyncio.fixture(name="picker")
async def _picker(engine: Upstream) -> AsyncIterator[Picker]:
    async with Picker(choose=always(engine.endpoint, POOL)) as picker:
        yield picker


@pytest_asyncio.fixture(name="envoy")
async def _envoy(engine: Upstream, picker: Picker, tmp_path: Path) -> AsyncIterator[Envoy]:
    """Yield an Envoy; its script must not fail."""
    async with Envoy(settings_for([pool_of([engine])], [picker]), directory=tmp_path) as envoy:
        yield envoy
        assert envoy.child.returncode is None, envoy.child.output()[-4000:]
        assert sum((await envoy.stats(r"lua\.errors$")).values()) == 0, envoy.child.output()[-4000:]


async def logged(picker: Picker, number: int) -> list[dict[str, str]]:
    """Return the usage tags of the first ``number`` responses in order."""
    await picker.wait_for_entries(number)
    tags = [dict(entry.common_properties.custom_tags) for entry in picker.entries]
    return [{tag: found[tag] for tag in FOUND if found.get(tag, "-") != "-"} for found in tags]


async def ask_by_http2(deployment: Deployment) -> Reply:
    """Send a request over HTTP/2.

    Envoy would log an HTTP/1 client that closes at the last byte as a disconnect.
    """
    return await http2(deployment.envoy.port, path=CHAT, body=json.dumps(chat("scripted")).encode())


async def test_usage_is_read_from_supported_responses_only(engine: Upstream, picker: Picker, envoy: Envoy) -> None:
    for name, (content_type, body, _) in READ.items():
        engine.answer = whole(body, content_type)
        assert (await http1(envoy.url, body=b"{}")).body == body, name
    found = await logged(picker, len(READ))
    assert dict(zip(READ, found, strict=True)) == {name: expected for name, (*_, expected) in READ.items()}


async def test_usage_of_compressed_response_is_not_read(engine: Upstream, picker: Picker, envoy: Envoy) -> None:
    body = b'{"usage":' + USAGE + b"}"
    for encoding in ("gzip", "identity"):
        engine.answer = whole(body, **{"content-encoding": encoding})
        assert (await http1(envoy.url, body=b"{}")).body == body
    assert await logged(picker, 2) == [{}, FOUND]


async def test_usage_split_over_chunks_is_read_without_delay(engine: Upstream, picker: Picker, envoy: Envoy) -> None:
    start = b'data: {"choices":[]}\n\n'
    splits = [[start + LAST_EVENTS[:at], LAST_EVENTS[at:]] for at in range(len(LAST_EVENTS))]
    splits.append([bytes([byte]) for byte in start + LAST_EVENTS])
    for pieces in splits:
        engine.answer = answer = InPieces(pieces)
        await answer.read(envoy)
    assert await logged(picker, len(splits)) == [FOUND] * len(splits)


async def test_usage_is_counted_if_client_disconnects_at_the_end(
    engine: Upstream, picker: Picker, envoy: Envoy
) -> None:
    engine.answer = InPieces([LAST_EVENTS])
    async with opened(envoy.url, b"{}") as response:
        assert await response.content.readexactly(len(LAST_EVENTS)) == LAST_EVENTS
    assert await logged(picker, 1) == [FOUND]


class TestUsageThroughRouter:
    """Test the router's use of the usage tags in each message mode."""

    pytestmark = pytest.mark.asyncio(loop_scope="session")

    async def test_json_scalars_in_stream_events_do_not_crash_envoy(
        self, engines: SharedEngines, deployment: Deployment
    ) -> None:
        for event in SCALARS:
            engines.left.answer = engines.right.answer = sse([event])
            assert (await deployment.ask(chat("scripted", stream=True))).body == event
        assert deployment.envoy.child.returncode is None

    async def test_cached_tokens_of_streamed_and_plain_responses_are_counted(
        self, engines: SharedEngines, deployment: Deployment
    ) -> None:
        pool = "llm/scripted"
        counted = await deployment.metric("dualmap_measured_cached_tokens_total", pool=pool)
        answers = [sse([b'data: {"choices":[]}\n\n', LAST_EVENTS]), whole(b'{"usage":' + USAGE + b"}")]
        for number, answer in enumerate(answers, start=1):
            engines.left.answer = engines.right.answer = answer
            assert (await ask_by_http2(deployment)).status == 200
            await deployment.wait_for_metric("dualmap_measured_cached_tokens_total", counted + 8 * number, pool=pool)

    async def test_cached_tokens_of_each_api_are_counted(self, engines: SharedEngines, deployment: Deployment) -> None:
        pool = "llm/scripted"
        counted = await deployment.metric("dualmap_measured_cached_tokens_total", pool=pool)
        start = b'{"input_tokens":10,"output_tokens":0}'
        completed = b'data: {"type":"response.completed","response":{"usage":' + TURNS + b"}}\n\n"
        message, item = chat("scripted"), {"model": "scripted-model", "input": "hello"}
        answers = [
            ("/v1/messages", message, whole(b'{"content":[],"usage":' + MESSAGES + b"}")),
            ("/v1/messages", message, sse([message_events(start, MESSAGES)])),
            ("/v1/responses", item, whole(b'{"output":[],"usage":' + TURNS + b"}")),
            ("/v1/responses", item, sse([b'data: {"response":{"usage":null}}\n\n', completed])),
        ]
        for number, (path, body, answer) in enumerate(answers, start=1):
            engines.left.answer = engines.right.answer = answer
            assert (await http2(deployment.envoy.port, path=path, body=json.dumps(body).encode())).status == 200
            await deployment.wait_for_metric("dualmap_measured_cached_tokens_total", counted + 8 * number, pool=pool)

    async def test_response_without_usage_counts_as_finished(
        self, engines: SharedEngines, deployment: Deployment
    ) -> None:
        labels = {"pool": "llm/scripted"}
        counted = await deployment.metric("dualmap_measured_cached_tokens_total", **labels)
        finished = await deployment.metric("dualmap_completions_total", outcome="finished", **labels)
        engines.left.answer = engines.right.answer = sse([b"data: [DONE]\n\n"])
        assert (await deployment.ask(chat("scripted"))).status == 200
        await deployment.wait_for_metric("dualmap_completions_total", finished + 1, outcome="finished", **labels)
        assert await deployment.metric("dualmap_measured_cached_tokens_total", **labels) == counted

    @pytest.mark.parametrize("streamed", [False, True], ids=["content-length", "chunked"])
    async def test_huge_response_passes_complete(
        self, engines: SharedEngines, deployment: Deployment, streamed: bool
    ) -> None:
        counted = await deployment.metric("dualmap_measured_cached_tokens_total", pool="llm/scripted")
        body = b'{"data":"%b","usage":%b}' % (b"0123456789abcdef" * (20 << 16), USAGE)

        async def chunked(request: web.Request, received: Received) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": JSON})
            await response.prepare(request)
            await response.write(body)
            return response

        engines.left.answer = engines.right.answer = chunked if streamed else whole(body)
        reply = await ask_by_http2(deployment)
        assert reply.status == 200
        assert sha256(reply.body) == sha256(body)
        await deployment.wait_for_metric("dualmap_measured_cached_tokens_total", counted + 8, pool="llm/scripted")

    @pytest.mark.parametrize(
        "fails",
        [LOOP + " error('broken')", "error('broken') " + LOOP],
        ids=["at the body", "at the headers"],
    )
    async def test_failed_usage_script_loses_only_the_usage_data(
        self, engines: SharedEngines, deployment: Deployment, fails: str
    ) -> None:
        def edit(config: str) -> str:
            assert LOOP in config
            return config.replace(LOOP, fails)

        async with deployment.another_envoy("broken", edit=edit) as envoy:
            for body in (LAST_EVENTS, LAST_EVENTS * 1000):
                engines.left.answer = engines.right.answer = whole(body, EVENTS)
                reply = await deployment.ask(chat("scripted"), envoy=envoy)
                assert (reply.status, reply.body) == (200, body)
            assert sum((await envoy.stats(r"lua\.errors$")).values()) == 2
            assert "broken" in envoy.child.output()
            # Envoy sends its access log in batches, and drops the last batch when it stops.
            await deployment.wait_for_rest()
