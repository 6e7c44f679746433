"""Clients that try to fill the memory of the real Envoy: large bodies that end slowly or never."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from dualmap_extproc import names
from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import SlowReader, http1, http2
from harness.envoy import Envoy, bootstrap, to_yaml
from harness.picker import Pick, Picker, Seen, always
from harness.settings import pool_of, settings_for
from harness.upstream import Answer, Received, Upstream

CLUSTER = names.cluster_name("llm", "qwen")
# Without limits, 40 of these clients already take 1 GiB.
CLIENTS, BODY_BYTES = 60, 15_000_000
MEMORY_BYTES = 256 << 20


@pytest_asyncio.fixture(name="engine")
async def _engine() -> AsyncIterator[Upstream]:
    async with Upstream(name="a") as engine:
        yield engine


async def send_slowly(port: int) -> None:
    """Send most of a body by HTTP/1, then a byte a second, until Envoy ends the connection."""
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = f"POST / HTTP/1.1\r\nhost: e\r\ncontent-length: {BODY_BYTES + 1000}\r\n\r\n"
            writer.write(head.encode())
            for _ in range(BODY_BYTES // 50_000):
                writer.write(bytes(50_000))
                await writer.drain()
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(1.0)
        finally:
            writer.close()


async def send_and_wait(port: int) -> None:
    """Send a whole body by HTTP/2, for which the picker never picks a member."""
    with contextlib.suppress(ConnectionError):
        await http2(port, path="/", body=bytes(BODY_BYTES), timeout_s=120.0)


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process, without the pages of its files."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("attack", [send_slowly, send_and_wait], ids=["slow HTTP/1 bodies", "held HTTP/2 bodies"])
async def test_large_bodies_stay_below_envoys_memory_limit(
    attack: Callable[[int], Awaitable[None]], engine: Upstream, tmp_path: Path
) -> None:
    async def pick_small(seen: Seen) -> Pick:
        if len(seen.body) > 1000:
            return await asyncio.Future()
        return Pick(destination=engine.endpoint, cluster=CLUSTER)

    async with Picker(choose=pick_small) as picker:
        settings = dataclasses.replace(settings_for([pool_of([engine])], [picker]), memory_bytes=MEMORY_BYTES)
        async with Envoy(settings, directory=tmp_path, concurrency=2) as envoy:
            attackers = [asyncio.ensure_future(attack(envoy.port)) for _ in range(CLIENTS)]
            largest, dropped = 0, 0
            # Envoy drops attackers until the others fit.
            for _ in range(600):
                largest = max(largest, anonymous_bytes(envoy.child.pid))
                dropped = sum(each.done() for each in attackers)
                if dropped > CLIENTS // 2:
                    break
                await asyncio.sleep(0.1)
            served = 0
            for _ in range(20):
                served += (await http1(envoy.url, body=b"{}")).status == 200
                largest = max(largest, anonymous_bytes(envoy.child.pid))
            for each in attackers:
                each.cancel()
            await asyncio.wait(attackers)
    assert largest < MEMORY_BYTES
    assert dropped > CLIENTS // 2
    assert served >= 15, "Envoy serves others while it drops attackers"


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
async def test_body_that_ends_too_late_gets_408(mode: Mode, engine: Upstream, tmp_path: Path) -> None:
    async def pick_later(seen: Seen) -> Pick:
        await asyncio.sleep(2.0)
        return Pick(destination=engine.endpoint, cluster=CLUSTER)

    async with Picker(choose=pick_later) as picker:
        generated = to_yaml(bootstrap(settings_for([pool_of([engine])], [picker], mode=mode)))
        assert "request_timeout: 60s" in generated
        async with Envoy(generated.replace("request_timeout: 60s", "request_timeout: 1s"), directory=tmp_path) as envoy:
            reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
            writer.write(b"POST / HTTP/1.1\r\nhost: e\r\ncontent-length: 1000\r\n\r\n")
            answer = asyncio.create_task(reader.readuntil(b"}}"))
            while not answer.done():
                writer.write(b"x")
                await asyncio.sleep(0.2)
            writer.close()
            assert (await answer).startswith(b"HTTP/1.1 408")
            assert b'"code":"request_timeout"' in await answer
            assert not engine.received
            queued = await http1(envoy.url, body=b"{}")
            assert queued.status == 200, "the time in the queue does not count"


def answer_of(size: int) -> Answer:
    """Return an answer of ``size`` bytes."""

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return web.Response(body=bytes(size))

    return answer


async def test_client_that_reads_nothing_ends_its_request(engine: Upstream, tmp_path: Path) -> None:
    engine.answer = answer_of(200_000)
    async with Picker(choose=always(engine.endpoint, CLUSTER)) as picker:
        generated = to_yaml(bootstrap(settings_for([pool_of([engine])], [picker])))
        changed = generated.replace("stream_flush_timeout: 120s", "stream_flush_timeout: 5s")
        async with Envoy(changed, directory=tmp_path) as envoy, SlowReader(envoy.port, "/") as client:
            await client.read(0, timeout_s=60.0)
            assert client.reset, "Envoy ends the request of a client that reads nothing"
            await picker.wait_for_entries(1)
            async with SlowReader(envoy.port, "/") as slow:
                while not (slow.ended or slow.reset):
                    await slow.read(40_000, timeout_s=0.2)
            assert len(slow.body) == 200_000, "a client that reads slowly receives its answer"


async def test_connections_above_the_limit_are_closed(engine: Upstream, tmp_path: Path) -> None:
    async with Picker(choose=always(engine.endpoint, CLUSTER)) as picker:
        generated = to_yaml(bootstrap(settings_for([pool_of([engine])], [picker])))
        limit = "max_active_downstream_connections: '32768'"
        assert limit in generated
        changed = generated.replace(limit, "max_active_downstream_connections: '4'")
        async with Envoy(changed, directory=tmp_path) as envoy:
            idle = [await asyncio.open_connection("127.0.0.1", envoy.port) for _ in range(8)]
            closed = [asyncio.create_task(reader.read()) for reader, _ in idle]
            # Envoy accepts connections in the order in which clients open them.
            await asyncio.wait(closed[4:])
            assert not any(each.done() for each in closed[:4])
            for _, writer in idle:
                writer.close()
            await asyncio.wait(closed)
