"""Tests that the router counts aborts by the engine and by the client, as Envoy reports them."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import opened
from harness.deployment import CHAT, Deployment
from harness.documents import chat, prompt_of
from harness.shared_engines import SharedEngines
from harness.upstream import Answer, Received, sse
from harness.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

EVENTS = [b'data: {"number": %d}\n\n' % number for number in range(2)]


async def breaking_off(request: web.Request, received: Received) -> web.StreamResponse:
    """Break the connection before the response."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def breaking_off_later(gate: asyncio.Event) -> Answer:
    """Break the connection during the response, when ``gate`` is set."""

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[0])
        await gate.wait()
        return await breaking_off(request, received)

    return answer


async def unavailable(request: web.Request, received: Received) -> web.StreamResponse:
    return web.json_response({"error": {"message": "loading"}}, status=503)


async def outcomes(deployment: Deployment) -> dict[str, float]:
    """Return the number of the pool's ended requests by outcome."""
    ends = ("finished", "rejected", "aborted", "failed", "expired")
    return {end: await deployment.metric("dualmap_completions_total", pool="llm/scripted", outcome=end) for end in ends}


async def change(deployment: Deployment, before: dict[str, float], count: int) -> dict[str, float]:
    """Wait until ``count`` more requests have ended; return their number by outcome."""

    async def ended() -> bool:
        return sum((await outcomes(deployment)).values()) >= sum(before.values()) + count

    await until(ended, f"{count} requests have ended", timeout_s=60.0)
    return {end: value - before[end] for end, value in (await outcomes(deployment)).items() if value != before[end]}


@pytest.mark.parametrize("answer", [unavailable, breaking_off], ids=["503", "broken"])
async def test_engine_error_response_counts_as_failed_request(
    engines: SharedEngines, deployment: Deployment, answer: Answer
) -> None:
    before = await outcomes(deployment)
    engines.left.answer = engines.right.answer = answer
    # Only two requests fail, because a third consecutive failure would suspend the member, also for later tests.
    for number in range(2):
        reply = await deployment.ask(chat("scripted", f"{deployment.mode} fails {number}", stream=True))
        assert reply.status == 503
    assert await change(deployment, before, 2) == {"failed": 2}
    await heal(engines, deployment)


async def heal(engines: SharedEngines, deployment: Deployment) -> None:
    """Let both members succeed, which resets their counts of consecutive failures."""
    engines.reset()
    number = 0
    while not (engines.left.received and engines.right.received):
        assert (
            await deployment.ask(chat("scripted", prompt_of(2, seed=f"{deployment.mode} heals {number}")))
        ).status == 200
        number += 1
        assert number < 100


async def test_engine_disconnect_mid_response_counts_as_failed_request(
    engines: SharedEngines, deployment: Deployment
) -> None:
    before, gate = await outcomes(deployment), asyncio.Event()
    engines.left.answer = engines.right.answer = breaking_off_later(gate)
    body = json.dumps(chat("scripted", f"{deployment.mode} breaks", stream=True)).encode()
    async with opened(deployment.envoy.url + CHAT, body) as response:
        assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
        gate.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    counted = await change(deployment, before, 1)
    # In FULL_DUPLEX the router's stream ends as after a client disconnect, and the access log may arrive too late.
    assert counted == {"failed": 1} or (counted == {"aborted": 1} and deployment.mode is Mode.FULL_DUPLEX)
    await heal(engines, deployment)


@pytest.mark.parametrize("begun", [False, True], ids=["before the response", "in the response"])
async def test_client_disconnect_counts_as_aborted_request(
    engines: SharedEngines, deployment: Deployment, begun: bool
) -> None:
    before = await outcomes(deployment)
    first, rest = asyncio.Event(), asyncio.Event()
    engines.left.answer = engines.right.answer = sse(EVENTS, first_after=first, then=rest)
    body = json.dumps(chat("scripted", f"{deployment.mode} leaves {begun}", stream=True)).encode()
    if begun:
        first.set()
    async with opened(deployment.envoy.url + CHAT, body) as response:
        if begun:
            assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
    assert await change(deployment, before, 1) == {"aborted": 1}
    first.set()
    rest.set()


async def test_engine_with_repeated_failures_is_suspended(engines: SharedEngines, deployment: Deployment) -> None:
    engines.left.answer = unavailable
    for number in range(40):
        await deployment.ask(chat("scripted", prompt_of(2, seed=f"{deployment.mode} sick {number}")))
        if await deployment.metric("dualmap_endpoint_suspended", pool="llm/scripted", endpoint="left"):
            break
    else:
        pytest.fail("40 requests, and the member that fails every one is not suspended")
    engines.reset()
    await deployment.wait_for_metric("dualmap_endpoint_suspended", 0, pool="llm/scripted")
    await heal(engines, deployment)


async def test_router_counts_requests_with_session_header(engines: SharedEngines, deployment: Deployment) -> None:
    before = await deployment.metric("dualmap_pool_sessions", pool="llm/scripted")
    for number in range(6):
        headers = {"x-session-id": f"{deployment.mode} session {number % 2}"}
        reply = await deployment.ask(chat("scripted", f"{deployment.mode} turn {number}"), headers=headers)
        assert reply.status == 200
    assert await deployment.metric("dualmap_pool_sessions", pool="llm/scripted") == before + 2
