"""Tests of connections between routers with TLS, as ``--tls`` and ``--tls-client-ca`` configure it."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from certificates import Authority, write_pair
from dualmap_extproc.transport.tls import peer_security, server_certificates
from extproc.peer_routers import Router, connected
from waiting import until

pytestmark = pytest.mark.usefixtures("transport")


@asynccontextmanager
async def secured(tls: Path | str, client_ca: Path | None = None, *, each: tuple[Path, ...] = ()):
    """Two routers with TLS; ``each`` are their folders if they differ."""
    folders = each or (tls, tls)
    some = []
    try:
        for name, folder in zip(("a-1", "b-1"), folders, strict=True):
            router = Router(name, security=peer_security(str(folder), client_ca))
            some.append(router)
            certificates = server_certificates(str(folder), client_ca)
            assert certificates is not None
            await router.listen(certificates)
        for router in some:
            router.start(*(other.address for other in some))
        yield some
    finally:
        for router in some:
            await router.stop()


async def test_routers_with_self_signed_certificates_connect():
    async with secured("self-signed") as some:
        await until(lambda: connected(*some))


async def test_routers_that_share_a_certificate_of_an_unknown_authority_connect(tmp_path):
    async with secured(write_pair(tmp_path / "tls", Authority().pair("routers.llm.svc"))) as some:
        await until(lambda: connected(*some))


async def test_routers_with_certificates_of_the_authority_beside_them_connect(tmp_path):
    authority = Authority()
    folders = tuple(write_pair(tmp_path / name, authority.pair("*.routers.llm.svc")) for name in "ab")
    for folder in folders:
        (folder / "ca.crt").write_bytes(authority.pem)
    async with secured("", each=folders) as some:
        await until(lambda: connected(*some))


async def test_routers_with_mutual_tls_connect(tmp_path):
    authority = Authority()
    client_ca = tmp_path / "client-ca.crt"
    client_ca.write_bytes(authority.pem)
    async with secured(write_pair(tmp_path / "tls", authority.pair("routers")), client_ca) as some:
        await until(lambda: connected(*some))


@pytest.mark.parametrize("has_tls", [True, False], ids=["certificate of another authority", "without TLS"])
async def test_router_that_cannot_verify_another_does_not_connect(tmp_path, has_tls):
    folders = tuple(write_pair(tmp_path / name, Authority().pair("routers")) for name in "ab")
    async with secured("", each=folders) as (a, b):
        if not has_tls:
            a.peers._dialer._security = b.peers._dialer._security = None
        await asyncio.sleep(1.0)
        assert a.peers.names == b.peers.names == ()


async def test_changed_certificate_is_used_for_the_next_connection(tmp_path):
    folder = write_pair(tmp_path / "tls", Authority().pair("routers"))
    async with secured(folder) as (a, b):
        await until(lambda: connected(a, b))
        write_pair(folder, Authority().pair("other-name"))
        again = Router("c-1", security=peer_security(str(folder)))
        certificates = server_certificates(str(folder))
        assert certificates is not None
        try:
            await again.listen(certificates)
            again.start(a.address, b.address)
            await until(lambda: connected(a, b, again))
        finally:
            await again.stop()


async def test_invalid_certificate_files_only_delay_the_connection(tmp_path):
    folder = write_pair(tmp_path / "tls", Authority().pair("routers"))
    good = (folder / "tls.crt").read_bytes()
    async with secured(folder) as (a, b):
        await until(lambda: connected(a, b))
        again = Router("c-1", security=peer_security(str(folder)))
        try:
            (folder / "tls.crt").write_bytes(good[:100])
            again.start(a.address, b.address)
            await asyncio.sleep(0.3)
            (folder / "tls.crt").write_bytes(good)
            await until(lambda: connected(a, b, again))
        finally:
            await again.stop()
