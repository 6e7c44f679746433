"""Transport security: plain text, self-signed, a folder that changes, and folders that are no good."""

import asyncio
import hashlib
import os
import socket
import ssl
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from dualmap_extproc.tls import CertificateFiles, TlsError, self_signed, server_credentials


class Serving:
    """A gRPC server with health behind the given ``--tls``."""

    def __init__(self, tls: str) -> None:
        self._tls = tls

    async def __aenter__(self) -> int:
        self._server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), self._server)
        credentials = server_credentials(self._tls)
        assert credentials is not None
        port = self._server.add_secure_port("127.0.0.1:0", credentials)
        await self._server.start()
        return port

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


def handshake(port: int) -> tuple[bytes, str | None]:
    """Shake hands without verifying, as gateways do; return the certificate (DER) and the protocol agreed on."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain) as secure,
    ):
        return secure.getpeercert(binary_form=True) or b"", secure.selected_alpn_protocol()


def write(folder: Path, pair: tuple[bytes, bytes], stamp_ns: int) -> bytes:
    """Put a pair into a folder, dated so that it counts as changed; return the certificate as DER."""
    for name, content in zip(("tls.key", "tls.crt"), pair, strict=True):
        (folder / name).write_bytes(content)
        os.utime(folder / name, ns=(stamp_ns, stamp_ns))
    return ssl.PEM_cert_to_DER_cert(pair[1].decode())


async def check(port: int, certificate: bytes) -> int:
    """Ask for health over TLS, trusting ``certificate`` (PEM)."""
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate)
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
        return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


def test_off_is_plain_text():
    assert server_credentials("off") is None


async def test_self_signed_speaks_http2_and_refuses_plain_text():
    async with Serving("self-signed") as port:
        _, protocol = await asyncio.to_thread(handshake, port)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)

    assert protocol == "h2"
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_every_self_signed_pair_is_its_own():
    first, second = self_signed(), self_signed()

    assert first[0] != second[0]
    assert hashlib.sha256(first[1]).digest() != hashlib.sha256(second[1]).digest()


async def test_a_folders_certificate_is_served_and_a_client_can_verify_it(tmp_path):
    pair = self_signed()
    write(tmp_path, pair, 1)

    async with Serving(str(tmp_path)) as port:
        assert await check(port, pair[1]) == health_pb2.HealthCheckResponse.SERVING


async def test_a_changed_certificate_is_served_to_the_next_connection(tmp_path):
    before = write(tmp_path, self_signed(), 1)
    async with Serving(str(tmp_path)) as port:
        first, _ = await asyncio.to_thread(handshake, port)
        after = write(tmp_path, self_signed(), 2)
        second, _ = await asyncio.to_thread(handshake, port)
        (tmp_path / "tls.crt").write_bytes(b"broken")
        third, _ = await asyncio.to_thread(handshake, port)

    assert [first, second, third] == [before, after, after]


def test_an_unchanged_folder_is_not_read_again(tmp_path):
    write(tmp_path, self_signed(), 1)
    files = CertificateFiles(tmp_path)
    files.read()

    assert files.changed() is None


@pytest.mark.parametrize("given", ["on", "/nonexistent", __file__])
def test_what_is_no_folder_is_refused_with_what_is_accepted(given):
    with pytest.raises(TlsError, match=f"--tls: '{given}' is not accepted; give off, self-signed, or a folder"):
        server_credentials(given)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "tls.key").unlink(), "tls.key: No such file"),
        (lambda folder: (folder / "tls.crt").unlink(), "tls.crt: No such file"),
        (lambda folder: (folder / "tls.crt").write_bytes(b"nonsense"), "no PEM pair"),
        (lambda folder: (folder / "tls.key").write_bytes(b""), "no PEM pair"),
        (lambda folder: (folder / "tls.key").write_bytes(self_signed()[0]), "tls.key: is not the key of"),
    ],
)
def test_a_folder_that_is_no_good_says_why(tmp_path, spoil, reason):
    write(tmp_path, self_signed(), 1)
    spoil(tmp_path)

    with pytest.raises(TlsError, match=reason):
        server_credentials(str(tmp_path))
