"""Tests of responses through Envoy: unchanged event streams, their effect on the router, and client disconnects."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from harness.clients import http1, in_halves, opened
from harness.deployment import CHAT, Deployment
from harness.documents import chat, prompt_of, receipt
from harness.event_streams import check_event_stream
from harness.shared_engines import SharedEngines
from harness.upstream import DIGEST_HEADER, ENGINE_HEADER, Received, sse
from harness.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b": a comment, to keep the connection alive\n\n",
    'data: {"choices":[{"delta":{"content":"Zürich 東京 😀"}}]}\r\n\r\n'.encode(),
    b'event: odd\nid: 7\ndata: {"choices":\ndata: []}\n\n',
    b"data: not JSON at all \x00\xff\n\n",
    b'data: {"text":"' + b"x" * 200_000 + b'"}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n',
    b"data: [DONE]\n\n",
]


async def test_event_stream_passes_unchanged(engines: SharedEngines, deployment: Deployment) -> None:
    engines.left.answer = engines.right.answer = sse(EVENTS)
    body = json.dumps(chat("scripted", stream=True)).encode()
    direct = await http1(f"http://{engines.left.endpoint}{CHAT}", body=body)
    assert direct.body == b"".join(EVENTS)
    for _ in range(3):
        through = await deployment.ask(body)
        assert through.status == 200
        assert through.body == direct.body
        assert through.headers["content-type"] == direct.headers["content-type"]
        assert through.headers[DIGEST_HEADER] == direct.headers[DIGEST_HEADER]


async def test_stream_event_is_forwarded_without_delay(engines: SharedEngines, deployment: Deployment) -> None:
    body = json.dumps(chat("scripted", stream=True)).encode()
    await check_event_stream([engines.left, engines.right], deployment.envoy.url + CHAT, body)


async def test_usage_of_simulated_engines_is_counted(engines: SharedEngines, deployment: Deployment) -> None:
    pool = "llm/fast"
    predicted = await deployment.metric("dualmap_predicted_cached_tokens_total", pool=pool)
    measured = await deployment.metric("dualmap_measured_cached_tokens_total", pool=pool)
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5}
    body = chat("fast", prompt_of(6, seed=f"{deployment.mode} usage"), **fields)
    for turn in range(2):
        reply = await deployment.ask(body)
        events = reply.body.split(b"\n\n")
        assert events[-2] == b"data: [DONE]"
        usage = json.loads(events[-3].removeprefix(b"data: "))["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["completion_tokens"] == 5
        assert (cached >= 6 * 128) == (turn == 1)
        predicted += int(receipt(reply)["matched"])
        measured += cached
        await deployment.wait_for_metric("dualmap_measured_cached_tokens_total", measured, pool=pool)
        assert await deployment.metric("dualmap_predicted_cached_tokens_total", pool=pool) == predicted


async def test_first_event_ends_prefill_and_access_log_ends_request(
    engines: SharedEngines, deployment: Deployment
) -> None:
    first, rest = asyncio.Event(), asyncio.Event()
    engines.left.answer = engines.right.answer = sse(EVENTS, first_after=first, then=rest)
    finished = await deployment.metric("dualmap_completions_total", pool="llm/scripted", outcome="finished")
    # The prefix is new, so the engine must compute the whole prompt.
    body = json.dumps(chat("scripted", f"{deployment.mode} new", stream=True)).encode()
    async with opened(deployment.envoy.url + CHAT, body) as response:
        await deployment.wait_for_load("scripted", "a prefill is pending", lambda flying, tokens: flying == 1 < tokens)
        first.set()
        await deployment.wait_for_load("scripted", "it is released", lambda *load: load == (1, 0))
        rest.set()
        assert await response.read() == b"".join(EVENTS)
    await deployment.wait_for_rest()
    await deployment.wait_for_metric("dualmap_completions_total", finished + 1, pool="llm/scripted", outcome="finished")


async def engine_sample(engines: SharedEngines, name: str, **labels: str) -> float:
    """Return the sum of the slow engine's samples of a metric."""
    page = (await http1(f"http://{engines.slow.endpoint}/metrics")).body.decode()
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


async def wait_for_engine(engines: SharedEngines, what: str, check: Callable[[], Awaitable[bool]]) -> None:
    await until(check, f"the slow engine {what}", timeout_s=60.0)


async def test_client_disconnect_in_any_phase_aborts_the_request(
    engines: SharedEngines, deployment: Deployment
) -> None:
    aborts = await engine_sample(engines, "vllm:request_success_total", finished_reason="abort")
    counted = await deployment.metric("dualmap_completions_total", pool="llm/slow", outcome="aborted")
    url = deployment.envoy.url + CHAT
    long = prompt_of(150, seed=f"{deployment.mode} leaves")
    async with AsyncExitStack() as clients:

        async def leave_behind(body: bytes, running: int, waiting: int) -> aiohttp.ClientResponse:
            response = await clients.enter_async_context(opened(url, body))

            async def taken() -> bool:
                return (
                    await engine_sample(engines, "vllm:num_requests_running") == running
                    and await engine_sample(engines, "vllm:num_requests_waiting") == waiting
                )

            await wait_for_engine(engines, f"has {running} running, {waiting} waiting", taken)
            return response

        streaming = json.dumps(chat("slow", "count", stream=True, max_tokens=1000)).encode()
        response = await leave_behind(streaming, 1, 0)
        assert await response.content.readany()
        body = json.dumps(chat("slow", long, stream=True)).encode()
        await leave_behind(body, 2, 0)
        await leave_behind(body, 2, 1)
        assert (await deployment.load("slow"))[0] == 3

    async def gone() -> bool:
        return (await engine_sample(engines, "vllm:request_success_total", finished_reason="abort")) == aborts + 3

    await wait_for_engine(engines, "has aborted all three", gone)
    await deployment.wait_for_rest()
    await deployment.wait_for_metric("dualmap_completions_total", counted + 3, pool="llm/slow", outcome="aborted")


async def test_client_disconnect_before_response_aborts_the_request(
    engines: SharedEngines, deployment: Deployment
) -> None:
    """Without streaming, the engine sends its headers with the complete response."""

    async def never(request: web.Request, received: Received) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    engines.left.answer = engines.right.answer = never
    asking = asyncio.create_task(deployment.ask(chat("scripted")))
    await deployment.wait_for_load("scripted", "one in flight", lambda flying, _: flying == 1)
    asking.cancel()
    await asyncio.wait((asking,))
    await deployment.wait_for_rest()

    async def aborted() -> bool:
        return engines.left.aborted + engines.right.aborted == 1

    await until(aborted, "the engine sees the disconnect")


async def test_client_disconnect_during_upload_routes_no_request(
    engines: SharedEngines, deployment: Deployment
) -> None:
    routed = await deployment.metric("dualmap_requests_total", pool="llm/scripted")
    opens = "http.requests.downstream_rq_active$"
    body = json.dumps(chat("scripted", "x" * 100_000)).encode()
    uploading = asyncio.create_task(post_in_halves(deployment.envoy.url + CHAT, body, asyncio.Event()))

    async def active(count: int) -> None:
        async def has() -> bool:
            return sum((await deployment.envoy.stats(opens)).values()) == count

        await until(has, f"Envoy has {count} active requests")

    await active(1)
    uploading.cancel()
    await asyncio.wait((uploading,))
    await active(0)
    await deployment.wait_for_rest()
    assert await deployment.metric("dualmap_requests_total", pool="llm/scripted") == routed
    reply = await deployment.ask(chat("scripted"))
    assert receipt(reply)["chosen"] == reply.headers[ENGINE_HEADER]


async def post_in_halves(url: str, body: bytes, second: asyncio.Event) -> bytes:
    async with opened(url, in_halves(body, second)) as response:
        return await response.read()
