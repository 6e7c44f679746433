"""Hostile bodies through Envoy: bodies that are slow to read, and slow bodies that would fill the router's memory."""

import asyncio
import json
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply, upload
from harness.deployment import CHAT, Deployment
from harness.documents import chat, error_of, receipt
from harness.shared_engines import SharedEngines

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

STREAMED_MODES = [Mode.STREAMED, Mode.FULL_DUPLEX]


async def test_body_with_too_many_elements_gets_400(engines: SharedEngines, deployment: Deployment) -> None:
    hostile = json.dumps(chat("scripted", "hi") | {"tools": []})[:-2].encode() + b"1," * 7_000_000 + b"1]}"

    hostile_replies, replies = await asyncio.gather(
        asyncio.gather(*(upload(deployment.envoy.port, CHAT, hostile) for _ in range(3))),
        asyncio.gather(*(deployment.ask(chat("scripted", f"hi {n}")) for n in range(10))),
    )

    assert [reply.status for reply in hostile_replies] == [400] * 3
    assert {error_of(reply)["code"] for reply in hostile_replies} == {"invalid_request"}
    assert [reply.status for reply in replies] == [200] * 10
    assert all("x-dualmap-decision" in reply.headers for reply in replies)
    assert len(engines.left.received) + len(engines.right.received) == 10


async def test_fields_that_the_engine_ignores_add_no_load(engines: SharedEngines, deployment: Deployment) -> None:
    attack = [{**chat("scripted", f"hi {number}"), "text_2": "x" * 1_000_000} for number in range(5)]
    replies = [await deployment.ask(body) for body in attack]
    others = [await deployment.ask(chat("scripted", f"other {number}")) for number in range(20)]

    assert [reply.status for reply in (*replies, *others)] == [200] * 25
    assert max(int(receipt(reply)["prompt"]) for reply in replies) < 50


@pytest.mark.parametrize("mode", STREAMED_MODES)
async def test_slow_bodies_are_bounded_and_other_requests_are_served(
    engines: SharedEngines, mode: Mode, tmp_path: Path
) -> None:
    pools = {"scripted": engines.documents()["scripted"]}
    async with Deployment(
        pools, mode=mode, directory=tmp_path, router_arguments=("--max-buffered", "2100kB")
    ) as deployment:
        port = deployment.envoy.port
        slow = [asyncio.create_task(_slow(port, 500_000)) for _ in range(12)]
        await deployment.wait_for_metric("dualmap_refused_requests_total", 8, code="overloaded")
        held = await deployment.metric("dualmap_buffered_bytes")
        reply = await deployment.ask(chat("scripted", "x" * 200_000))
        await deployment.wait_for_metric("dualmap_refused_requests_total", 9, code="overloaded")
        await asyncio.wait_for(_first(slow, 9), timeout=30.0)
        refused = [each.result() for each in slow if each.done()]
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await deployment.wait_for_metric("dualmap_buffered_bytes", 0)

    assert held <= 2_100_000
    assert (reply.status, "x-dualmap-decision" in reply.headers) == (200, True)
    assert [(each.status, error_of(each)["code"]) for each in refused] == [(503, "overloaded")] * 9


async def test_body_that_grows_above_the_limit_after_the_pick_gets_413(engines: SharedEngines) -> None:
    deployment = await engines.deployment(Mode.STREAMED)
    reader, writer = await asyncio.open_connection("127.0.0.1", deployment.envoy.port)
    try:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: envoy\r\ntransfer-encoding: chunked\r\n\r\n"
        body = json.dumps(chat("scripted", "hi")).encode()
        writer.write(head.encode() + b"%x\r\n%s\r\n" % (len(body), body))
        await deployment.wait_for_load("scripted", "the router has picked", lambda flying, _: flying == 1)
        answer = asyncio.ensure_future(reader.read(65_536))
        with suppress(ConnectionError):
            for _ in range(25):
                writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        content = await asyncio.wait_for(answer, timeout=30.0)
    finally:
        writer.close()

    assert content.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in content
    assert not engines.left.received
    assert not engines.right.received
    await deployment.wait_for_rest()


async def _first(tasks: list[asyncio.Task[Reply]], count: int) -> None:
    """Return when ``count`` of the tasks have ended."""
    for each in islice(asyncio.as_completed(tasks), count):
        await each


async def _slow(port: int, size: int) -> Reply:
    """Send a part of a body and wait for the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: envoy\r\ncontent-type: application/json\r\ncontent-length: 2000000\r\n\r\n"
        )
        writer.write(head.encode() + b'{"model": "scripted", "x": "'.ljust(size, b"x"))
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        content = await reader.readexactly(int(headers["content-length"]))
        return Reply(status=int(lines[0].split()[1]), headers=headers, body=content)
    finally:
        writer.close()
