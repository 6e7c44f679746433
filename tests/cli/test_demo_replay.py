"""Tests of the load generator with a small scripted server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dualmap_cli.demo.replay import Outcome, chat_body, read_usage, replay
from dualmap_cli.demo.sampling import GAUGES, read_pending
from dualmap_sim.workloads.text import prompt_text
from dualmap_sim.workloads.trace import Trace, TraceRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
USAGE = {"prompt_tokens": 12, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def trace(*arrivals_s: float) -> Trace:
    requests = [
        TraceRequest(arrival_s=arrival_s, blocks=(number,), input_tokens=12, output_tokens=3)
        for number, arrival_s in enumerate(arrivals_s)
    ]
    return Trace(name="t", block_tokens=128, requests=tuple(requests))


async def replayed(handler: Handler, workload: Trace, *, deadline_s: float = 20.0) -> tuple[Outcome, ...]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    ended: list[None] = []
    async with TestServer(app) as server:
        outcomes = await replay(
            str(server.make_url("")).rstrip("/"),
            "m",
            workload,
            deadline_s=deadline_s,
            finished=lambda: ended.append(None),
        )
    assert len(ended) == len(outcomes) == len(workload.requests)
    return outcomes


async def stream(request: web.Request, chunks: AsyncIterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    async for chunk in chunks:
        await response.write(chunk)
    await response.write_eof()
    return response


async def whole_answer() -> AsyncIterator[bytes]:
    yield event(choices=[{"delta": {"content": "a"}}], usage=None)
    yield event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"


async def test_replay_sends_trace_requests_and_reads_usage():
    bodies = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await stream(request, whole_answer())

    workload = trace(0.0, 0.01)
    outcomes = await replayed(handler, workload)

    assert sorted(body["messages"][0]["content"] for body in bodies) == sorted(
        prompt_text(request, block_tokens=128) for request in workload.requests
    )
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in bodies)
    assert {(body["model"], body["max_tokens"]) for body in bodies} == {("m", 3)}
    assert [(o.prompt_tokens, o.cached_tokens, o.error) for o in outcomes] == [(12, 8, None)] * 2
    for outcome in outcomes:
        assert outcome.first_byte_s is not None
        assert outcome.due_s <= outcome.sent_s < outcome.first_byte_s <= outcome.finished_s


async def test_replay_measures_first_token_at_first_body_byte():
    async def handler(request: web.Request) -> web.StreamResponse:
        async def chunks() -> AsyncIterator[bytes]:
            await asyncio.sleep(0.2)  # between the headers and the first chunk
            async for chunk in whole_answer():
                yield chunk

        return await stream(request, chunks())

    (outcome,) = await replayed(handler, trace(0.0))

    assert outcome.first_byte_s is not None
    assert outcome.first_byte_s - outcome.sent_s >= 0.2


async def test_replay_sends_requests_without_waiting_for_responses():
    """The client sends the second request before the first request's answer."""
    second = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        text = (await request.json())["messages"][0]["content"]
        if text == prompt_text(trace(0.0).requests[0], block_tokens=128):
            await second.wait()
        else:
            second.set()
        return await stream(request, whole_answer())

    assert [o.error for o in await replayed(handler, trace(0.0, 0.02))] == [None, None]


async def test_replay_records_rejection_with_its_status():
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {}}, status=503)

    (outcome,) = await replayed(handler, trace(0.0))

    assert outcome.error == "status 503"


async def test_replay_records_truncated_stream_as_error():
    async def handler(request: web.Request) -> web.StreamResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield event(choices=[], usage=USAGE)

        return await stream(request, chunks())

    (outcome,) = await replayed(handler, trace(0.0))

    assert outcome.error == "stream cut short"


async def test_replay_records_broken_connection_as_error():
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    (outcome,) = await replayed(handler, trace(0.0))

    assert outcome.error is not None
    assert outcome.first_byte_s is None


async def test_replay_aborts_request_at_its_deadline():
    over = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await over.wait()
        return web.Response()

    running = asyncio.create_task(replayed(handler, trace(0.0), deadline_s=0.2))
    asyncio.get_running_loop().call_later(0.6, over.set)
    (outcome,) = await running

    assert outcome.error == "deadline passed"


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b"", (0, 0)),
        (b"data: [DONE]\n\n", (0, 0)),
        (event(choices=[], usage=USAGE) + b"data: [DONE]\n\n", (12, 8)),
        (event(choices=[], usage={"prompt_tokens": 5}) + b"data: [DONE]\n\n", (5, 0)),
        (event(choices=[], usage={"prompt_tokens": 5, "prompt_tokens_details": None}), (5, 0)),
        (b'cut": {"usage": 1}}\n\n' + event(choices=[1], usage=None) + b"data: [DONE]\n\n", (0, 0)),
    ],
)
def test_replay_reads_usage_from_the_end_of_stream(tail, usage):
    assert read_usage(tail) == usage


def test_replay_request_body_is_ascii():
    body = chat_body(trace(0.0).requests[0], model="m", block_tokens=128)

    assert body.isascii()
    assert len(json.loads(body)["messages"][0]["content"]) == 12 * 4


def test_gauge_samples_are_summed_with_0_for_missing_endpoints():
    pending, held = GAUGES
    one = (
        f"# HELP {pending} help\n# TYPE {pending} gauge\n"
        f'{pending}{{endpoint="engine-0",pool="demo/qwen"}} 1200.0\n'
        f'{pending}{{endpoint="engine-1",pool="demo/qwen"}} 3.5e+03\n'
        f'{held}{{endpoint="engine-1",pool="demo/qwen"}} 500.0\n'
        f'dualmap_endpoint_in_flight_requests{{endpoint="engine-0",pool="demo/qwen"}} 7.0\n'
    )
    other = f'{pending}{{endpoint="engine-0",pool="demo/qwen"}} 300.0\n'

    assert read_pending([one, other], endpoints=3).pending_tokens == (1500.0, 4000.0, 0.0)
