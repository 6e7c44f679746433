"""Tests of transport security: plain text, self-signed certificates, changed and invalid folders, and client CAs."""

import asyncio
import hashlib
import itertools
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from certificates import Authority, mount_pair, write_pair
from dualmap_extproc.transport.server import health_handler
from dualmap_extproc.transport.tls import Certificates, TlsError, self_signed, server_certificates
from extproc import transports

TAKEN_UP = "Loaded changed certificate files"
REFUSED = "Rejected certificate files, keeping the last valid certificates"


each = pytest.mark.usefixtures("transport")


class Serving:
    """A server with the health service on two ports, like the router."""

    def __init__(self, tls: str | Path, client_ca: Path | None = None) -> None:
        self._certificates = server_certificates(str(tls), client_ca)
        self.health = health_aio.HealthServicer()

    async def __aenter__(self) -> tuple[int, int]:
        assert self._certificates is not None
        self._servers = [transports.server((health_handler(self.health),)) for _ in range(2)]
        ports = []
        for server in self._servers:
            ports.append(await server.bind("127.0.0.1", 0, self._certificates))
            await server.start()
        return ports[0], ports[1]

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            await server.close()


async def handshake(port: int) -> tuple[bytes, str | None]:
    """Connect without verification, like gateways; return the certificate (DER) and the negotiated protocol."""

    def shake() -> tuple[bytes, str | None]:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain) as secure,
        ):
            return secure.getpeercert(binary_form=True) or b"", secure.selected_alpn_protocol()

    return await asyncio.to_thread(shake)


async def shown(port: int) -> bytes:
    """Return the certificate (DER) of a new connection."""
    return (await handshake(port))[0]


def der(pair: tuple[bytes, bytes]) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair[1].decode())


# gRPC shares a connection between channels with equal arguments. A number in the arguments gives each channel its own
# connection.
_numbers = itertools.count()


def channel_to(
    port: int, certificate: bytes, own: tuple[bytes, bytes] | tuple[None, None] = (None, None)
) -> grpc.aio.Channel:
    """Open a connection that trusts ``certificate`` and presents ``own``."""
    credentials = grpc.ssl_channel_credentials(certificate, *own)
    options = [("dualmap.number", next(_numbers))]
    return grpc.aio.secure_channel(f"localhost:{port}", credentials, options=options)


async def check(channel: grpc.aio.Channel) -> str:
    """Check health; return the status, or the code of the failure."""
    async with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "dualmap_extproc.transport.tls"]


def test_tls_off_returns_no_credentials() -> None:
    assert server_certificates("off") is None


def test_tls_off_with_client_ca_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match="--tls-client-ca: requires TLS; also give --tls"):
        server_certificates("off", tmp_path)


@each
async def test_tls_self_signed_serves_http2_but_no_plain_text() -> None:
    async with Serving("self-signed") as ports:
        for port in ports:
            assert (await handshake(port))[1] == "h2"
            assert await check(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) == "UNAVAILABLE"


def test_tls_self_signed_certificates_are_unique() -> None:
    first, second = self_signed(), self_signed()

    assert first[0] != second[0]
    assert hashlib.sha256(first[1]).digest() != hashlib.sha256(second[1]).digest()


@each
async def test_tls_certificate_of_the_folder_is_served_and_verifiable(tmp_path: Path) -> None:
    authority = Authority()
    async with Serving(write_pair(tmp_path, authority.pair())) as ports:
        for port in ports:
            assert await check(channel_to(port, authority.pem)) == "SERVING"
            assert await check(channel_to(port, Authority().pem)) == "UNAVAILABLE"


@each
@pytest.mark.parametrize("kubernetes", [False, True], ids=["renamed", "..data swapped"])
async def test_tls_changed_certificate_is_served_on_every_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kubernetes: bool
) -> None:
    caplog.set_level(logging.INFO)
    pairs = [self_signed() for _ in range(3)]

    def put(version: int) -> Path:
        pair = pairs[version]
        return mount_pair(tmp_path, pair, version=version) if kubernetes else write_pair(tmp_path, pair)

    async with Serving(put(0)) as ports:
        for version, pair in enumerate(pairs):
            put(version)
            for port in (*ports, *ports):
                assert await shown(port) == der(pair)
    assert lines(caplog) == [TAKEN_UP] * 2


@each
async def test_tls_changed_certificate_keeps_open_streams(tmp_path: Path) -> None:
    before, after = Authority(), Authority()
    serving = Serving(write_pair(tmp_path, before.pair()))
    async with serving as ports, channel_to(ports[0], before.pem) as channel:
        statuses = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()).__aiter__()
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.SERVING
        write_pair(tmp_path, after.pair())
        assert await check(channel_to(ports[0], after.pem)) == "SERVING"
        assert await check(channel_to(ports[0], before.pem)) == "UNAVAILABLE"
        await serving.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.NOT_SERVING


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no key": (lambda folder: (folder / "tls.key").unlink(), "tls.key: No such file"),
    "no certificate": (lambda folder: (folder / "tls.crt").unlink(), "tls.crt: No such file"),
    "nonsense": (
        lambda folder: (folder / "tls.crt").write_bytes(b"nonsense"),
        "tls.crt: the file has no PEM certificate",
    ),
    "empty": (lambda folder: (folder / "tls.crt").write_bytes(b""), "tls.crt: the file has no PEM certificate"),
    "empty key": (lambda folder: (folder / "tls.key").write_bytes(b""), "has no valid key"),
    "half a key": (lambda folder: halve(folder / "tls.key"), "has no valid key"),
    "half a certificate": (lambda folder: halve(folder / "tls.crt"), "tls.crt: the file has no PEM certificate"),
    "half a chain": (
        lambda folder: (folder / "tls.crt").write_bytes((folder / "tls.crt").read_bytes() + self_signed()[1][:200]),
        "tls.crt: the file ends in the middle of a certificate",
    ),
    "another's key": (lambda folder: (folder / "tls.key").write_bytes(self_signed()[0]), "is not the key of tls.crt"),
}
spoiled = pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@spoiled
def test_tls_invalid_folder_raises_an_error_with_the_reason(
    tmp_path: Path, spoil: Callable[[Path], Any], reason: str
) -> None:
    spoil(write_pair(tmp_path, self_signed()))

    with pytest.raises(TlsError, match=reason):
        server_certificates(str(tmp_path))


@each
@spoiled
async def test_tls_keeps_last_certificate_if_the_folder_becomes_invalid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], Any], reason: str
) -> None:
    caplog.set_level(logging.INFO)
    good, better = self_signed(), self_signed()
    async with Serving(write_pair(tmp_path, good)) as ports:
        spoil(tmp_path)
        for port in ports * 3:
            assert await shown(port) == der(good)
        assert lines(caplog) == [REFUSED]
        assert reason in caplog.records[-1].__dict__["details"]["reason"]
        write_pair(tmp_path, better)
        for port in ports:
            assert await shown(port) == der(better)
    assert lines(caplog) == [REFUSED, TAKEN_UP]


def test_tls_folder_that_becomes_invalid_again_is_logged_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = self_signed()
    certificates = Certificates(write_pair(tmp_path, pair), None)
    for _ in range(2):
        halve(tmp_path / "tls.crt")
        certificates.current()
        certificates.current()
        write_pair(tmp_path, pair)
        certificates.current()

    assert lines(caplog) == [REFUSED] * 2


def test_tls_does_not_reload_unchanged_files(tmp_path: Path) -> None:
    certificates = Certificates(write_pair(tmp_path, self_signed()), None)
    before = certificates.current()
    (tmp_path / "tls.crt").touch()

    assert certificates.current() is before


@pytest.mark.parametrize("given", ["on", "/nonexistent", __file__])
def test_tls_unknown_value_raises_an_error_with_the_choices(given: str) -> None:
    with pytest.raises(TlsError, match=f"--tls: '{given}' is not accepted; give off, self-signed, or a folder"):
        server_certificates(given)


@each
@pytest.mark.parametrize("tls", ["self-signed", "folder"])
async def test_tls_client_ca_accepts_only_its_clients(tmp_path: Path, tls: str) -> None:
    theirs, strangers = Authority(), Authority()
    client_ca = tmp_path / "clients.crt"
    client_ca.write_bytes(theirs.pem)
    folder = write_pair(tmp_path, self_signed())
    async with Serving(folder if tls == "folder" else tls, client_ca) as ports:
        for port in ports:
            trusted = ssl.DER_cert_to_PEM_cert(await shown(port)).encode()
            assert await check(channel_to(port, trusted, theirs.pair())) == "SERVING"
            assert await check(channel_to(port, trusted, strangers.pair())) == "UNAVAILABLE"
            assert await check(channel_to(port, trusted, self_signed())) == "UNAVAILABLE"
            assert await check(channel_to(port, trusted)) == "UNAVAILABLE"
            assert await check(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) == "UNAVAILABLE"


@each
async def test_tls_changed_client_ca_is_loaded_only_if_valid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, second = Authority(), Authority()
    client_ca = tmp_path / "clients.crt"
    client_ca.write_bytes(first.pem)
    pair = self_signed()
    async with Serving(write_pair(tmp_path, pair), client_ca) as ports:

        async def answers(authority: Authority) -> list[str]:
            return [await check(channel_to(port, pair[1], authority.pair())) for port in ports]

        assert await answers(first) == ["SERVING"] * 2
        assert await answers(second) == ["UNAVAILABLE"] * 2
        client_ca.write_bytes(second.pem[:-100])
        assert await answers(first) == ["SERVING"] * 2
        client_ca.write_bytes(first.pem + second.pem)
        assert await answers(first) + await answers(second) == ["SERVING"] * 4
        client_ca.write_bytes(second.pem)
        assert await answers(first) == ["UNAVAILABLE"] * 2
        assert await answers(second) == ["SERVING"] * 2
    assert lines(caplog) == [REFUSED, TAKEN_UP, TAKEN_UP]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "clients.crt: No such file"),
        (b"nonsense", "--tls-client-ca: the file has no PEM certificate"),
        (Authority().pem + Authority().pem[:200], "--tls-client-ca: the file ends in the middle of a certificate"),
    ],
)
def test_tls_invalid_client_ca_raises_an_error_with_the_reason(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "clients.crt").write_bytes(content)

    with pytest.raises(TlsError, match=reason):
        server_certificates("self-signed", tmp_path / "clients.crt")
