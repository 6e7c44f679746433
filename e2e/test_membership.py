"""Tests of members that join, drain and leave under load, with a pool file for the router and EDS for Envoy."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from aiohttp import web

from harness.clients import Reply, opened
from harness.deployment import CHAT, Deployment
from harness.documents import chat, document, error_of, member_of, receipt
from harness.shared_engines import SharedEngines
from harness.upstream import ENGINE_HEADER, Answer, Received, Upstream, plain, sse
from harness.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

CLUSTER = "llm/changing"
EVENTS = [b'data: {"number": %d}\n\n' % number for number in range(3)]
CLIENTS = 6


class Load:
    """Clients that send new prompts without a pause and record every reply."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._numbers = count()
        self.replies: list[Reply] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests while the context is open; a client's exception fails the test."""
        stop = asyncio.Event()
        clients = [asyncio.create_task(self._ask(stop)) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            stop.set()
            results = await asyncio.gather(*clients, return_exceptions=True)
        assert [result for result in results if result is not None] == []

    async def wait_for_more(self, requests: int) -> list[Reply]:
        """Wait for ``requests`` requests that start after this call; return their replies."""
        # The router may have routed the open requests before the caller's last change.
        start = len(self.replies) + CLIENTS

        async def answered() -> bool:
            return len(self.replies) >= start + requests

        await until(answered, f"{requests} more requests are answered", timeout_s=60.0)
        return self.replies[start:]

    async def _ask(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self.replies.append(await self._deployment.ask(chat("changing", f"load {next(self._numbers)} " * 50)))


def served(replies: list[Reply]) -> set[str]:
    assert {reply.status for reply in replies} == {200}
    return {reply.headers[ENGINE_HEADER] for reply in replies}


async def wait_for_states(deployment: Deployment, states: dict[str, str]) -> None:
    """Wait until the router has applied the pool with these members' states."""

    async def applied() -> bool:
        page = await deployment.page("changing")
        return {name: endpoint["state"] for name, endpoint in page.items()} == states

    await until(applied, f"the router has {states}")


async def test_members_join_drain_and_leave_without_failed_requests(
    engines: SharedEngines, deployment: Deployment
) -> None:
    left, right = engines.left, engines.right
    async with Upstream(name="third") as third:
        load = Load(deployment)
        async with load.running():
            assert served(await load.wait_for_more(40)) == {"left", "right"}

            everyone = [member_of(each) for each in (left, right, third)]
            deployment.write("changing", document("changing", everyone, version=2))
            await wait_for_states(deployment, dict.fromkeys(("left", "right", "third"), "Active"))
            await deployment.envoy.wait_for_hosts(CLUSTER, {each.endpoint for each in (left, right, third)})
            replies = await load.wait_for_more(60)
            # The new member owns keys immediately, but the prompts are random.
            while "third" not in served(replies) and len(replies) < 1000:
                replies += await load.wait_for_more(60)
            assert served(replies) == {"left", "right", "third"}
            assert any('"third"' in receipt(reply)["pair"] for reply in replies)

            gate = asyncio.Event()
            for each in (left, right, third):
                each.answer = slow_streams(sse(EVENTS, then=gate))
            async with stream_at(deployment, third) as running:
                draining = [*everyone[:2], member_of(third, state="Draining")]
                deployment.write("changing", document("changing", draining, version=3))
                await wait_for_states(deployment, {"left": "Active", "right": "Active", "third": "Draining"})
                assert served(await load.wait_for_more(40)) == {"left", "right"}

                async def only_the_stream() -> bool:
                    in_flight: int = (await deployment.page("changing"))["third"]["in_flight"]
                    return in_flight == 1

                # The access log reports the ends of earlier requests a moment later.
                await until(only_the_stream, "only the open stream is left")
                assert (await deployment.envoy.hosts(CLUSTER))[third.endpoint] == "DRAINING"
                gate.set()
                assert await running == b"".join(EVENTS)

            async def idle() -> bool:
                in_flight: int = (await deployment.page("changing"))["third"]["in_flight"]
                return in_flight == 0

            await until(idle, "the draining member is idle")
            deployment.write("changing", document("changing", everyone[:2], version=4))
            await deployment.envoy.wait_for_hosts(CLUSTER, {left.endpoint, right.endpoint})
            assert served(await load.wait_for_more(40)) == {"left", "right"}
        assert {reply.status for reply in load.replies} == {200}
        # A pick may arrive at Envoy some milliseconds before its member does by EDS. Another member then serves the
        # request.
        elsewhere = [each for each in load.replies if receipt(each)["chosen"] != each.headers[ENGINE_HEADER]]
        assert {receipt(each)["chosen"] for each in elsewhere} <= {"third"}
        picked = [each for each in load.replies if receipt(each)["chosen"] == "third"]
        assert len(elsewhere) < len(picked) / 2, "Envoy learned of the new member too late"


def slow_streams(stream: Answer) -> Answer:
    """Return an answer: ``stream`` for requests with streaming, and an immediate plain answer for other requests."""

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return await (stream if b'"stream": true' in received.body else plain)(request, received)

    return answer


@asynccontextmanager
async def stream_at(deployment: Deployment, engine: Upstream) -> AsyncIterator["asyncio.Task[bytes]"]:
    """Open streams until this engine serves a stream; yield a task that reads this stream to its end."""
    for number in range(60):
        body = json.dumps(chat("changing", f"stream {number}", stream=True)).encode()
        async with opened(deployment.envoy.url + CHAT, body) as response:
            if response.headers[ENGINE_HEADER] == engine.name:
                yield asyncio.create_task(response.read())
                return
    pytest.fail(f"none of 60 streams was opened at {engine.name}")


async def test_emptied_pool_rejects_requests_then_recovers(engines: SharedEngines, deployment: Deployment) -> None:
    members = [member_of(engines.left), member_of(engines.right)]
    deployment.write("changing", document("changing", [], version=5))
    await wait_for_states(deployment, {})
    refused = await deployment.ask(chat("changing"))
    assert refused.status == 503
    assert error_of(refused)["code"] == "no_endpoint"
    assert (await deployment.ask(chat("scripted"))).status == 200, "other pools still serve"

    draining = [member_of(engines.left, state="Draining"), member_of(engines.right, state="Draining")]
    deployment.write("changing", document("changing", draining, version=6))
    await wait_for_states(deployment, {"left": "Draining", "right": "Draining"})
    assert (await deployment.ask(chat("changing"))).status == 503

    deployment.write("changing", document("changing", members, version=7))
    await wait_for_states(deployment, {"left": "Active", "right": "Active"})
    await deployment.envoy.wait_for_hosts(CLUSTER, {engines.left.endpoint, engines.right.endpoint})
    assert (await deployment.ask(chat("changing"))).status == 200


async def test_invalid_pool_change_keeps_the_last_valid_pool(engines: SharedEngines, deployment: Deployment) -> None:
    refusals = await deployment.metric("dualmap_pool_refusals_total")
    twice = [member_of(engines.left), member_of(engines.left)]
    deployment.write("changing", document("changing", twice, version=8))
    await deployment.wait_for_metric("dualmap_pool_refusals_total", refusals + 1)
    assert set(await deployment.page("changing")) == {"left", "right"}
    assert (await deployment.ask(chat("changing"))).status == 200
    deployment.write("changing", document("changing", [member_of(engines.left), member_of(engines.right)], version=9))
    await wait_for_states(deployment, {"left": "Active", "right": "Active"})
