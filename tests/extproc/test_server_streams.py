"""Tests of the gRPC server with a real client: streams from their headers to each kind of end, and the ports."""

import asyncio
import random

import grpc
import grpc.aio
import pytest

from dualmap_edge.ports import AddressError
from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.request.observations import Decided
from dualmap_extproc.settings import Limits
from dualmap_extproc.transport.server import ALS_MESSAGE_BYTES, HEALTH_MESSAGE_BYTES, GrpcServers
from extproc import grpc_routers
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    NO_WAIT,
    chat,
    destination,
    kinds,
    refused_with,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from extproc.grpc_routers import answers, running
from extproc.transports import selected

pytestmark = pytest.mark.usefixtures("transport")

# This imports a fixture, which pytest finds by its name in this module.
router = grpc_routers.router


async def test_server_serves_a_request_up_to_its_first_response_chunk(router):
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
    assert router.observer.of(Decided)[0].seconds > 0


async def test_server_answers_a_burst_above_the_grpc_stream_default(router):
    calls = [router.stream() for _ in range(2000)]
    for call in calls:
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(chat()))
    for call in calls:
        (pick, _) = await answers(call, 2)
        assert destination(pick)
        call.cancel()


@pytest.mark.parametrize(("size", "status"), [(12_000_000, None), (17_000_000, 413), (40_000_000, 413)])
async def test_server_rejects_a_body_above_the_limit(router, size, status):
    call = router.stream()
    await call.write(request_headers(BUFFERED))
    await call.write(request_body(chat("x" * size)))
    (_, answer) = await answers(call, 2)

    assert destination(answer) if status is None else refused_with([answer]) == status


async def _code_of(port: int, size: int) -> grpc.StatusCode:
    """Return how a call ends whose request is a message of ``size`` bytes to the service of ``_echo``."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=grpc_routers.UNLIMITED) as channel:
        call = channel.unary_unary("/test.Echo/Length")(b"x" * size)
        return await call.code()


def _echo() -> grpc.GenericRpcHandler:
    async def length(request: bytes, _: object) -> bytes:
        return str(len(request)).encode()

    return grpc.method_handlers_generic_handler("test.Echo", {"Length": grpc.unary_unary_rpc_method_handler(length)})


async def test_server_ports_accept_only_messages_that_they_need(router):
    echo = (_echo(),)
    servers = GrpcServers(
        router.processor, services=echo, plain=echo, access_log=echo, limits=Limits(), transport=selected()
    )
    ports = await servers.start("127.0.0.1", grpc_port=0, health_port=0, als_port=0, certificates=None)
    try:
        largest = {ports.grpc: 40 * 1024 * 1024, ports.als: ALS_MESSAGE_BYTES, ports.health: HEALTH_MESSAGE_BYTES}
        for port, size in largest.items():
            assert await _code_of(port, size) is grpc.StatusCode.OK
            assert await _code_of(port, size + 1) is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        await servers.close()


async def test_server_ends_the_request_of_a_cancelled_stream(router):
    call = router.stream()
    await call.write(request_headers(NO_WAIT))
    await call.write(request_body(chat()))
    await answers(call, 2)
    assert router.in_flight == 1

    call.cancel()
    await router.processor.idle()

    assert router.in_flight == 0
    assert router.observer.names()[-1] == "aborted"


async def test_server_half_closed_stream_ends_cleanly(router):
    call = router.stream()
    await call.write(request_headers(DUPLEX))
    await call.write(request_body(chat()))
    await answers(call, 2)
    await call.done_writing()

    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert router.in_flight == 0


async def test_server_invalid_protobuf_ends_only_its_stream(router, caplog):
    method = router.channel.stream_stream(f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}")
    call = method()
    await call.write(request_headers(NO_WAIT).SerializeToString())
    await call.write(b"\xff\xff\xff")

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Unexpected" not in caplog.text
    await test_server_serves_a_request_up_to_its_first_response_chunk(router)


async def test_server_routes_a_complete_body_after_silence(router):
    call = router.stream()
    await call.write(request_headers(NO_WAIT, content_length=str(len(chat()))))
    await call.write(request_body(chat(), end=False))
    pick, _ = await answers(call, 2)
    await call.write(request_body(b""))
    (late,) = await answers(call, 1)

    assert destination(pick)
    assert kinds([late]) == ["request_body"]


async def test_server_rejects_an_invalid_body_after_a_pause():
    async with running(limits=Limits(pause_s=0.2)) as router:
        call = router.stream()
        await call.write(request_headers(NO_WAIT))
        # The pause lets the headers' deadline pass after the body has postponed it.
        await asyncio.sleep(0.05)
        await call.write(request_body(b"[1,", end=False))
        assert refused_with(await answers(call, 1)) == 400


async def test_server_rejects_a_stalled_body():
    async with running(limits=Limits(pause_s=0.1, stalled_s=0.3)) as router:
        call = router.stream()
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(b'{"model"', end=False))
        assert refused_with(await answers(call, 1)) == 400


async def test_server_ends_requests_of_streams_cut_at_any_point(router, caplog):
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


async def test_server_answers_hundreds_of_open_streams(router):
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


async def test_server_with_port_in_use_raises_an_error_with_the_port(router):
    other = GrpcServers(router.processor, services=(), access_log=(), limits=Limits(), transport=selected())

    with pytest.raises(AddressError, match=f"127.0.0.1:{router.ports.grpc}"):
        await other.start("127.0.0.1", grpc_port=router.ports.grpc, health_port=0, als_port=0, certificates=None)
