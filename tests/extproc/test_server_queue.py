"""Tests of the gRPC server with a real client: queued requests, and the task for their deadlines."""

import asyncio

import grpc
import grpc.aio
import pytest

from dualmap_extproc.transport import deadlines
from dualmap_extproc.transport.deadlines import keep_deadlines
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    NO_WAIT,
    chat,
    crowded_pool,
    destination,
    kinds,
    refused_with,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from extproc.grpc_routers import answers, crowded, held, running
from waiting import WAIT_S, until

pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize("config", [NO_WAIT, DUPLEX, BUFFERED], ids=["no-wait", "duplex", "buffered"])
async def test_server_answers_queued_requests_in_order(config):
    async with crowded() as (router, busy):
        calls = [await held(router, config, already=number) for number in range(3)]
        for call in calls:
            assert router.held == 3 - calls.index(call)
            await busy.write(response_headers())
            await busy.write(response_body())
            read = await answers(call, 2)
            assert [destination(each) for each in read].count("10.0.0.0:8000") == 1
            busy = call
        assert router.held == 0
        assert router.in_flight == 4


async def test_server_rejects_a_request_queued_too_long():
    async with crowded(max_wait_s=0.2) as (router, _):
        task = asyncio.create_task(keep_deadlines(router.picker))
        call = await held(router)

        assert refused_with(await answers(call, 1)) == 429
        assert router.held == 0
        # Envoy also ends the stream after it has answered the client.
        call.cancel()
        task.cancel()


async def test_server_dispatches_queued_request_at_its_dispatch_deadline():
    """Without an event, the dispatch window opens with time, and the deadline timer releases the request."""
    async with running() as router:
        router.picker.set_pools(0.0, (crowded_pool(),))
        task = asyncio.create_task(keep_deadlines(router.picker))
        busy = router.stream()
        await busy.write(request_headers(NO_WAIT))
        # The request has no streaming, so the router does not observe the end of its prefill. The prefill takes three
        # seconds, so that the next request arrives before its end, also on a busy machine.
        await busy.write(request_body(chat("some " * 240)))
        await answers(busy, 2)
        call = await held(router)

        assert destination((await answers(call, 2))[0])
        call.cancel()
        busy.cancel()
        task.cancel()


async def test_server_removes_cancelled_requests_from_the_queue():
    async with crowded() as (router, busy):
        calls = [await held(router, already=number) for number in range(4)]
        calls[0].cancel()
        await calls[1].done_writing()
        assert await calls[1].read() is grpc.aio.EOF
        await until(lambda: router.held == 2)
        await busy.write(response_headers())
        await busy.write(response_body())
        assert destination((await answers(calls[2], 2))[0])
        calls[2].cancel()
        calls[3].cancel()
        busy.cancel()
        await router.processor.idle()
        assert router.held == 0


async def test_server_answers_body_of_queued_request_after_the_pick():
    async with crowded() as (router, busy):
        call = await held(router)
        await call.write(request_body(b""))
        await busy.write(response_headers())
        await busy.write(response_body())

        assert destination(await call.read())
        await call.write(request_body(b""))
        assert kinds(await answers(call, 3)) == ["request_body"] * 3


class Clockwork:
    """A fake picker that has only deadlines; the first deadline is far in the future."""

    def __init__(self) -> None:
        self.deadline_s: float | None = asyncio.get_running_loop().time() + 3600.0
        self.asked = asyncio.Event()
        self.kept = asyncio.Event()
        self.times_kept = 0
        self.goes_away = True
        self.has_waiting = False
        self.wake = lambda: None

    def on_first_waiting(self, wake) -> None:
        self.wake = wake

    def next_deadline(self) -> float | None:
        self.asked.set()
        return self.deadline_s

    def on_deadline(self, now: float) -> None:
        assert self.deadline_s is not None
        assert now >= self.deadline_s
        if self.goes_away:
            self.deadline_s = None
        self.times_kept += 1
        self.kept.set()


async def test_deadline_task_calls_the_picker_after_a_deadline():
    clockwork = Clockwork()
    clockwork.deadline_s = 0.0

    task = asyncio.create_task(keep_deadlines(clockwork))
    await asyncio.wait_for(clockwork.kept.wait(), WAIT_S)
    task.cancel()


async def test_deadline_task_wakes_at_the_first_queued_request(monkeypatch):
    monkeypatch.setattr(deadlines, "_POLL_S", 3600.0)
    clockwork = Clockwork()
    task = asyncio.create_task(keep_deadlines(clockwork))
    await clockwork.asked.wait()

    clockwork.deadline_s = asyncio.get_running_loop().time() + 0.1
    clockwork.wake()
    await asyncio.wait_for(clockwork.kept.wait(), WAIT_S)
    task.cancel()


async def test_deadline_task_finds_new_deadlines_by_polling(monkeypatch):
    monkeypatch.setattr(deadlines, "_POLL_S", 3600.0)
    clockwork = Clockwork()
    clockwork.has_waiting = True
    task = asyncio.create_task(keep_deadlines(clockwork))
    for _ in range(3):
        await clockwork.asked.wait()
        clockwork.kept.clear()
        clockwork.deadline_s = 0.0
        await asyncio.wait_for(clockwork.kept.wait(), WAIT_S)
    task.cancel()


async def test_deadline_task_is_not_blocked_by_a_stuck_deadline(monkeypatch):
    monkeypatch.setattr(deadlines, "_PAUSE_S", 3600.0)
    monkeypatch.setattr(deadlines, "_POLL_S", 3600.0)
    clockwork = Clockwork()
    clockwork.deadline_s, clockwork.goes_away = 0.0, False
    task = asyncio.create_task(keep_deadlines(clockwork))
    for _ in range(1000):
        await asyncio.sleep(0)

    assert clockwork.times_kept == 1
    task.cancel()
