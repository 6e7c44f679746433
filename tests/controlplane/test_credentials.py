"""The contents of generated Secrets: what is kept, what is replaced and when, and who accepts the certificates."""

import datetime
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from dualmap_operator.act import credentials
from dualmap_operator.act.credentials import AUTHORITY_LIFETIME, CERTIFICATE_LIFETIME, Content
from dualmap_operator.settings import SecretKind

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
NAMES = ["dualmap-router", "dualmap-router.system.svc"]


def server(signer: Content, now: datetime.datetime = NOW, content: Content | None = None) -> Content:
    return credentials.certificate(content or {}, signer, SecretKind.SERVER, NAMES, now)


def client(signer: Content) -> Content:
    return credentials.certificate({}, signer, SecretKind.CLIENT, ["gateway"], NOW)


@pytest.fixture(name="authority", scope="module")
def _authority() -> Content:
    return credentials.authority({}, NOW)


def handshake(folder: Path, serving: Content, asking: Content) -> str:
    """Shake hands with mutual TLS; return the server's failure, else the client's, else ""."""
    for name, content in (("server", serving), ("client", asking)):
        (folder / name).mkdir()
        for key, value in content.items():
            (folder / name / key).write_bytes(value)
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    connecting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    accepting.verify_mode = ssl.CERT_REQUIRED
    for context, name in ((accepting, "server"), (connecting, "client")):
        context.load_cert_chain(folder / name / "tls.crt", folder / name / "tls.key")
        context.load_verify_locations(folder / name / "ca.crt")
    one, other = socket.socketpair()
    failures: list[str] = []

    def accept() -> None:
        try:
            with one, accepting.wrap_socket(one, server_side=True) as secure:
                secure.recv(1)
        except OSError as error:
            failures.insert(0, str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with other, connecting.wrap_socket(other, server_hostname=NAMES[1]) as secure:
            secure.sendall(b"x")
            secure.recv(1)
    except OSError as error:
        failures.append(str(error))
    thread.join()
    return failures[0] if failures else ""


def test_authority_signs_a_server_and_its_client(authority: Content, tmp_path: Path) -> None:
    assert handshake(tmp_path, server(authority), client(authority)) == ""


def test_client_of_another_authority_is_rejected(authority: Content, tmp_path: Path) -> None:
    stranger = {**client(credentials.authority({}, NOW)), "ca.crt": authority["tls.crt"]}
    assert "certificate verify failed" in handshake(tmp_path, server(authority), stranger)


def test_server_certificate_is_accepted_from_another_server(authority: Content, tmp_path: Path) -> None:
    """The routers connect to each other."""
    assert handshake(tmp_path, server(authority), server(authority)) == ""


def test_server_certificate_for_servers_only_is_replaced(
    authority: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates of earlier releases were not accepted from a client."""
    with monkeypatch.context() as patched:
        patched.setattr(credentials, "_purposes_of", lambda _: [ExtendedKeyUsageOID.SERVER_AUTH])
        old = server(authority)
    assert "certificate verify failed" in handshake(tmp_path, server(authority), old)
    assert server(authority, NOW, old) != old


def test_client_certificate_is_not_accepted_from_a_server(authority: Content, tmp_path: Path) -> None:
    impostor = credentials.certificate({}, authority, SecretKind.CLIENT, NAMES, NOW)
    assert "unsupported certificate" in handshake(tmp_path, impostor, client(authority))


def test_valid_content_is_kept(authority: Content) -> None:
    made = server(authority)
    later = NOW + CERTIFICATE_LIFETIME / 2 - DAY
    assert credentials.authority(authority, later) == authority
    assert server(authority, later, made) == made


def test_certificate_is_replaced_after_half_of_its_lifetime(authority: Content) -> None:
    made = server(authority)
    later = NOW + CERTIFICATE_LIFETIME / 2 + DAY
    renewed = server(authority, later, made)
    assert renewed["tls.crt"] != made["tls.crt"]
    assert renewed["tls.key"] != made["tls.key"]
    until = x509.load_pem_x509_certificate(renewed["tls.crt"]).not_valid_after_utc
    assert abs(until - later - CERTIFICATE_LIFETIME) < DAY
    assert credentials.authority(authority, later) == authority


def test_authority_renewed_in_time_keeps_its_key_and_trust(authority: Content, tmp_path: Path) -> None:
    renewed = credentials.authority(authority, NOW + AUTHORITY_LIFETIME / 2 + DAY)
    assert renewed["tls.key"] == authority["tls.key"]
    assert renewed["tls.crt"] != authority["tls.crt"]
    # One side has its new files already, the other not yet.
    fresh = credentials.certificate(client(authority), renewed, SecretKind.CLIENT, ["gateway"], NOW)
    assert fresh["ca.crt"] == renewed["tls.crt"]
    lenient = {**fresh, "ca.crt": authority["tls.crt"]}  # the renewed authority is valid only later
    assert handshake(tmp_path, server(authority), lenient) == ""


@pytest.fixture(params=["names", "key", "certificate", "authority", "nothing"], name="faulty")
def _faulty(request: pytest.FixtureRequest, authority: Content) -> Content:
    made, other = server(authority), server(authority)
    contents: dict[str, Content] = {
        "names": credentials.certificate({}, authority, SecretKind.SERVER, ["other"], NOW),
        "key": {**made, "tls.key": other["tls.key"]},
        "certificate": {**made, "tls.crt": b"-----BEGIN CERTIFICATE-----\nAAAA\n"},
        "authority": {**server(credentials.authority({}, NOW)), "ca.crt": authority["tls.crt"]},
        "nothing": {"tls.crt": b"", "tls.key": b""},
    }
    return contents[request.param]


def test_faulty_content_is_replaced(authority: Content, faulty: Content, tmp_path: Path) -> None:
    renewed = server(authority, NOW, faulty)
    assert renewed.keys() == {"tls.crt", "tls.key", "ca.crt"}
    assert handshake(tmp_path, renewed, client(authority)) == ""


def test_faulty_authority_is_replaced(authority: Content) -> None:
    for faulty in ({}, {**authority, "tls.key": b"no key"}, {**authority, "tls.crt": b""}):
        renewed = credentials.authority(faulty, NOW)
        assert server(renewed)["ca.crt"] == renewed["tls.crt"]
    assert credentials.authority({**authority, "tls.crt": b""}, NOW)["tls.key"] == authority["tls.key"]


def test_redis_password_is_made_once_with_its_configuration() -> None:
    made = credentials.redis({})
    assert len(made["password"]) >= 40
    assert made["redis.conf"] == b"requirepass " + made["password"] + b"\n"
    assert credentials.redis(made) == made
    assert credentials.redis({})["password"] != made["password"]
    assert credentials.redis({"password": b"ours"})["redis.conf"] == b"requirepass ours\n"


def test_hash_key_is_random_and_kept() -> None:
    first = credentials.hash_key({})

    assert len(first["key"]) >= 32
    assert credentials.hash_key({}) != first
    assert credentials.hash_key(first) == first
