"""Tests of the simulated engine over a real socket, with requests of clients, proxies and scrapers."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from io import BytesIO

import pytest
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from dualmap.engines.profile import read_metrics
from dualmap_sim.http_server import EngineHttpServer
from dualmap_sim.presets import PRESETS
from dualmap_sim.server_settings import ServerSettings

FAST = 1000.0
STANDING_STILL = 1e-6
CONFIG = replace(PRESETS["7b"], block_tokens=16)
TEXT = "the quick brown fox jumps over the lazy dog and then over the next one too, for it can " * 4
CHAT = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 6}

Start = Callable[..., Awaitable[ClientSession]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start an engine and return its client; the fixture stops both after the test."""
    async with AsyncExitStack() as stack:

        async def started(
            *, speed: float = FAST, preset: str = "7b", cache_tokens: int = 1_000_000, api_key: str | None = None
        ) -> ClientSession:
            config = replace(PRESETS[preset], block_tokens=16, cache_tokens=cache_tokens)
            server = EngineHttpServer(
                ServerSettings(host="127.0.0.1", port=0, model="m", config=config, speed=speed, api_key=api_key)
            )
            stack.push_async_callback(server.close)
            address = await server.start()
            return await stack.enter_async_context(ClientSession(f"http://{address}"))

        yield started


def events_of(stream: bytes) -> list[dict[str, object]]:
    texts = [line[len(b"data: ") :] for line in stream.split(b"\n\n") if line]
    assert texts[-1] == b"[DONE]"
    return [json.loads(text) for text in texts[:-1]]


async def metric(client: ClientSession, name: str) -> float:
    """Return the only sample of a metric."""
    async with client.get("/metrics") as response:
        page = await response.text()
    (value,) = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    ]
    return value


async def until_metric(client: ClientSession, name: str, value: float) -> None:
    async with asyncio.timeout(30):
        while True:
            if await metric(client, name) == value:
                return
            await asyncio.sleep(0.01)


async def test_chat_response_reports_usage(start: Start) -> None:
    client = await start()
    async with client.post("/v1/chat/completions", json=CHAT) as response:
        body = await response.json()

    assert response.status == 200
    assert body["object"] == "chat.completion"
    assert len(body["choices"][0]["message"]["content"]) == 6 * 4
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 6


@pytest.mark.parametrize("chat", [True, False])
async def test_http_stream_equals_the_unstreamed_response(start: Start, chat: bool) -> None:
    client = await start()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    ask = CHAT if chat else {"prompt": TEXT, "max_tokens": 6}
    async with client.post(path, json=ask) as response:
        whole = await response.json()
    streaming = {**ask, "stream": True, "stream_options": {"include_usage": True}}
    async with client.post(path, json=streaming) as response:
        assert response.content_type == "text/event-stream"
        *chunks, usage = events_of(await response.read())

    text = "".join(
        choice["delta"].get("content", "") if chat else choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]  # type: ignore[attr-defined]
    )
    assert text == (whole["choices"][0]["message"]["content"] if chat else whole["choices"][0]["text"])
    assert usage["usage"]["completion_tokens"] == 6  # type: ignore[index]


async def test_stream_without_include_usage_option_has_no_usage(start: Start) -> None:
    client = await start()
    async with client.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        events = events_of(await response.read())

    assert all("usage" not in event for event in events)


async def test_stream_sends_each_token_when_generated(start: Start) -> None:
    client = await start(speed=1.0)
    async with client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 20, "stream": True}) as response:
        _, *texts = events_of(await response.read())

    assert len(texts) > 2  # Even without decode steps, the first token and the end have one chunk each.


async def test_repeated_prompt_is_cached_only_with_equal_cache_salt(start: Start) -> None:
    client = await start()
    cached = []
    for change in ({}, {}, {"cache_salt": "s"}, {"cache_salt": "s"}, {"cache_salt": "t"}):
        async with client.post("/v1/chat/completions", json={**CHAT, **change}) as response:
            usage = (await response.json())["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])

    whole_blocks = (usage["prompt_tokens"] - 1) // 16 * 16
    assert cached == [0, whole_blocks, 0, whole_blocks, 0]
    assert await metric(client, "vllm:prefix_cache_hits_total") == 2 * whole_blocks
    assert await metric(client, "vllm:prefix_cache_queries_total") == 5 * usage["prompt_tokens"]


async def test_engine_without_cache_reports_no_cached_tokens(start: Start) -> None:
    client = await start(cache_tokens=0)
    for _ in range(2):
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            usage = (await response.json())["usage"]

    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_client_disconnect_after_headers_aborts_the_request(start: Start) -> None:
    client = await start(speed=STANDING_STILL)
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status == 200
    assert await metric(client, "vllm:num_requests_running") == 1

    response.close()

    await until_metric(client, "vllm:num_requests_running", 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnected_client_is_removed_from_the_queue(start: Start, stream: bool) -> None:
    client = await start(speed=STANDING_STILL)
    first = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})

    async def ask_and_wait() -> None:
        async with client.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
            await response.read()

    asking = asyncio.ensure_future(ask_and_wait())
    async with first:
        await until_metric(client, "vllm:num_requests_waiting", 1)

        asking.cancel()

        await until_metric(client, "vllm:num_requests_waiting", 0)
        assert await metric(client, "vllm:num_requests_running") == 1
        first.close()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_prefill_only_engine_stops_after_one_token(start: Start) -> None:
    client = await start(preset="pd")
    async with client.post("/v1/chat/completions", json=CHAT) as response:
        body = await response.json()

    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/chat/completions", b"{", 400, "BadRequestError"),
        ("/v1/chat/completions", b"", 400, "BadRequestError"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "BadRequestError"),
        ("/v1/chat/completions", b'{"model": "other", "messages": []}', 404, "NotFoundError"),
        ("/v1/completions", b'{"prompt": 1}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 190000}', 400, "BadRequestError"),
        ("/v1/embeddings", b'{"input": []}', 400, "BadRequestError"),
        ("/tokenize", b"{}", 400, "BadRequestError"),
        ("/v1/unheard-of", b"{}", 404, "NotFound"),
        ("/health", b"{}", 405, "MethodNotAllowed"),
    ],
)
async def test_rejections_have_openai_error_format(
    start: Start, path: str, body: bytes, status: int, kind: str
) -> None:
    client = await start()
    async with client.post(path, data=body) as response:
        error = (await response.json())["error"]

    assert (response.status, error["code"], error["type"]) == (status, status, kind)
    assert error["message"]


async def test_api_key_is_required_only_for_v1_paths(start: Start) -> None:
    client = await start(api_key="secret")
    got = {}
    for given in (None, "Bearer wrong", "secret", "Bearer secret"):
        headers = {} if given is None else {"Authorization": given}
        async with client.get("/v1/models", headers=headers) as response:
            got[given] = response.status
    async with client.get("/health") as health:
        pass

    assert got == {None: 401, "Bearer wrong": 401, "secret": 401, "Bearer secret": 200}
    assert health.status == 200


async def test_large_body_is_accepted_with_prompt_tokens_at_the_limit(start: Start) -> None:
    client = await start()
    body = b'{"prompt": "' + b"x" * 64_000_000 + b'", "max_tokens": 1}'
    async with client.post("/v1/completions", data=BytesIO(body)) as response:
        usage = (await response.json())["usage"]

    assert response.status == 200
    assert response.headers["x-request-sha256"] == hashlib.sha256(body).hexdigest()
    assert usage["prompt_tokens"] == CONFIG.input_tokens_max


@pytest.mark.parametrize("body", [{**CHAT, "stream": True}, CHAT, {"messages": []}])
async def test_response_headers_contain_engine_name_and_body_digest(start: Start, body: dict[str, object]) -> None:
    client = await start()
    sent = json.dumps(body).encode()
    async with client.post("/v1/chat/completions", data=sent) as response:
        await response.read()

    assert response.headers["x-request-sha256"] == hashlib.sha256(sent).hexdigest()
    assert response.headers["x-engine"] == f"{client._base_url.host}:{client._base_url.port}"  # type: ignore[union-attr]


async def test_response_id_equals_the_request_id_header_if_given(start: Start) -> None:
    client = await start()
    ids = []
    for headers in ({"X-Request-Id": "abc"}, {}):
        async with client.post("/v1/chat/completions", json=CHAT, headers=headers) as response:
            ids.append((await response.json())["id"])

    assert ids == ["chatcmpl-abc", "chatcmpl-2"]


@pytest.mark.parametrize(
    ("header", "status"), [(b"X-Request-Id: \xff", b"200"), (b"Authorization: Bearer \xff", b"401")]
)
async def test_request_with_non_text_header_bytes_is_answered(start: Start, header: bytes, status: bytes) -> None:
    client = await start(api_key=None if status == b"200" else "secret")
    assert client._base_url is not None
    reader, writer = await asyncio.open_connection(client._base_url.host, client._base_url.port)
    body = json.dumps(CHAT).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"%b\r\nContent-Length: %d\r\n\r\n%b" % (header, len(body), body)
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()

    assert answer.split()[1] == status


async def test_tokenize_count_equals_the_usage_count(start: Start) -> None:
    client = await start()
    async with client.post("/tokenize", json={"messages": CHAT["messages"]}) as response:
        tokens = await response.json()
    async with client.post("/v1/chat/completions", json=CHAT) as response:
        usage = (await response.json())["usage"]

    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"]
    assert tokens["max_model_len"] == CONFIG.input_tokens_max


async def test_models_and_embeddings_paths_return_responses(start: Start) -> None:
    client = await start()
    async with client.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
    vectors = []
    for texts in (["a", "b"], "a"):
        async with client.post("/v1/embeddings", json={"model": "m", "input": texts}) as response:
            vectors.append([item["embedding"] for item in (await response.json())["data"]])

    assert model["id"] == "m"
    assert model["max_model_len"] == CONFIG.input_tokens_max
    assert vectors[0][0] == vectors[1][0] != vectors[0][1]


async def test_engine_metrics_have_vllm_names_and_values(start: Start) -> None:
    client = await start()
    for limits in ({"max_tokens": 6}, {"max_tokens": None}):
        async with client.post("/v1/chat/completions", json={**CHAT, **limits}) as response:
            await response.read()
    async with client.get("/metrics") as response:
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}

    ended = {sample.labels["finished_reason"]: sample.value for sample in families["vllm:request_success"].samples}
    assert {reason: ended[reason] for reason in ("length", "stop", "abort")} == {"length": 1, "stop": 1, "abort": 0}
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds"):
        counts = [s.value for s in families[f"vllm:{name}"].samples if s.name.endswith("_count")]
        assert counts == [2]
    (info,) = families["vllm:cache_config_info"].samples
    assert int(info.labels["block_size"]) * int(info.labels["num_gpu_blocks"]) == 1_000_000
    assert families["vllm:generation_tokens"].samples[0].value == 6 + 32
    assert families["vllm:kv_cache_usage_perc"].samples[0].value == 0


async def test_engine_says_its_version_start_and_memory_as_vllm_does(start: Start) -> None:
    client = await start()
    async with client.get("/version") as response:
        assert (await response.json())["version"].endswith("+sim")
    async with client.get("/metrics") as response:
        profile = read_metrics("vLLM", await response.read())
    assert profile.started_s == pytest.approx(time.time(), abs=60)
    assert (profile.kv_tokens, profile.cache_tokens) == (CONFIG.kv_memory_tokens, 1_000_000 - 16)


async def test_engine_without_cache_says_so_and_its_kv_memory(start: Start) -> None:
    client = await start(cache_tokens=0)
    async with client.get("/metrics") as response:
        profile = read_metrics("vLLM", await response.read())
    assert (profile.kv_tokens, profile.cache_tokens) == (CONFIG.kv_memory_tokens - 16, 0)


async def test_draining_engine_rejects_work_and_fails_health(start: Start) -> None:
    settings = ServerSettings(host="127.0.0.1", port=0, model="m", config=CONFIG, speed=STANDING_STILL, api_key=None)
    server = EngineHttpServer(settings)
    address = await server.start()
    async with ClientSession(f"http://{address}") as client:
        under_way = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        async with client.get("/health") as response:
            assert response.status == 200
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0)  # lets the drain begin; the client's second connection is already open
        async with client.get("/health") as response:
            assert response.status == 503
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == 503
        assert not draining.done()

        under_way.close()

        await asyncio.wait_for(draining, 30)
    await server.close()


async def test_engine_without_kv_events_has_no_event_sources(start: Start) -> None:
    client = await start()
    async with client.get("/kv_event_sources") as response:
        assert response.status == 200
        assert await response.json() == {}


async def test_reset_prefix_cache_without_kv_events_empties_the_cache(start: Start) -> None:
    client = await start()
    cached = []
    for _ in range(2):
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            usage = (await response.json())["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        async with client.post("/reset_prefix_cache") as response:
            assert response.status == 200

    assert cached == [0, 0]


async def test_rendered_prompt_has_the_tokens_that_the_engine_computes(start: Start) -> None:
    client = await start()
    long = {"prompt": "x" * 4 * (CONFIG.input_tokens_max + 9), "max_tokens": 1, "cache_salt": "s"}
    async with client.post("/v1/completions/render", json=long) as response:
        (rendered,) = await response.json()
    async with client.post("/v1/completions", json=long) as response:
        usage = (await response.json())["usage"]

    assert len(rendered["token_ids"]) == usage["prompt_tokens"] == CONFIG.input_tokens_max
    assert rendered["cache_salt"] == "s"


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions/render", 400), ("/v1/responses/render", 404)])
async def test_render_rejects_what_the_engine_rejects(start: Start, path: str, status: int) -> None:
    client = await start()
    async with client.post(path, json={"messages": []}) as response:
        assert response.status == status


async def test_header_above_the_limit_is_refused_without_a_log_line(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    client = await start()
    async with client.get("/health", headers={"x-long": "a" * 50_000}) as response:
        assert response.status == 400
    assert not caplog.records
