"""Tests of requests and streams after the loss of engines, and when the router is killed, restarted or stopped."""

import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import http1, in_halves, opened, sha256
from harness.deployment import CHAT, Deployment
from harness.documents import chat, document, error_of, member_of, padded, prompt_of, receipt
from harness.shared_engines import SharedEngines
from harness.upstream import DIGEST_HEADER, ENGINE_HEADER, Answer, Received, sse
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVENTS = [b'data: {"number": %d}\n\n' % number for number in range(3)]
MEMBERS = {"left", "right"}


async def dead_member_in_use(deployment: Deployment) -> None:
    """Wait until the router uses the dead member, which earlier tests may have suspended for up to 30 s."""
    await deployment.wait_for_metric("dualmap_endpoint_suspended", 0, pool="llm/halved", endpoint="dead")


async def test_request_to_dead_first_candidate_retries_at_second(
    engines: SharedEngines, deployment: Deployment
) -> None:
    await dead_member_in_use(deployment)
    elsewhere = await deployment.metric("dualmap_served_elsewhere_total", pool="llm/halved")
    retried = 0
    for number in range(40):
        body = json.dumps(chat("halved", prompt_of(2, seed=f"{deployment.mode} halved {number}"))).encode()
        reply = await deployment.ask(body, chunk_bytes=1000 * (number % 2))
        assert reply.status == 200
        assert reply.headers[ENGINE_HEADER] == "left"
        assert reply.headers[DIGEST_HEADER] == sha256(body)
        retried += receipt(reply)["chosen"] == "dead"
    assert retried, "40 new prompts never chose the dead member first"
    await deployment.wait_for_metric("dualmap_served_elsewhere_total", elsewhere + retried, pool="llm/halved")


async def test_retried_request_load_moves_to_the_serving_member(engines: SharedEngines, deployment: Deployment) -> None:
    first, rest = asyncio.Event(), asyncio.Event()
    engines.left.answer = sse(EVENTS, first_after=first, then=rest)
    await dead_member_in_use(deployment)
    async with AsyncExitStack() as clients:
        chosen: list[str] = []
        while "dead" not in chosen and len(chosen) < 40:
            body = chat("halved", prompt_of(2, seed=f"{deployment.mode} books {len(chosen)}"), stream=True)
            response = await clients.enter_async_context(opened(deployment.envoy.url + CHAT, json.dumps(body).encode()))
            chosen.append("dead" if 'chosen="dead"' in response.headers["x-dualmap-decision"] else "left")

        async def moved() -> bool:
            in_flight = {name: each["in_flight"] for name, each in (await deployment.page("halved")).items()}
            return in_flight == {"left": len(chosen), "dead": 0}

        await until(moved, f"all of {chosen} count as left's load")
        assert "dead" in chosen
        page = await deployment.page("halved")
        assert page["dead"]["pending_prefill_tokens"] == 0 < page["left"]["pending_prefill_tokens"]
        first.set()
        rest.set()
    await deployment.wait_for_rest()


async def test_retried_large_body_arrives_complete(engines: SharedEngines, deployment: Deployment) -> None:
    await dead_member_in_use(deployment)
    retried = 0
    for number in range(20):
        text = f"{deployment.mode} large {number} " + "x" * 5_000_000
        body = json.dumps(chat("halved", text)).encode()
        reply = await deployment.ask(body)
        assert reply.status == 200
        assert reply.headers[DIGEST_HEADER] == sha256(body)
        retried += receipt(reply)["chosen"] == "dead"
        if retried == 2:
            break
    assert retried, "20 new prompts never chose the dead member first"


async def unavailable(request: web.Request, received: Received) -> web.StreamResponse:
    return web.json_response({}, status=503)


async def reset(request: web.Request, received: Received) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("failing", [unavailable, reset], ids=["503", "reset"])
async def test_unanswered_request_is_retried_at_other_engine_with_full_body(
    engines: SharedEngines, deployment: Deployment, failing: Answer
) -> None:
    tried = 0
    engines.left.answer = failing
    for number in range(40):
        # The bodies alternate between large and chunked, large, small and chunked, and small.
        text = f"{deployment.mode} {failing.__name__} {number} " + "x" * (5_000_000 if number % 4 < 2 else 5_000)
        body = json.dumps(chat("scripted", text)).encode()
        reply = await deployment.ask(body, chunk_bytes=100_000 if number % 2 else 0)
        assert (reply.status, reply.headers[ENGINE_HEADER]) == (200, "right")
        assert reply.headers[DIGEST_HEADER] == sha256(body)
        tried += receipt(reply)["chosen"] == "left"
        if tried == 4:
            break
    assert tried, "40 new prompts never chose the failing member first"
    engines.reset()

    async def back() -> bool:
        reply = await deployment.ask(chat("scripted", f"{deployment.mode} back {time.monotonic()}"))
        return reply.headers[ENGINE_HEADER] == "left"

    # The member is suspended for some time, but later tests need both members.
    await until(back, "the member that failed is used again", timeout_s=40.0)


async def streams_let_go(deployment: Deployment) -> int:
    """Return the number of ext_proc calls that the router has ended."""
    return (await deployment.envoy.stats(r"ext_proc\.server_half_closed$"))["http.requests.ext_proc.server_half_closed"]


async def test_killed_router_cuts_no_stream_and_fails_no_request(engines: SharedEngines, one_pool: Deployment) -> None:
    first, rest = asyncio.Event(), asyncio.Event()
    engines.left.answer = engines.right.answer = sse(EVENTS, first_after=first, then=rest)
    url = one_pool.envoy.url + CHAT
    let_go = await streams_let_go(one_pool)
    async with AsyncExitStack() as clients:
        streams = []
        for number in range(6):
            body = json.dumps(chat("scripted", f"{one_pool.mode} stream {number}", stream=True)).encode()
            streams.append(await clients.enter_async_context(opened(url, body)))
        first.set()
        for stream in streams:
            assert await stream.content.readexactly(len(EVENTS[0])) == EVENTS[0]

        async def past_the_router() -> bool:
            return await streams_let_go(one_pool) >= let_go + len(streams)

        # The client may get the first event a moment before the router ends its ext_proc call.
        await until(past_the_router, "the router has ended its calls for the streams")
        engines.reset()
        await one_pool.kill_router()
        await one_pool.wait_until_served_without_router()
        for number in range(12):
            body = padded("scripted", 1000 + number)
            reply = await one_pool.ask(body)
            assert reply.status == 200
            assert reply.headers[DIGEST_HEADER] == sha256(body)
            assert "x-dualmap-decision" not in reply.headers
        assert (await http1(one_pool.envoy.url + "/v1/models")).status == 200
        rest.set()
        for stream in streams:
            assert await stream.read() == b"".join(EVENTS[1:])

    await one_pool.restart_router()
    reply = await one_pool.ask(chat("scripted"))
    assert receipt(reply)["chosen"] == reply.headers[ENGINE_HEADER]


async def test_router_kill_before_first_token_keeps_the_stream_open(
    engines: SharedEngines, deployment: Deployment
) -> None:
    first = asyncio.Event()
    engines.left.answer = engines.right.answer = sse(EVENTS, first_after=first)
    body = json.dumps(chat("scripted", stream=True)).encode()
    async with opened(deployment.envoy.url + CHAT, body) as stream:
        assert stream.status == 200
        await deployment.kill_router()
        first.set()
        if deployment.mode is Mode.FULL_DUPLEX:
            # In this mode Envoy 1.40 never fails open during an ext_proc call, even after it has forwarded the request.
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
        else:
            assert await stream.read() == b"".join(EVENTS)
    await deployment.restart_router()


async def test_envoy_without_router_refuses_requests_to_several_pools(
    engines: SharedEngines, deployment: Deployment
) -> None:
    """Only a router can find the pool of a request, and the pools may belong to different tenants."""
    await deployment.kill_router()
    for model in ("scripted", "fast"):

        async def refused(model: str = model) -> bool:
            reply = await deployment.ask(chat(model))
            assert reply.status == 503
            return bool(reply.body) and error_of(reply)["code"] == "router_unreachable"

        await until(refused, "Envoy answers 503 itself")
    assert not engines.left.received
    assert not engines.right.received
    await deployment.restart_router()


async def test_envoy_without_router_ignores_client_destination_headers(
    engines: SharedEngines, one_pool: Deployment
) -> None:
    await one_pool.kill_router()
    await one_pool.wait_until_served_without_router()
    for target in (engines.outsider, engines.left):
        headers = {
            "x-gateway-destination-endpoint": target.endpoint,
            "x-dualmap-cluster": "llm/slow",
            "x-dualmap-no-retry": "1",
            "x-envoy-original-dst-host": target.endpoint,
        }
        replies = [await one_pool.ask(chat("scripted"), headers=headers) for _ in range(8)]
        assert [reply.status for reply in replies] == [200] * 8
        # Both members receive requests, because Envoy ignores the client's header with one member's address.
        assert {reply.headers[ENGINE_HEADER] for reply in replies} == MEMBERS
    assert not engines.outsider.received
    for upstream in (engines.left, engines.right):
        for received in upstream.received:
            assert not [name for name in received.headers if name.startswith(("x-gateway", "x-dualmap", "x-envoy"))]
    await one_pool.restart_router()


async def test_envoy_without_router_forwards_large_bodies_complete(
    engines: SharedEngines, one_pool: Deployment
) -> None:
    await one_pool.kill_router()
    await one_pool.wait_until_served_without_router()
    body = padded("scripted", 12_000_000)
    for chunk_bytes in (0, 100_000):
        reply = await one_pool.ask(body, chunk_bytes=chunk_bytes)
        assert reply.status == 200
        assert reply.headers[DIGEST_HEADER] == sha256(body)
    await one_pool.restart_router()


async def health(port: int, service: str) -> str:
    """Return the status from the router's health service, or UNKNOWN without an answer."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        except grpc.aio.AioRpcError:
            return "UNKNOWN"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
async def test_router_finishes_open_requests_and_exits_0_on_sigterm(
    engines: SharedEngines, mode: Mode, tmp_path: Path
) -> None:
    documents = {"scripted": document("scripted", [member_of(engines.left), member_of(engines.right)])}
    second, first, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with Deployment(documents, mode=mode, directory=tmp_path) as deployment:
        url = deployment.envoy.url + CHAT
        port = deployment.router.ports["health"]
        assert await health(port, "readiness") == "SERVING"
        half_read = asyncio.create_task(read_all(url, json.dumps(chat("scripted", "half " * 1000)).encode(), second))
        engines.left.answer = engines.right.answer = sse(EVENTS, first_after=first)
        prefilling = asyncio.create_task(read_all(url, json.dumps(chat("scripted", stream=True)).encode(), None))
        await deployment.wait_for_load("scripted", "one in flight", lambda flying, _: flying == 1)

        async def uploading() -> bool:
            return sum((await deployment.envoy.stats("ext_proc.streams_started$")).values()) == 2

        await until(uploading, "the router has both requests")
        engines.reset()
        load = asyncio.create_task(ask_until(deployment, stop))
        deployment.router.terminate()

        async def unready() -> bool:
            return await health(port, "readiness") == "NOT_SERVING"

        await until(unready, "readiness is NOT_SERVING")
        assert await health(port, "liveness") == "SERVING"
        second.set()
        status, decision, _ = await half_read
        assert status == 200
        assert decision, "the half-sent request is not routed"
        assert deployment.router.returncode is None, "the router did not wait for open requests"
        first.set()
        status, decision, content = await prefilling
        assert (status, content) == (200, b"".join(EVENTS))
        assert decision
        assert await deployment.router.wait() == 0
        await deployment.wait_until_served_without_router()
        stop.set()
        # In FULL_DUPLEX requests fail until Envoy has detected the closed port.
        assert set(await load) <= ({200, 503} if mode is Mode.FULL_DUPLEX else {200})


async def read_all(url: str, body: bytes, second: asyncio.Event | None) -> tuple[int, str | None, bytes]:
    """Send a POST, with ``second`` in two halves; return status, decision header and body."""
    async with opened(url, in_halves(body, second) if second else body) as response:
        return response.status, response.headers.get("x-dualmap-decision"), await response.read()


async def ask_until(deployment: Deployment, stop: asyncio.Event) -> list[int]:
    """Send requests one after the other until ``stop`` is set; return their statuses."""
    statuses: list[int] = []
    while not stop.is_set():
        statuses.append((await deployment.ask(chat("scripted", f"load {len(statuses)}"))).status)
    return statuses
