"""Tests of the gRPC server with a real client: its health service, and the end of open streams in a drain."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap_extproc.names import EXT_PROC_SERVICE
from dualmap_extproc.transport import server
from extproc import grpc_routers
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    NO_WAIT,
    chat,
    destination,
    kinds,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from extproc.grpc_routers import NOT_SERVING, SERVING, Running, answers, crowded, held, running
from waiting import WAIT_S, until

pytestmark = pytest.mark.usefixtures("transport")

# This imports a fixture, which pytest finds by its name in this module.
router = grpc_routers.router


async def test_health_service_reports_liveness_and_readiness():
    async with running(ready=False) as router:
        before = [await router.health(name) for name in ("liveness", "readiness", "", EXT_PROC_SERVICE)]
        await router.servers.ready()
        after = [await router.health(name) for name in ("liveness", "readiness", "", EXT_PROC_SERVICE)]

        assert before == [SERVING, NOT_SERVING, NOT_SERVING, NOT_SERVING]
        assert after == [SERVING] * 4
        on_grpc_port = await health_pb2_grpc.HealthStub(router.channel).Check(health_pb2.HealthCheckRequest())
        assert on_grpc_port.status == SERVING


async def test_health_of_an_unknown_service_is_unknown_on_both_ports(router):
    unknown = health_pb2.HealthCheckRequest(service="something else")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.ports.health}") as health_port:
        for channel in (router.channel, health_port):
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(unknown)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            watch.cancel()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(unknown)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_of_shared_probe_name_is_readiness_then_liveness(monkeypatch):
    """The charts of other pickers use one name for both probes."""
    monkeypatch.setattr(server, "SHARED_PROBE_WAIT_S", 0.1)
    async with running(ready=False) as router:
        assert await router.health("inference-extension") == NOT_SERVING

        async def alive():
            return await router.health("inference-extension") == SERVING

        await until(alive)
        assert await router.health("readiness") == NOT_SERVING
        await router.servers.ready()
        assert await router.health("inference-extension") == SERVING


async def test_health_of_shared_probe_name_is_serving_when_ready():
    async with running(ready=False) as router:
        await router.servers.ready()
        assert await router.health("inference-extension") == SERVING
        shared = health_pb2.HealthCheckRequest(service="inference-extension")
        watch = health_pb2_grpc.HealthStub(router.channel).Watch(shared)
        assert (await watch.read()).status == SERVING
        drain = asyncio.create_task(router.servers.drain(20.0))
        assert (await watch.read()).status == NOT_SERVING
        await drain


async def test_health_port_serves_only_the_health_service(router):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.ports.health}") as channel:
        call = router.stream(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_drain_finishes_a_half_read_request(router):
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
    await asyncio.wait_for(drain, WAIT_S)


async def test_drain_ends_the_access_log_after_the_last_request(router):
    call = router.stream()
    await call.write(request_headers(NO_WAIT))
    await call.write(request_body(chat()))
    await answers(call, 2)
    ended: list[int] = []

    async def end() -> None:
        ended.append(router.processor.open_requests)

    drain = asyncio.create_task(router.servers.drain(20.0, before_close=end))
    await asyncio.sleep(server.NOTICE_S + 0.3)
    assert not ended
    await call.done_writing()
    await asyncio.wait_for(drain, WAIT_S)
    assert ended == [0]


async def test_drain_keeps_open_streams_until_what_ends_before_has_ended(router, monkeypatch):
    monkeypatch.setattr(server, "NOTICE_S", 0.1)
    ending, ended = asyncio.Event(), asyncio.Event()

    async def end() -> None:
        ending.set()
        await ended.wait()

    watch = health_pb2_grpc.HealthStub(router.channel).Watch(health_pb2.HealthCheckRequest(service="liveness"))
    assert (await watch.read()).status == SERVING
    drain = asyncio.create_task(router.servers.drain(20.0, before_close=end))
    await asyncio.wait_for(ending.wait(), WAIT_S)
    await asyncio.wait((drain,), timeout=2 * server._FLUSH_S)
    assert not drain.done()
    assert not watch.done()
    ended.set()
    await asyncio.wait_for(drain, WAIT_S)


async def test_drain_notice_period_serves_new_streams_while_not_ready(router, monkeypatch):
    """Clients that poll the health service must receive the change before the server rejects a call."""
    assert server.NOTICE_S >= 0.5
    monkeypatch.setattr(server, "NOTICE_S", 600.0)
    monkeypatch.setattr(server, "NOTICE_MAX_S", 600.0)
    watch = health_pb2_grpc.HealthStub(router.channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await watch.read()).status == SERVING

    drain = asyncio.create_task(router.servers.drain(1200.0))
    assert (await watch.read()).status == NOT_SERVING
    for _ in range(20):
        # The calls use new connections, because an open connection may outlive the port.
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


async def begun_streams(router: Running, *, for_s: float) -> None:
    """Begin a stream every 20 ms, each on a new connection; fail if a stream is not answered."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + for_s
    while loop.time() < until_s:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.ports.grpc}") as channel:
            call = router.stream(channel)
            await call.write(request_headers(NO_WAIT))
            await call.write(request_body(chat()))
            assert destination((await answers(call, 2))[0])
            await call.done_writing()
        await asyncio.sleep(0.02)


async def test_drain_serves_new_streams_until_none_begins(router, monkeypatch):
    """An Envoy on a busy machine may check the health later than its interval says."""
    # On a busy machine, the pause between two streams may last a second.
    monkeypatch.setattr(server, "NOTICE_S", 2.0)
    monkeypatch.setattr(server, "NOTICE_MAX_S", 600.0)

    drain = asyncio.create_task(router.servers.drain(1200.0))
    await begun_streams(router, for_s=4.0)

    await asyncio.wait_for(drain, WAIT_S)


async def test_drain_rejects_new_streams_after_the_longest_notice_period(router, monkeypatch):
    """A client without health checks must not delay the drain."""
    monkeypatch.setattr(server, "NOTICE_MAX_S", 0.6)

    drain = asyncio.create_task(router.servers.drain(20.0))
    with pytest.raises(grpc.aio.AioRpcError):
        await asyncio.wait_for(begun_streams(router, for_s=600.0), WAIT_S)

    await asyncio.wait_for(drain, WAIT_S)


async def refusal(port: int) -> None:
    """Check the health on new connections until the port refuses a connection."""
    while True:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError as error:
                # The server cancels a call that arrives during the closing of the port; later calls find no server.
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return


async def test_drain_after_notice_period_rejects_only_new_streams(router, monkeypatch):
    monkeypatch.setattr("dualmap_extproc.transport.server.NOTICE_S", 0.0)
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
    await asyncio.wait_for(drain, WAIT_S)


async def test_drain_of_idle_router_ignores_open_health_watches(router):
    watch = health_pb2_grpc.HealthStub(router.channel).Watch(health_pb2.HealthCheckRequest())
    await watch.read()

    # The limit is far below the timeout, because the drain waits only for the notice period.
    await asyncio.wait_for(router.servers.drain(600.0), WAIT_S)


async def test_drain_timeout_cuts_open_streams(router):
    call = router.stream()
    await call.write(request_headers(DUPLEX))
    await call.write(request_body(chat()))
    await answers(call, 2)

    await asyncio.wait_for(router.servers.drain(0.6), WAIT_S)
    await router.processor.idle()

    assert router.in_flight == 0


async def test_drain_timeout_while_streams_end_does_not_crash(monkeypatch):
    """Two overlapping stops of a grpc.aio server crash the process if the first stop's grace period ends."""
    monkeypatch.setattr("dualmap_extproc.transport.server.NOTICE_S", 0.0)
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
        await asyncio.wait_for(drain, WAIT_S)
        return codes


async def test_drain_end_sends_the_status_of_the_last_call(monkeypatch):
    """Envoy treats a cancelled call as failed and aborts the call's response."""
    monkeypatch.setattr("dualmap_extproc.transport.server.NOTICE_S", 0.0)
    for _ in range(20):
        assert set(await codes_of_calls_that_end_with_the_drain()) == {grpc.StatusCode.OK}


@pytest.mark.parametrize("config", [NO_WAIT, DUPLEX, BUFFERED], ids=["no-wait", "duplex", "buffered"])
async def test_drain_dispatches_queued_requests(config):
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
        await asyncio.wait_for(drain, WAIT_S)
        assert router.in_flight == 0
