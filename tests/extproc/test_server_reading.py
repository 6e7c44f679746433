"""Hostile bodies at the gRPC server: large bodies that are slow to read, and many slow bodies."""

import asyncio
import os
import signal
import sys
import time
from asyncio.events import Handle
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dualmap_extproc.reading.processes import PROCESSES, ReadingProcesses
from dualmap_extproc.request.stream import Stream
from dualmap_extproc.settings import Limits
from extproc import attackers
from extproc.envoy_messages import NO_WAIT, chat, destination, refused_with, request_body, request_headers
from extproc.grpc_routers import SERVING, answers, running
from waiting import WAIT_S, until

pytestmark = pytest.mark.usefixtures("transport")

# A step of the event loop takes at most 20 ms of CPU time on an idle machine. Other processes of a busy machine slow
# memory accesses down. Reading one of these bodies on the event loop takes more than a second.
HELD_S = 0.1


@asynccontextmanager
async def reading() -> AsyncIterator[ReadingProcesses]:
    reader = ReadingProcesses()
    task = asyncio.create_task(reader.run())
    await until(lambda: len(reader.pids) == PROCESSES)
    try:
        yield reader
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def attacked(port: int, *, streams: int, size: int) -> AsyncIterator[Counter[int]]:
    """Attack a port; yield the counts of the statuses of the answers."""
    script = Path(attackers.__file__)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), str(port), str(streams), str(size)), stdout=asyncio.subprocess.PIPE
    )
    statuses: Counter[int] = Counter()

    async def count() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            statuses[int(line)] += 1

    counting = asyncio.create_task(count())
    try:
        yield statuses
    finally:
        process.kill()
        await process.wait()
        await counting


@pytest.fixture
def longest_step(monkeypatch) -> list[float]:
    """The longest CPU time of a callback or a task's step on the event loop so far, as the only item of a list."""
    longest = [0.0]
    run = Handle._run

    def timed(handle: Handle) -> None:
        started = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - started)

    monkeypatch.setattr(Handle, "_run", timed)
    return longest


@pytest.mark.slow
async def test_server_ten_hostile_bodies_do_not_hold_the_event_loop(longest_step):
    health, routed = [], 0
    async with reading() as reader, running(reader=reader) as router:
        async with attacked(router.ports.grpc, streams=10, size=16_000_000) as statuses:
            await until(lambda: statuses.total() >= 1)
            longest_step[0] = 0.0
            # One after another, while the bodies keep coming.
            for _ in range(10):
                async with asyncio.timeout(WAIT_S):
                    health.append(await router.health("readiness"))
                    call = router.stream()
                    await call.write(request_headers(NO_WAIT))
                    await call.write(request_body(chat()))
                    pick, _ = await answers(call, 2)
                    call.cancel()
                routed += destination(pick) is not None
            await until(lambda: statuses.total() >= 10)
        held_s = longest_step[0]
        await until(lambda: router.processor.buffered_bytes == 0)

    assert (health, routed) == ([SERVING] * 10, 10)
    assert held_s < HELD_S
    assert set(statuses) <= {400, 503}


async def test_server_slow_large_bodies_do_not_hold_the_event_loop(longest_step):
    part = b"\\" * 262_144
    async with running() as router:
        calls = [router.stream() for _ in range(4)]
        for call in calls:
            await call.write(request_headers(NO_WAIT))
            await call.write(request_body(b'{"a": "', end=False))
            for _ in range(60):
                await call.write(request_body(part, end=False))
        await until(lambda: router.processor.buffered_bytes == 4 * (60 * len(part) + 7))
        longest_step[0] = 0.0
        for _ in range(4):
            for call in calls:
                await call.write(request_body(b"}", end=False))
            await asyncio.sleep(0.15)
        held_s = longest_step[0]
        for call in calls:
            call.cancel()

    assert held_s < HELD_S


async def test_server_streams_due_at_once_are_decided_in_turns(longest_step, monkeypatch):
    decide = Stream.on_deadline

    def slowly(stream: Stream, now: float):
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        return decide(stream, now)

    monkeypatch.setattr(Stream, "on_deadline", slowly)
    async with running(limits=Limits(silence_s=1.0)) as router:
        calls = [router.stream() for _ in range(20)]
        for call in calls:
            await call.write(request_headers(NO_WAIT))
            await call.write(request_body(chat(), end=False))
        picks = [(await answers(call, 1))[0] for call in calls]
        for call in calls:
            call.cancel()

    assert all(map(destination, picks))
    assert longest_step[0] < HELD_S


async def test_server_large_bodies_are_routed():
    body = chat("long text " * 200_000)
    async with reading() as reader, running(reader=reader) as router:
        call = router.stream()
        await call.write(request_headers(NO_WAIT))
        for start in range(0, len(body), 65_536):
            await call.write(request_body(body[start : start + 65_536], end=start + 65_536 >= len(body)))
        pick, *_ = await answers(call, 1)
        call.cancel()

        assert destination(pick)


async def test_server_client_that_leaves_while_its_body_is_read_leaves_nothing():
    body = chat("long text " * 200_000)
    async with reading() as reader, running(reader=reader) as router:
        for pid in reader.pids:
            os.kill(pid, signal.SIGSTOP)
        for _ in range(3):
            call = router.stream()
            await call.write(request_headers(NO_WAIT))
            await call.write(request_body(body))
            await until(lambda: router.processor.buffered_bytes == len(body))
            call.cancel()
            await until(lambda: router.processor.open_requests == 0)

        assert router.processor.buffered_bytes == 0
        assert router.in_flight == 0


async def test_server_many_slow_bodies_are_bounded_and_others_are_served():
    part = b'{"model": "m", "prompt": "'.ljust(1_000_000, b"x")
    async with running(limits=Limits(buffered_bytes=10_500_000)) as router:
        slow = []
        for _ in range(50):
            call = router.stream()
            await call.write(request_headers(NO_WAIT))
            await call.write(request_body(part, end=False))
            slow.append(call)
        reads = [asyncio.ensure_future(call.read()) for call in slow]
        await until(lambda: sum(read.done() for read in reads) == 40)
        refused = [read.result() for read in reads if read.done()]
        held = router.processor.buffered_bytes
        other = router.stream()
        await other.write(request_headers(NO_WAIT))
        await other.write(request_body(chat("x" * 600_000), end=False))
        await other.write(request_body(b""))
        pick, *_ = await answers(other, 3)
        for call in (*slow, other):
            call.cancel()
        await until(lambda: router.processor.open_requests == 0)

        assert held == 10_000_000
        assert {refused_with([answer]) for answer in refused} == {503}
        assert destination(pick)
        assert router.processor.buffered_bytes == 0
