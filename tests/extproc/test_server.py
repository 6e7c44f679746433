"""The gRPC server with a real client: streams, health, limits, endings and the drain."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap_edge.ports import AddressError
from dualmap_extproc import server
from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.picker import Picker
from dualmap_extproc.server import ExternalProcessor, GrpcServers, Ports, keep_deadlines
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    NO_WAIT,
    Recorder,
    chat,
    crowded_pool,
    destination,
    kinds,
    pool,
    refused_with,
    request_body,
    request_headers,
    response_body,
    response_headers,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass
class Running:
    """A router's gRPC side on free ports, and a client of it."""

    picker: Picker
    observer: Recorder
    processor: ExternalProcessor
    servers: GrpcServers
    ports: Ports
    channel: grpc.aio.Channel

    def stream(self, channel: grpc.aio.Channel | None = None):
        method = (channel or self.channel).stream_stream(
            f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}",
            request_serializer=wire.ProcessingRequest.SerializeToString,
            response_deserializer=wire.ProcessingResponse.FromString,
        )
        return method()

    @property
    def in_flight(self) -> int:
        return sum(each.in_flight for status in self.picker.statuses() for each in status.endpoints)

    @property
    def held(self) -> int:
        return sum(status.held for status in self.picker.statuses())

    async def health(self, service: str) -> int:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports.health}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return answer.status


@asynccontextmanager
async def running(*, ready=True, limits: Limits | None = None) -> AsyncIterator[Running]:
    observer = Recorder()
    limits = limits or Limits()
    picker = Picker(limits, observer, id_prefix="r")
    picker.set_pools(0.0, (pool(),))
    processor = ExternalProcessor(picker, observer, limits)
    servers = GrpcServers(processor, services=(), access_log=(), limits=limits)
    ports = await servers.start("127.0.0.1", grpc_port=0, health_port=0, als_port=0, credentials=None)
    if ready:
        await servers.ready()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}", options=UNLIMITED) as channel:
        try:
            yield Running(picker, observer, processor, servers, ports, channel)
        finally:
            await servers.drain(0.0)


@pytest.fixture
async def router() -> AsyncIterator[Running]:
    async with running() as router:
        yield router


async def answers(call, count: int) -> list[wire.ProcessingResponse]:
    return [await call.read() for _ in range(count)]


async def test_a_request_from_its_headers_to_the_first_chunk(router):
    call = router.stream()
    await call.write(request_headers(NO_WAIT))
    await call.write(request_body(chat()))
    pick, body = await answers(call, 2)
    await call.write(response_headers())
    (headers,) = await answers(call, 1)
    await call.write(response_body())
    (chunk,) = await answers(call, 1)

    assert destination(pick)
    assert kinds([body, headers, chunk]) == ["request_body", "response_headers", "response_body"]
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert router.observer.names() == ["routed", "decided", "first_token"]
    assert router.observer.events[1][1] > 0


async def test_more_streams_at_once_than_grpc_takes_by_itself_are_all_ours(router):
    calls = [router.stream() for _ in range(2000)]
    for call in calls:
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(chat()))
    for call in calls:
        (pick, _) = await answers(call, 2)
        assert destination(pick)
        call.cancel()


@pytest.mark.parametrize(("size", "status"), [(12_000_000, None), (17_000_000, 413), (40_000_000, 413)])
async def test_large_bodies_in_one_message_are_for_us_to_judge_not_for_grpc(router, size, status):
    call = router.stream()
    await call.write(request_headers(BUFFERED))
    await call.write(request_body(chat("x" * size)))
    (_, answer) = await answers(call, 2)

    assert destination(answer) if status is None else refused_with([answer]) == status


async def test_a_cancelled_stream_leaves_nothing(router):
    call = router.stream()
    await call.write(request_headers(NO_WAIT))
    await call.write(request_body(chat()))
    await answers(call, 2)
    assert router.in_flight == 1

    call.cancel()
    await router.processor.idle()

    assert router.in_flight == 0
    assert router.observer.names()[-1] == "aborted"


async def test_a_stream_that_is_half_closed_ends_cleanly(router):
    call = router.stream()
    await call.write(request_headers(DUPLEX))
    await call.write(request_body(chat()))
    await answers(call, 2)
    await call.done_writing()

    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert router.in_flight == 0


async def test_what_is_no_protobuf_ends_its_stream_alone(router, caplog):
    method = router.channel.stream_stream(f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}")
    call = method()
    await call.write(request_headers(NO_WAIT).SerializeToString())
    await call.write(b"\xff\xff\xff")

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Unexpected" not in caplog.text
    await test_a_request_from_its_headers_to_the_first_chunk(router)


async def test_a_whole_body_without_its_end_is_picked_for_after_silence(router):
    call = router.stream()
    await call.write(request_headers(NO_WAIT, content_length=str(len(chat()))))
    await call.write(request_body(chat(), end=False))
    pick, _ = await answers(call, 2)
    await call.write(request_body(b""))
    (late,) = await answers(call, 1)

    assert destination(pick)
    assert kinds([late]) == ["request_body"]


async def test_what_cannot_become_a_request_is_refused_after_a_pause():
    async with running(limits=Limits(pause_s=0.2)) as router:
        call = router.stream()
        await call.write(request_headers(NO_WAIT))
        # So that the headers' deadline passes when the body has moved it back.
        await asyncio.sleep(0.05)
        await call.write(request_body(b"[1,", end=False))
        assert refused_with(await answers(call, 1)) == 400


async def test_a_stalled_body_is_refused_in_the_end():
    waits = pool().routing.queue.max_wait_s
    async with running(limits=Limits(pause_s=0.1, stalled_s=0.3 - waits)) as router:
        call = router.stream()
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(b'{"model"', end=False))
        assert refused_with(await answers(call, 1)) == 400


async def test_streams_cut_at_any_moment_leave_nothing(router, caplog):
    chance = random.Random(1)
    messages = [request_headers(NO_WAIT), request_body(chat()), response_headers(), response_body(end=True)]

    async def one() -> None:
        call = router.stream()
        for message in messages[: chance.randrange(5)]:
            await call.write(message)
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        call.cancel()

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(30)))
    await router.processor.idle()

    assert router.in_flight == 0
    assert "Unexpected" not in caplog.text


async def test_hundreds_of_open_streams_are_all_answered(router):
    calls = [router.stream() for _ in range(300)]
    for call in calls:
        await call.write(request_headers(NO_WAIT))
    for call in calls:
        await call.write(request_body(chat()))
    picks = [(await answers(call, 2))[0] for call in calls]

    assert all(destination(pick) for pick in picks)
    assert router.in_flight == 300
    for call in calls:
        call.cancel()
    await router.processor.idle()


async def test_health_names_liveness_and_readiness():
    async with running(ready=False) as router:
        before = [await router.health(name) for name in ("liveness", "readiness", "", EXT_PROC_SERVICE)]
        await router.servers.ready()
        after = [await router.health(name) for name in ("liveness", "readiness", "", EXT_PROC_SERVICE)]

        assert before == [SERVING, NOT_SERVING, NOT_SERVING, NOT_SERVING]
        assert after == [SERVING] * 4
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.health("something else")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        on_grpc_port = await health_pb2_grpc.HealthStub(router.channel).Check(health_pb2.HealthCheckRequest())
        assert on_grpc_port.status == SERVING


async def test_the_health_port_serves_health_only(router):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.ports.health}") as channel:
        call = router.stream(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_half_read_request_still_gets_its_pick_while_readiness_is_gone(router):
    call = router.stream()
    await call.write(request_headers(NO_WAIT))
    await call.write(request_body(chat()[:9], end=False))
    watch = health_pb2_grpc.HealthStub(router.channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await watch.read()).status == SERVING

    drain = asyncio.create_task(router.servers.drain(20.0))
    assert (await watch.read()).status == NOT_SERVING
    assert await router.health("readiness") == NOT_SERVING
    assert await router.health("liveness") == SERVING
    await call.write(request_body(chat()[9:]))
    assert destination((await answers(call, 3))[0])
    await call.write(response_headers())
    await call.write(response_body(end=True))
    await answers(call, 2)

    assert await call.code() is grpc.StatusCode.OK
    await asyncio.wait_for(drain, 10.0)


async def test_for_the_notice_health_says_no_while_new_streams_are_still_served(router, monkeypatch):
    """Whoever polls health must have seen it turn before anything is refused."""
    assert server.NOTICE_S >= 0.5
    monkeypatch.setattr(server, "NOTICE_S", 600.0)
    watch = health_pb2_grpc.HealthStub(router.channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await watch.read()).status == SERVING

    drain = asyncio.create_task(router.servers.drain(1200.0))
    assert (await watch.read()).status == NOT_SERVING
    for _ in range(20):
        # On connections of their own: an open one might outlive the port.
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.ports.grpc}") as channel:
            assert (
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            ).status == NOT_SERVING
            call = router.stream(channel)
            await call.write(request_headers(NO_WAIT))
            await call.write(request_body(chat()))
            assert destination((await answers(call, 2))[0])
            call.cancel()
    assert not drain.done()
    drain.cancel()


async def refusal(port: int) -> None:
    """Ask for health on new connections until one is refused."""
    while True:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError as error:
                # A call that arrives as the port closes is cancelled; later ones find nobody.
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return


async def test_new_streams_are_refused_once_the_notice_is_over_and_open_ones_go_on(router, monkeypatch):
    monkeypatch.setattr("dualmap_extproc.server.NOTICE_S", 0.0)
    call = router.stream()
    await call.write(request_headers(DUPLEX))
    await call.write(request_body(chat()))
    await answers(call, 2)

    drain = asyncio.create_task(router.servers.drain(20.0))
    await refusal(router.ports.grpc)
    assert not drain.done()
    await call.write(response_headers())
    assert kinds(await answers(call, 1)) == ["response_headers"]
    await call.done_writing()
    await asyncio.wait_for(drain, 10.0)


async def test_an_idle_router_does_not_wait_for_watchers(router):
    watch = health_pb2_grpc.HealthStub(router.channel).Watch(health_pb2.HealthCheckRequest())
    await watch.read()

    # Far below the timeout given: nothing but the notice is waited for.
    await asyncio.wait_for(router.servers.drain(600.0), 30.0)


async def test_a_stream_that_does_not_end_is_cut_at_the_timeout(router):
    call = router.stream()
    await call.write(request_headers(DUPLEX))
    await call.write(request_body(chat()))
    await answers(call, 2)

    await asyncio.wait_for(router.servers.drain(0.6), 30.0)
    await router.processor.idle()

    assert router.in_flight == 0


async def test_drains_that_end_with_their_time_while_streams_are_cut(monkeypatch):
    """Two overlapping stops of a grpc.aio server take the process down if the first one's grace runs out."""
    monkeypatch.setattr("dualmap_extproc.server.NOTICE_S", 0.0)
    for _ in range(20):
        async with running() as router:
            call = router.stream()
            await call.write(request_headers(DUPLEX))
            await asyncio.gather(router.servers.drain(0.0), router.servers.close())
            await router.processor.idle()
            assert router.in_flight == 0


async def codes_of_calls_that_end_with_the_drain() -> list[grpc.StatusCode]:
    async with running() as router:
        calls = [router.stream() for _ in range(8)]
        for call in calls:
            await call.write(request_headers(DUPLEX))
        await until(lambda: router.processor.open_requests == len(calls))
        drain = asyncio.create_task(router.servers.drain(30.0))
        await asyncio.gather(*(call.done_writing() for call in calls))
        codes = [await call.code() for call in calls]
        await asyncio.wait_for(drain, 30.0)
        return codes


async def test_a_call_that_ends_as_the_drain_does_is_told_its_end(monkeypatch):
    """Envoy takes a call that is cancelled for a failed one, and breaks off the response it belongs to."""
    monkeypatch.setattr("dualmap_extproc.server.NOTICE_S", 0.0)
    for _ in range(20):
        assert set(await codes_of_calls_that_end_with_the_drain()) == {grpc.StatusCode.OK}


async def test_a_port_in_use_is_an_error_that_names_it(router):
    other = GrpcServers(router.processor, services=(), access_log=(), limits=Limits())

    with pytest.raises(AddressError, match=f"127.0.0.1:{router.ports.grpc}"):
        await other.start("127.0.0.1", grpc_port=router.ports.grpc, health_port=0, als_port=0, credentials=None)


@asynccontextmanager
async def crowded(**queue) -> AsyncIterator[tuple[Running, grpc.aio.StreamStreamCall]]:
    """A router whose only engine is busy, and the call that keeps it so."""
    async with running() as router:
        router.picker.set_pools(0.0, (crowded_pool(**queue),))
        call = router.stream()
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(chat("long " * 10_000)))
        await answers(call, 2)
        yield router, call


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)


async def held(router: Running, config=NO_WAIT, *, already=0) -> grpc.aio.StreamStreamCall:
    """Send a request; return its call once it is held."""
    call = router.stream()
    await call.write(request_headers(config))
    await call.write(request_body(chat()))
    await until(lambda: router.held > already)
    return call


@pytest.mark.parametrize("config", [NO_WAIT, DUPLEX, BUFFERED], ids=["no-wait", "duplex", "buffered"])
async def test_held_requests_are_answered_one_after_the_other(config):
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


async def test_a_refusal_reaches_who_has_waited_too_long():
    async with crowded(max_wait_s=0.2) as (router, _):
        task = asyncio.create_task(keep_deadlines(router.picker))
        call = await held(router)

        assert refused_with(await answers(call, 1)) == 429
        assert router.held == 0
        # As Envoy does once it has answered the client.
        call.cancel()
        task.cancel()


async def test_a_held_request_goes_when_the_prefill_before_it_should_have_ended():
    """Nobody tells: the window opens by time alone, and the deadlines' keeper sees to it."""
    async with running() as router:
        router.picker.set_pools(0.0, (crowded_pool(),))
        task = asyncio.create_task(keep_deadlines(router.picker))
        busy = router.stream()
        await busy.write(request_headers(NO_WAIT))
        # Not streamed, so that its prefill is not seen to end; a second of it at most.
        await busy.write(request_body(chat("some " * 60)))
        await answers(busy, 2)
        call = await held(router)

        assert destination((await answers(call, 2))[0])
        call.cancel()
        busy.cancel()
        task.cancel()


async def test_held_requests_whose_clients_go_give_up_their_places():
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


async def test_a_body_that_came_while_held_is_answered_after_the_pick():
    async with crowded() as (router, busy):
        call = await held(router)
        await call.write(request_body(b""))
        await busy.write(response_headers())
        await busy.write(response_body())

        assert destination(await call.read())
        await call.write(request_body(b""))
        assert kinds(await answers(call, 3)) == ["request_body"] * 3


@pytest.mark.parametrize("config", [NO_WAIT, DUPLEX, BUFFERED], ids=["no-wait", "duplex", "buffered"])
async def test_held_requests_get_their_pick_when_the_router_is_stopped(config):
    async with crowded() as (router, busy):
        calls = [await held(router, config, already=number) for number in range(3)]

        drain = asyncio.create_task(router.servers.drain(60.0))
        read = [await answers(call, 2) for call in calls]

        assert all(any(destination(each) for each in two) for two in read)
        assert router.held == 0
        assert not drain.done()
        for call in (*calls, busy):
            await call.write(response_headers())
            await call.write(response_body(end=True))
            await call.done_writing()
        await asyncio.wait_for(drain, 30.0)
        assert router.in_flight == 0


class Clockwork:
    """Stands for a picker of which only the deadlines matter; the first is far off."""

    def __init__(self) -> None:
        self.deadline_s: float | None = asyncio.get_running_loop().time() + 3600.0
        self.asked = asyncio.Event()
        self.kept = asyncio.Event()
        self.times_kept = 0
        self.goes_away = True
        self.holding = False
        self.wake = lambda: None

    def on_first_held(self, wake) -> None:
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


async def test_deadlines_are_kept():
    clockwork = Clockwork()
    clockwork.deadline_s = 0.0

    task = asyncio.create_task(keep_deadlines(clockwork))
    await asyncio.wait_for(clockwork.kept.wait(), 10.0)
    task.cancel()


async def test_a_deadline_is_waited_for_and_a_first_held_request_noticed_at_once(monkeypatch):
    monkeypatch.setattr(server, "_DEADLINE_POLL_S", 3600.0)
    clockwork = Clockwork()
    task = asyncio.create_task(keep_deadlines(clockwork))
    await clockwork.asked.wait()

    clockwork.deadline_s = asyncio.get_running_loop().time() + 0.1
    clockwork.wake()
    await asyncio.wait_for(clockwork.kept.wait(), 10.0)
    task.cancel()


async def test_while_requests_are_held_deadlines_that_appear_are_noticed_by_themselves(monkeypatch):
    monkeypatch.setattr(server, "_DEADLINE_POLL_S", 3600.0)
    clockwork = Clockwork()
    clockwork.holding = True
    task = asyncio.create_task(keep_deadlines(clockwork))
    for _ in range(3):
        await clockwork.asked.wait()
        clockwork.kept.clear()
        clockwork.deadline_s = 0.0
        await asyncio.wait_for(clockwork.kept.wait(), 10.0)
    task.cancel()


async def test_a_deadline_that_does_not_go_away_does_not_keep_the_loop_busy(monkeypatch):
    monkeypatch.setattr(server, "_DEADLINE_PAUSE_S", 3600.0)
    monkeypatch.setattr(server, "_DEADLINE_POLL_S", 3600.0)
    clockwork = Clockwork()
    clockwork.deadline_s, clockwork.goes_away = 0.0, False
    task = asyncio.create_task(keep_deadlines(clockwork))
    for _ in range(1000):
        await asyncio.sleep(0)

    assert clockwork.times_kept == 1
    task.cancel()
