"""Tests of queued requests in the router behind the real Envoy: order, rejection and client disconnect."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply, http2, opened
from harness.deployment import CHAT, Deployment
from harness.documents import chat, document, error_of, member_of, prompt_of, queue, receipt
from harness.shared_engines import BUSY, SharedEngines
from harness.upstream import DIGEST_HEADER, ENGINE_HEADER, sse

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

EVENTS = [b'data: {"number": %d}\n\n' % number for number in range(2)]


@asynccontextmanager
async def busy(engines: SharedEngines, deployment: Deployment, pool: str, *, seed: str) -> AsyncIterator[asyncio.Event]:
    """Keep the pool's engine busy with a long prompt until the event is set; read the response to its end."""
    gate = asyncio.Event()
    engines.left.answer = sse(EVENTS, first_after=gate)
    body = json.dumps(chat(pool, prompt_of(100, seed=seed), stream=True)).encode()
    client = asyncio.create_task(served(deployment, body))
    await deployment.wait_for_load(pool, "one in flight", lambda flying, _: flying == 1)
    try:
        yield gate
    finally:
        gate.set()
        assert await client == 200


async def served(deployment: Deployment, body: bytes) -> int:
    """Send a request and read its response to the end; return the status."""
    async with opened(deployment.envoy.url + CHAT, body) as response:
        await response.read()
        return response.status


def short(pool: str, *, seed: str) -> bytes:
    """Return a body with a prompt that shares no prefix with other seeds' prompts."""
    return json.dumps(chat(pool, prompt_of(2, seed=seed))).encode()


async def held(deployment: Deployment, pool: str, count: int) -> None:
    """Wait until the pool's gauge shows ``count`` queued requests."""
    await deployment.wait_for_metric("dualmap_pool_held_requests", count, pool=f"llm/{pool}")


async def in_a_row(deployment: Deployment, pool: str, bodies: list[bytes]) -> list[asyncio.Task[Reply]]:
    """Send requests one after the other, each when the previous request is queued."""
    tasks = []
    for body in bodies:
        # Every second request is chunked.
        tasks.append(asyncio.create_task(deployment.ask(body, chunk_bytes=500 * (len(tasks) % 2))))
        await held(deployment, pool, len(tasks))
    return tasks


async def test_queued_requests_are_served_in_arrival_order(engines: SharedEngines, deployment: Deployment) -> None:
    bodies = [short("queued", seed=f"{deployment.mode} order {number}") for number in range(3)]
    waits = await deployment.metric("dualmap_held_seconds_count", pool="llm/queued")
    async with busy(engines, deployment, "queued", seed=f"{deployment.mode} order") as gate:
        tasks = await in_a_row(deployment, "queued", bodies)
        page = await deployment.page("queued")
        assert page["left"]["held"] == 3
        assert page["left"]["in_flight"] == 1
        assert [each.body for each in engines.left.received if each.body in bodies] == []
        gate.set()
        replies = await asyncio.gather(*tasks)
    assert [reply.status for reply in replies] == [200] * 3
    assert [each.body for each in engines.left.received if each.body in bodies] == bodies
    assert all(receipt(reply)["chosen"] == "left" for reply in replies)
    await held(deployment, "queued", 0)
    assert await deployment.metric("dualmap_held_seconds_count", pool="llm/queued") == waits + 3


async def test_queued_request_with_trailers_arrives_complete(engines: SharedEngines, deployment: Deployment) -> None:
    body = short("queued", seed=f"{deployment.mode} trailers")
    async with busy(engines, deployment, "queued", seed=f"{deployment.mode} before trailers") as gate:
        headers = {"content-type": "application/json"}
        trailers = [("x-sum", "1")]
        task = asyncio.create_task(
            http2(deployment.envoy.port, path=CHAT, body=body, headers=headers, trailers=trailers)
        )
        await held(deployment, "queued", 1)
        gate.set()
        reply = await task
    assert reply.status == 200
    assert [each.body for each in engines.left.received if each.body == body] == [body]
    assert receipt(reply)["chosen"] == reply.headers[ENGINE_HEADER] == "left"


async def test_queued_large_body_arrives_complete(engines: SharedEngines, deployment: Deployment) -> None:
    body = json.dumps(chat("queued", f"{deployment.mode} large " + "x" * 3_000_000)).encode()
    async with busy(engines, deployment, "queued", seed=f"{deployment.mode} before large") as gate:
        task = asyncio.create_task(deployment.ask(body))
        await held(deployment, "queued", 1)
        gate.set()
        reply = await task
    assert reply.status == 200
    assert [each.sha256 for each in engines.left.received if each.body == body] == [reply.headers[DIGEST_HEADER]]


async def test_full_queue_rejects_with_429(engines: SharedEngines, deployment: Deployment) -> None:
    refused = await deployment.metric("dualmap_refused_requests_total", pool="llm/queued", code="queue_full")
    async with busy(engines, deployment, "queued", seed=f"{deployment.mode} full") as gate:
        bodies = [short("queued", seed=f"{deployment.mode} full {number}") for number in range(3)]
        tasks = await in_a_row(deployment, "queued", bodies)
        for number in range(4):
            reply = await deployment.ask(short("queued", seed=f"{deployment.mode} too many {number}"))
            assert reply.status == 429
            assert int(reply.headers["retry-after"]) >= 1
            assert error_of(reply)["code"] == "queue_full"
        gate.set()
        assert {reply.status for reply in await asyncio.gather(*tasks)} == {200}
    code = {"pool": "llm/queued", "code": "queue_full"}
    assert await deployment.metric("dualmap_refused_requests_total", **code) == refused + 4


async def test_full_queue_rejects_the_client_with_the_most_requests(
    engines: SharedEngines, deployment: Deployment
) -> None:
    limited = await deployment.metric("dualmap_clients_limited_total", pool="llm/queued")
    heavy, light = ({"x-gateway-inference-fairness-id": name} for name in ("heavy", "light"))
    bodies = [short("queued", seed=f"{deployment.mode} fair {number}") for number in range(4)]
    async with busy(engines, deployment, "queued", seed=f"{deployment.mode} fair") as gate:
        tasks = []
        for body in bodies[:3]:
            tasks.append(asyncio.create_task(deployment.ask(body, headers=heavy)))
            await held(deployment, "queued", len(tasks))
        tasks.append(asyncio.create_task(deployment.ask(bodies[3], headers=light)))
        rejected = await tasks[2]
        assert rejected.status == 429
        assert error_of(rejected)["code"] == "queue_full"
        gate.set()
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [200, 200, 429, 200]
    assert [each.body for each in engines.left.received if each.body in bodies] == [bodies[0], bodies[3], bodies[1]]
    assert await deployment.metric("dualmap_clients_limited_total", pool="llm/queued") == limited + 1


async def test_request_queued_past_max_wait_gets_429(engines: SharedEngines, deployment: Deployment) -> None:
    async with busy(engines, deployment, "hasty", seed=f"{deployment.mode} hasty"):
        bodies = [short("hasty", seed=f"{deployment.mode} hasty {number}") for number in range(6)]
        replies = await asyncio.gather(*(deployment.ask(body) for body in bodies))
        assert [reply.status for reply in replies] == [429] * 6
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
        assert {error_of(reply)["code"] for reply in replies} == {"waited_too_long"}
        await held(deployment, "hasty", 0)
    assert not [each for each in engines.left.received if each.body in bodies]


async def test_client_disconnect_removes_its_request_from_the_queue(
    engines: SharedEngines, deployment: Deployment
) -> None:
    bodies = [short("queued", seed=f"{deployment.mode} gone {number}") for number in range(4)]
    async with busy(engines, deployment, "queued", seed=f"{deployment.mode} gone") as gate:
        first, second, third = await in_a_row(deployment, "queued", bodies[:3])
        for number, task in enumerate((second, first), start=1):
            task.cancel()
            await asyncio.wait((task,))
            await held(deployment, "queued", 3 - number)
        fourth = asyncio.create_task(deployment.ask(bodies[3]))
        await held(deployment, "queued", 2)
        gate.set()
        assert [reply.status for reply in await asyncio.gather(third, fourth)] == [200, 200]
    assert [each.body for each in engines.left.received if each.body in bodies] == bodies[2:]
    await held(deployment, "queued", 0)


async def test_first_member_of_empty_pool_serves_queued_requests(
    engines: SharedEngines, deployment: Deployment
) -> None:
    bodies = [short("awaited", seed=f"{deployment.mode} awaited {number}") for number in range(4)]
    tasks = await in_a_row(deployment, "awaited", bodies)

    deployment.write("awaited", document("awaited", [member_of(engines.right)], version=2, **queue(holdWhenEmpty=True)))
    replies = await asyncio.gather(*tasks)

    # The router must not dispatch a request before Envoy has received the member.
    assert [reply.status for reply in replies] == [200] * 4
    assert {receipt(reply)["chosen"] for reply in replies} == {"right"}
    assert {each.body for each in engines.right.received} == set(bodies)
    await held(deployment, "awaited", 0)


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
async def test_router_dispatches_queued_requests_on_sigterm(engines: SharedEngines, mode: Mode, tmp_path: Path) -> None:
    documents = {"queued": document("queued", [member_of(engines.left)], **BUSY, **queue())}
    bodies = [short("queued", seed=f"{mode} sigterm {number}") for number in range(3)]
    async with AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(Deployment(documents, mode=mode, directory=tmp_path))
        gate = await stack.enter_async_context(busy(engines, deployment, "queued", seed=f"{mode} sigterm"))
        tasks = await in_a_row(deployment, "queued", bodies)

        deployment.router.terminate()
        await deployment.wait_for_load("queued", "all are with the engine", lambda flying, _: flying == 4)
        assert deployment.router.returncode is None
        gate.set()
        replies = await asyncio.gather(*tasks)

        assert [reply.status for reply in replies] == [200] * 3
        assert all(receipt(reply)["chosen"] == "left" for reply in replies)
        assert await deployment.router.wait() == 0
