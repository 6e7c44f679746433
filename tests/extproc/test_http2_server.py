"""Tests of the HTTP/2 server's sockets: TLS, limits of connections and memory, services for grpc.aio, and the drain."""

import asyncio
import contextlib
import errno
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import grpc
import grpc.aio
import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry

from certificates import Authority, write_pair
from dualmap_extproc.telemetry.transport import TransportMetrics
from dualmap_extproc.transport import http2_server
from dualmap_extproc.transport.grpc_server import GrpcServer
from dualmap_extproc.transport.http2 import frames
from dualmap_extproc.transport.http2.limits import Http2Limits
from dualmap_extproc.transport.http2_server import Http2Server
from dualmap_extproc.transport.http2_services import Methods
from dualmap_extproc.transport.tls import Certificates, server_certificates
from dualmap_extproc.wire.peer import peer_of
from extproc.http2_client import REQUEST, data, frame, headers, message
from waiting import WAIT_S, until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")

FLOOD = 20_000


class Service:
    """A gRPC service with a method of each kind that the router's services have."""

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.read = asyncio.Event()
        self.sent = 0

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "test.Service",
            {
                "Echo": grpc.unary_unary_rpc_method_handler(self._echo),
                "Fail": grpc.unary_unary_rpc_method_handler(self._fail),
                "Abort": grpc.unary_unary_rpc_method_handler(self._abort),
                "Read": grpc.stream_unary_rpc_method_handler(self._read),
                "Count": grpc.unary_stream_rpc_method_handler(self._count),
                "Talk": grpc.stream_stream_rpc_method_handler(self._talk),
            },
        )

    async def _echo(self, request: bytes, context) -> bytes:
        self.peers.append(peer_of(context))
        return request

    async def _fail(self, request: bytes, context) -> bytes:
        raise ValueError("the text of a prompt")

    async def _abort(self, request: bytes, context) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, request.decode())

    async def _read(self, requests, context) -> bytes:
        await self.read.wait()
        return str(sum([len(each) async for each in requests])).encode()

    async def _count(self, request: bytes, context) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            self.sent += 1
            yield b"x" * 100_000

    async def _talk(self, requests, context) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)


@asynccontextmanager
async def serving(
    service: Service, certificates: Certificates | None = None, **options
) -> AsyncIterator[tuple[Http2Server, int]]:
    handlers = (service.handler(),)
    server = Http2Server(lambda client: Methods({}, handlers, client), Http2Limits(), **options)
    port = await server.bind("127.0.0.1", 0, certificates)
    await server.start()
    try:
        yield server, port
    finally:
        await server.close()


def channel_to(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


def everything_in(caplog) -> str:
    """Return all attributes of all log records, since the formatters write more of them than ``caplog.text`` has."""
    return str([vars(each) for each in caplog.records])


async def opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection without TLS, and wait for the server's first bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE)
    assert await reader.read(9)
    return reader, writer


async def test_services_of_each_kind_answer():
    service = Service()
    service.read.set()
    async with serving(service) as (_, port), channel_to(port) as channel:
        assert await channel.unary_unary("/test.Service/Echo")(b"hello") == b"hello"
        assert [len(each) async for each in channel.unary_stream("/test.Service/Count")(b"3")] == [100_000] * 3

        async def requests() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b"12"

        assert await channel.stream_unary("/test.Service/Read")(requests()) == b"10"
        talk = channel.stream_stream("/test.Service/Talk")()
        await talk.write(b"a" * 3_000_000)
        assert len(await talk.read()) == 3_000_000
        await talk.done_writing()
        assert await talk.read() is grpc.aio.EOF
    assert service.peers == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("method", "code", "details"),
    [
        ("Abort", grpc.StatusCode.NOT_FOUND, "nötig"),
        ("Fail", grpc.StatusCode.UNKNOWN, "Unexpected ValueError"),
        ("Unknown", grpc.StatusCode.UNIMPLEMENTED, None),
    ],
)
async def test_service_error_ends_only_its_call(method, code, details, caplog):
    async with serving(Service()) as (_, port), channel_to(port) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/test.Service/{method}")("nötig".encode())
        assert caught.value.code() is code
        assert details is None or caught.value.details() == details
        assert await channel.unary_unary("/test.Service/Echo")(b"hello") == b"hello"
    assert "prompt" not in everything_in(caplog)


async def test_error_of_a_method_is_logged_without_its_text(caplog):
    def begin(call):
        raise ValueError("the text of a prompt")

    server = Http2Server(lambda _: {b"/test.Service/Begin": begin}, Http2Limits())
    port = await server.bind("127.0.0.1", 0, None)
    await server.start()
    async with channel_to(port) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/test.Service/Begin")(b"")
    await server.close()
    logged = everything_in(caplog)
    assert "Unexpected error in a call" in logged
    assert "test_http2_server.py" in logged
    assert "prompt" not in logged


async def test_service_stops_sending_to_a_client_that_does_not_read():
    service = Service()
    async with serving(service) as (_, port), channel_to(port) as channel:
        call = channel.unary_stream("/test.Service/Count")(b"1000")
        await call.read()
        before = -1
        while service.sent > before:
            before = service.sent
            await asyncio.sleep(0.3)
        assert service.sent < 1000
        call.cancel()


async def test_messages_that_a_call_does_not_read_stop_its_connection():
    service = Service()
    async with serving(service) as (server, port), channel_to(port) as channel:
        call = channel.stream_unary("/test.Service/Read")()

        async def write() -> None:
            for _ in range(1000):
                await call.write(b"x" * 100_000)
            await call.done_writing()

        writing = asyncio.create_task(write())
        await until(lambda: bool(server._connections))
        (connection,) = server._connections
        await until(lambda: connection._unread_bytes > http2_server.UNREAD_BYTES)
        await asyncio.sleep(0.3)
        # One read of the socket may follow, and messages that had arrived with it.
        assert connection._unread_bytes <= http2_server.UNREAD_BYTES + 2 * http2_server.READ_BYTES
        assert not writing.done()
        service.read.set()
        assert await call == b"100000000"
        await writing


async def test_unread_messages_of_a_call_that_is_reset_at_once_are_not_counted():
    service = Service()
    async with serving(service) as (server, port):
        _, writer = await opened(port)
        (connection,) = server._connections
        await until(lambda: connection._http2._settled)
        begun = headers(1, {**dict(REQUEST), b":path": b"/test.Service/Read"}.items()) + data(1, message(bytes(1000)))
        connection._http2.receive(0.0, begun)
        assert connection._unread_bytes == 1000
        connection._http2.receive(0.0, frames.rst_stream(1, frames.ErrorCode.CANCEL))
        await until(lambda: connection._unread_bytes == 0)
        writer.close()


async def test_client_that_resets_at_once_is_forgotten(caplog):
    async with serving(Service()) as (server, port), channel_to(port) as channel:
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert await channel.unary_unary("/test.Service/Echo")(b"hello") == b"hello"
        assert server.connections == 1
    assert not caplog.records


@pytest.mark.parametrize("turns", range(6))
async def test_close_leaves_no_socket_of_a_new_connection(turns: int):
    """A socket that stays open is a ResourceWarning, which is an error."""
    server = Http2Server(lambda _: {}, Http2Limits())
    port = await server.bind("127.0.0.1", 0, None)
    await server.start()
    with socket.create_connection(("127.0.0.1", port)) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        client.setblocking(False)
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 100), WAIT_S)


async def test_server_without_free_file_descriptors_accepts_later(monkeypatch, caplog):
    server = Http2Server(lambda _: {}, Http2Limits())
    port = await server.bind("127.0.0.1", 0, None)
    refused = []

    def accept(listener: socket.socket) -> tuple[int, object]:
        refused.append(listener)
        if len(refused) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return accepted(listener)

    accepted = socket.socket._accept
    monkeypatch.setattr(socket.socket, "_accept", accept)
    await server.start()
    with socket.create_connection(("127.0.0.1", port)):
        await until(lambda: server.connections == 1)
        await server.close()
    assert "Cannot accept a connection" in caplog.text


async def test_client_that_reads_nothing_is_not_read_and_is_disconnected():
    async with serving(Service()) as (server, port):
        plain = socket.create_connection(("127.0.0.1", port))
        plain.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(plain, PREFACE)
        await until(lambda: bool(server._connections))
        (connection,) = server._connections
        connection._transport.write(b"\x00" * 20_000_000)
        assert connection._paused
        assert not connection._transport.is_reading()
        plain.close()
        await until(lambda: not server._connections)


async def test_connections_above_the_limit_are_closed(caplog):
    async with serving(Service(), connections_max=2) as (server, port):
        first, second = await opened(port), await opened(port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        assert server.connections == 2
        assert [each.message for each in caplog.records] == ["Closing connections above the limit"]
        first[1].close()
        await until(lambda: server.connections == 1)
        third = await opened(port)
        for _, other in (second, third, (reader, writer)):
            other.close()


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (frames.ping(bytes(8)) * FLOOD, "control_frames"),
        (b"".join(headers(2 * number + 1, without=b":path") for number in range(FLOOD)), "resets"),
        (frame(frames.HEADERS, 0, 1) + frame(frames.CONTINUATION, 0, 1) * FLOOD, "header_bytes"),
        (headers(1, [(b"a" * 60, b"b" * 60)] * 120), "compression_error"),
        (b"GET / HTTP/1.1\r\n\r\n" * FLOOD, "frame_size_error"),
    ],
    ids=["PING", "resets", "CONTINUATION", "header list", "no frames"],
)
async def test_attack_ends_its_connection_and_no_other(attack, reason):
    registry = CollectorRegistry()
    async with serving(Service()) as (server, port), channel_to(port) as channel:
        TransportMetrics(registry).show(server)
        assert registry.get_sample_value("dualmap_http2_goaways_total", {"reason": reason}) == 0
        talk = channel.stream_stream("/test.Service/Talk")()
        await talk.write(b"before")
        assert await talk.read() == b"before"
        reader, writer = await opened(port)
        # The server reads no more once it has ended the connection.
        with contextlib.suppress(ConnectionError):
            writer.write(attack)
            while await asyncio.wait_for(reader.read(100_000), WAIT_S):
                pass
        await until(lambda: server.connections == 1)
        writer.close()
        await talk.write(b"after")
        assert await talk.read() == b"after"
        assert registry.get_sample_value("dualmap_http2_goaways_total", {"reason": reason}) == 1
        assert server.goaways == {reason: 1}
        assert registry.get_sample_value("dualmap_http2_connections") == 1
        await talk.done_writing()


def tls_context(*protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)], ids=["none", "http/1.1"])
async def test_client_without_alpn_h2_is_disconnected(protocols):
    certificates = server_certificates("self-signed")
    async with serving(Service(), certificates) as (server, port):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls_context(*protocols))
            assert await reader.read() == b""
            writer.close()
        except ConnectionError:
            pass
        assert server.connections == 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls_context("h2"))
        writer.write(PREFACE)
        assert await reader.read(9)
        writer.close()


async def test_handshake_that_takes_too_long_is_cut(monkeypatch):
    monkeypatch.setattr(http2_server, "HANDSHAKE_S", 0.2)
    async with serving(Service(), server_certificates("self-signed")) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        await until(lambda: not server._opening)
        writer.close()


@pytest.mark.parametrize(
    "names",
    [
        (x509.DNSName("envoy"), x509.UniformResourceIdentifier("spiffe://a/b"), x509.DNSName("*.gateways")),
        (x509.IPAddress(ip_address("10.0.0.1")), x509.IPAddress(ip_address("fd00::1")), x509.RFC822Name("a@b")),
        (),
    ],
    ids=["names", "addresses", "common name"],
)
async def test_identity_of_a_client_is_equal_on_both_transports(tmp_path, names):
    """The access log arrives on a port of grpc.aio, and must have the identity of the requests' sender."""
    authority = Authority()
    client_ca = tmp_path / "ca.crt"
    client_ca.write_bytes(authority.pem)
    own = authority.pair("routers")
    certificates = server_certificates(str(write_pair(tmp_path / "tls", own)), client_ca)
    assert certificates is not None
    service = Service()
    other = GrpcServer((service.handler(),), message_bytes=1000)
    other_port = await other.bind("127.0.0.1", 0, certificates)
    await other.start()
    client = authority.pair_of("client", names)
    credentials = grpc.ssl_channel_credentials(authority.pem, *client)
    options = [("grpc.ssl_target_name_override", "routers")]
    async with serving(service, certificates) as (_, port):
        for each in (port, other_port):
            async with grpc.aio.secure_channel(f"127.0.0.1:{each}", credentials, options=options) as channel:
                await channel.unary_unary("/test.Service/Echo")(b"")
    await other.close()
    first, second = service.peers
    assert first == second
    assert first.startswith("certificate ")


async def test_drain_finishes_open_calls_and_accepts_no_further_ones():
    service = Service()
    async with serving(service) as (server, port), channel_to(port) as channel:
        talk = channel.stream_stream("/test.Service/Talk")()
        await talk.write(b"before")
        assert await talk.read() == b"before"
        drain = asyncio.create_task(server.drain())
        await until(lambda: server.goaways == {"drain": 1})
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await talk.write(b"after")
        assert await talk.read() == b"after"
        assert not drain.done()
        await talk.done_writing()
        assert await talk.code() is grpc.StatusCode.OK
        await asyncio.wait_for(drain, 30)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_wildcard_address_listens_on_both_ip_versions(host):
    server = Http2Server(lambda client: {}, Http2Limits())
    port = await server.bind(host, 0, None)
    await server.start()
    try:
        for address in ("127.0.0.1", *(("::1",) if socket.has_dualstack_ipv6() else ())):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
    finally:
        await server.close()
