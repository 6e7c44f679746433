"""Tests of the gRPC port with a client of grpc-go: streams, flow control, ends and the drain."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from certificates import Authority, write_pair
from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    DUPLEX,
    NO_WAIT,
    chat,
    destination,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from harness.grpc_go import GoClient, GoStream
from harness.stack import PoolMember, Router, pool_document, write_pool
from harness.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.always_picked, pytest.mark.timeout(300)]

METHOD = f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}"
# Nothing listens on these ports, and nothing has to: no Envoy sends the requests to a member.
MEMBERS = [PoolMember(id=f"member-{port}", address="127.0.0.1", port=port) for port in (9, 10)]
BIG = 9_000_000


def started(directory: Path, transport: str, *arguments: str) -> Router:
    pool = write_pool(directory / "pool.json", pool_document(MEMBERS))
    return Router([pool], directory=directory, arguments=("--transport", transport, *arguments))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["h2", "grpc"], name="router")
async def _router(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Router]:
    async with started(tmp_path_factory.mktemp("router"), request.param) as router:
        yield router


def client_of(router: Router, **options: Any) -> GoClient:
    return GoClient(f"127.0.0.1:{router.ports['grpc']}", **options)


def send(stream: GoStream, *messages: wire.ProcessingRequest) -> None:
    stream.send(message.SerializeToString() for message in messages)


async def answer(stream: GoStream) -> wire.ProcessingResponse:
    return wire.ProcessingResponse.FromString(await stream.read())


def is_connected_once(client: GoClient) -> bool:
    """Return whether a client connected and stayed connected. It may not see that it is CONNECTING for a moment."""
    return [state for state in client.states if state != "CONNECTING"] == ["IDLE", "READY"]


async def in_flight(router: Router) -> int:
    return sum(endpoint["in_flight"] for endpoint in (await router.page("qwen")).values())


async def picked(client: GoClient) -> GoStream:
    """Return a stream whose request has a member."""
    stream = client.open(METHOD)
    send(stream, request_headers(NO_WAIT), request_body(chat(model="qwen-model")))
    assert destination(await answer(stream))
    return stream


async def test_many_streams_of_one_connection_get_picks(router: Router) -> None:
    async with client_of(router) as client:
        streams = [client.open(METHOD) for _ in range(500)]
        for number, stream in enumerate(streams):
            send(stream, request_headers(NO_WAIT), request_body(chat(f"{number}", model="qwen-model")))
        for stream in streams:
            assert destination(await answer(stream))
        assert await in_flight(router) == len(streams)
        for stream in streams:
            send(stream, response_headers(), response_body(end=True))
        assert {await stream.code() for stream in streams} == {"OK"}
        assert is_connected_once(client)
    assert await in_flight(router) == 0


async def test_big_body_passes_in_both_directions(router: Router) -> None:
    body = chat("x" * BIG, model="qwen-model")
    async with client_of(router) as client:
        stream = client.open(METHOD)
        pieces = [body[at : at + 1_000_000] for at in range(0, len(body), 1_000_000)]
        send(stream, request_headers(DUPLEX), *(request_body(each, end=False) for each in pieces[:-1]))
        send(stream, request_body(pieces[-1]))
        assert destination(await answer(stream))
        returned = bytearray()
        while len(returned) < len(body):
            returned += (await answer(stream)).request_body.response.body_mutation.streamed_response.body
        assert returned == body
        send(stream, response_headers(), response_body(end=True))
        stream.end()
        assert await stream.code() == "OK"


async def test_cancelled_stream_ends_its_request(router: Router) -> None:
    async with client_of(router) as client:
        stream = await picked(client)
        assert await in_flight(router) == 1
        stream.cancel()
        assert await stream.code() == "Canceled"

        async def ended() -> bool:
            return await in_flight(router) == 0

        await until(ended, "the request has ended")
        assert client.states[-1] == "READY"


async def test_silent_stream_lives_until_its_deadline_by_pings(router: Router) -> None:
    # grpc-go sends its PING after 10 s. Without an answer, the stream would end as Unavailable before its deadline.
    async with client_of(router, ping_s=10.0, pong_s=2.0) as client:
        stream = client.open(METHOD, timeout_s=14.0)
        send(stream, request_headers(NO_WAIT))
        assert await stream.code() == "DeadlineExceeded"
        assert is_connected_once(client)


async def test_unknown_method_is_unimplemented(router: Router) -> None:
    async with client_of(router) as client:
        stream = client.open("/no.Service/Method")
        assert await stream.code() == "Unimplemented"
        assert (await picked(client)).number


@pytest.mark.parametrize("router", ["h2"], indirect=True)
async def test_compressed_message_is_unimplemented(router: Router) -> None:
    async with client_of(router) as client:
        stream = client.open(METHOD, gzip=True)
        send(stream, request_headers(NO_WAIT))
        assert await stream.code() == "Unimplemented"
        assert client.states[-1] == "READY"


@pytest.mark.parametrize("transport", ["h2", "grpc"])
async def test_drain_finishes_an_open_stream_and_takes_no_further_one(tmp_path: Path, transport: str) -> None:
    async with started(tmp_path, transport) as router, client_of(router) as client:
        stream = await picked(client)
        router.terminate()
        # After GOAWAY, grpc-go keeps open streams and would connect anew for the next one.
        await client.reaches("IDLE")
        assert await client.open(METHOD).code() == "Unavailable"
        send(stream, response_headers(), response_body(end=True))
        assert await stream.code() == "OK"
        assert await router.wait() == 0


@pytest.mark.parametrize("transport", ["h2", "grpc"])
async def test_mutual_tls_admits_only_clients_with_a_certificate(tmp_path: Path, transport: str) -> None:
    routers, clients = Authority("routers"), Authority("clients")
    ca, client_ca = tmp_path / "ca.crt", tmp_path / "clients.crt"
    ca.write_bytes(routers.pem)
    client_ca.write_bytes(clients.pem)
    tls = write_pair(tmp_path / "router", routers.pair())
    pair = write_pair(tmp_path / "client", clients.pair("client"))
    arguments = ("--tls", str(tls), "--tls-client-ca", str(client_ca))
    async with started(tmp_path, transport, *arguments) as router:
        async with client_of(router, ca=ca, pair=pair) as client:
            stream = await picked(client)
            send(stream, response_headers(), response_body(end=True))
            assert await stream.code() == "OK"
        async with client_of(router, ca=ca) as client:
            assert await client.open(METHOD).code() == "Unavailable"
        async with client_of(router) as client:
            assert await client.open(METHOD).code() == "Unavailable"
