"""Tests of TLS between Envoy and the router: certificate renewal under open streams, mutual TLS, and untrusted Envoys.

The tests detect an untrusted Envoy by the response statuses of its clients.
"""

import asyncio
import json
import socket
import ssl
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority, mount_pair, write_pair
from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import opened, raw
from harness.deployment import CHAT, Deployment
from harness.documents import chat, document, member_of
from harness.envoy import Envoy
from harness.shared_engines import SharedEngines
from harness.upstream import sse

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVENTS = [b'data: {"number": %d}\n\n' % number for number in range(3)]
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)
TAKEN_UP = "Loaded changed certificate files"
REFUSED = "Rejected certificate files, keeping the last valid certificates"
DECISION = "x-dualmap-decision"

modes = pytest.mark.parametrize("mode", [Mode.STREAMED, Mode.FULL_DUPLEX], ids=lambda mode: mode.value)


async def shown(port: int) -> bytes:
    """Return the certificate (DER) that the port presents to a new connection."""

    def shake() -> bytes:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain, context.wrap_socket(plain) as secure:
            return secure.getpeercert(binary_form=True) or b""

    return await asyncio.to_thread(shake)


async def assert_shown(deployment: Deployment, pair: tuple[bytes, bytes]) -> None:
    """Check that both router ports present this certificate to new connections."""
    certificate = ssl.PEM_cert_to_DER_cert(pair[1].decode())
    assert [await shown(deployment.router.ports[name]) for name in ("grpc", "als")] == [certificate] * 2


async def outcomes(deployment: Deployment, envoy: Envoy, count: int = 8) -> Counter[tuple[int, bool]]:
    """Send requests through an Envoy; count the replies by status and by the presence of a router's decision."""
    replies = [await deployment.ask(chat("scripted", f"request {n}"), envoy=envoy) for n in range(count)]
    return Counter((reply.status, DECISION in reply.headers) for reply in replies)


def replace(file: Path, content: bytes) -> None:
    """Replace a file at once, because Envoy's health checks may make the router read it at any time."""
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_bytes(content)
    fresh.rename(file)


def client_options(folder: Path) -> tuple[str, ...]:
    """Return the options for an Envoy with the client certificate and key in this folder."""
    return "--tls", "on", "--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key")


async def all_started(stack: AsyncExitStack, envoys: Iterable[Envoy]) -> None:
    """Start Envoys concurrently, because an untrusted Envoy waits five seconds for endpoints before it listens."""
    await asyncio.gather(*(stack.enter_async_context(envoy) for envoy in envoys))


def scripted(engines: SharedEngines) -> dict[str, dict[str, Any]]:
    """Return the pool of the upstreams, in which no request queues behind a delayed response."""
    members = [member_of(engines.left), member_of(engines.right)]
    return {"scripted": document("scripted", members, routing={"queue": {"dispatchWindow": "Unlimited"}})}


@modes
async def test_certificate_change_keeps_open_streams(engines: SharedEngines, mode: Mode, tmp_path: Path) -> None:
    before, after = Authority("before"), Authority("after")
    folder = mount_pair(tmp_path / "router", before.pair(), version=1)
    first, rest = asyncio.Event(), asyncio.Event()

    def trusting(name: str, content: bytes) -> tuple[str, ...]:
        (tmp_path / name).write_bytes(content)
        return "--tls", "on", "--tls-ca", str(tmp_path / name)

    async with Deployment(
        scripted(engines),
        mode=mode,
        directory=tmp_path,
        router_arguments=("--tls", str(folder)),
        # Envoy must trust the new certificate in advance, because its health checks open new connections.
        envoy_arguments=trusting("both.crt", before.pem + after.pem),
    ) as deployment:
        async with AsyncExitStack() as clients:
            engines.left.answer = engines.right.answer = sse(EVENTS, first_after=first, then=rest)
            url = deployment.envoy.url + CHAT
            streams = [
                await clients.enter_async_context(
                    opened(url, json.dumps(chat("scripted", f"stream {number}", stream=True)).encode())
                )
                for number in range(4)
            ]
            await deployment.wait_for_load("scripted", "four wait for their first token", lambda n, _: n == 4)
            engines.reset()
            renewed = after.pair()
            mount_pair(folder, renewed, version=2)
            await assert_shown(deployment, renewed)
            newcomer = deployment.another_envoy("newcomer", arguments=trusting("after.crt", after.pem))
            outdated = deployment.another_envoy("outdated", arguments=trusting("before.crt", before.pem))
            async with AsyncExitStack() as envoys:
                await all_started(envoys, (newcomer, outdated))
                assert await outcomes(deployment, newcomer) == {(200, True): 8}
                assert await outcomes(deployment, outdated) == {(503, False): 8}
            # Envoy's open connections also serve new requests.
            assert await outcomes(deployment, deployment.envoy) == {(200, True): 8}
            first.set()
            for stream in streams:
                assert await stream.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            rest.set()
            for stream in streams:
                assert await stream.read() == b"".join(EVENTS[1:])
        await deployment.wait_for_rest()
        await deployment.wait_for_metric("dualmap_completions_total", 4 + 8 + 8, outcome="finished")
    assert deployment.router.output().count(TAKEN_UP) == 1


async def test_half_replaced_certificate_keeps_last_valid_certificate(engines: SharedEngines, tmp_path: Path) -> None:
    old, new = Authority().pair(), Authority().pair()
    folder = write_pair(tmp_path / "router", old)
    async with Deployment(
        scripted(engines),
        mode=Mode.STREAMED,
        directory=tmp_path,
        router_arguments=("--tls", str(folder)),
        envoy_arguments=("--tls", "on"),
    ) as deployment:
        router = deployment.router
        replace(folder / "tls.crt", new[1])
        for _ in range(5):
            await assert_shown(deployment, old)
        assert router.output().count(REFUSED) == 1
        replace(folder / "tls.key", new[0][:100])
        for _ in range(5):
            await assert_shown(deployment, old)
        assert router.output().count(REFUSED) == 2
        async with deployment.another_envoy("meanwhile") as envoy:
            assert await outcomes(deployment, envoy) == {(200, True): 8}
        replace(folder / "tls.key", new[0])
        for _ in range(5):
            await assert_shown(deployment, new)
        assert (router.output().count(REFUSED), router.output().count(TAKEN_UP)) == (2, 1)
        assert await outcomes(deployment, deployment.envoy) == {(200, True): 8}


@modes
async def test_mutual_tls_accepts_only_trusted_clients(engines: SharedEngines, mode: Mode, tmp_path: Path) -> None:
    clients = Authority("clients")
    (tmp_path / "clients.crt").write_bytes(clients.pem)
    folder = write_pair(tmp_path / "router", clients.pair())
    own = client_options(write_pair(tmp_path / "envoy", clients.pair("envoy")))
    strange = client_options(write_pair(tmp_path / "stranger", Authority("clients").pair("envoy")))
    async with Deployment(
        {"scripted": document("scripted", [member_of(engines.left)])},
        mode=mode,
        directory=tmp_path,
        router_arguments=("--tls", str(folder), "--tls-client-ca", str(tmp_path / "clients.crt")),
        envoy_arguments=(*own, "--tls-ca", str(tmp_path / "clients.crt")),
    ) as deployment:
        assert await outcomes(deployment, deployment.envoy) == {(200, True): 8}
        members = [member_of(engines.left), member_of(engines.right)]
        deployment.write("scripted", document("scripted", members, version=2))
        await deployment.envoy.wait_for_hosts("llm/scripted", {engines.left.endpoint, engines.right.endpoint})
        await deployment.wait_for_metric("dualmap_access_log_entries_total", 8, picked="yes")
        await deployment.wait_for_metric("dualmap_measured_cached_tokens_total", 8 * 8)
        await deployment.wait_for_rest()

        async with AsyncExitStack() as stack:
            each = [(*way, *more) for way in (("--tls", "on"), strange, ()) for more in ((), ("--static-endpoints",))]
            kept_out = {
                options: deployment.another_envoy(f"kept-out-{number}", arguments=options)
                for number, options in enumerate(each)
            }
            await all_started(stack, kept_out.values())
            for options, envoy in kept_out.items():
                found = await outcomes(deployment, envoy)
                if "--static-endpoints" not in options:
                    # Without a router Envoy has no endpoints.
                    assert found == {(503, False): 8}, options
                elif mode is Mode.STREAMED:
                    # Envoy fails open to round robin, as without a router.
                    assert found == {(200, False): 8}, options
                else:
                    # Envoy fails open as in STREAMED, after it has detected that no router is healthy.
                    assert found.keys() <= {(200, False), (503, False)}, options
        for port in ("grpc", "als"):
            answer = await raw(deployment.router.ports[port], HTTP2_PREFACE)
            assert not answer.startswith(b"\x00"), "the router answers HTTP/2 in plain text on its TLS port"
        assert await outcomes(deployment, deployment.envoy) == {(200, True): 8}
        await deployment.wait_for_metric("dualmap_access_log_entries_total", 16, picked="yes")
        assert await deployment.metric("dualmap_access_log_entries_total") == 16, (
            "the router accepted entries of an untrusted Envoy"
        )


async def test_envoy_uses_renewed_client_certificate_without_restart(engines: SharedEngines, tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    client_ca = tmp_path / "clients.crt"
    client_ca.write_bytes(old.pem)
    folder = mount_pair(tmp_path / "envoy", old.pair("envoy"), version=1)
    async with Deployment(
        scripted(engines),
        mode=Mode.STREAMED,
        directory=tmp_path,
        router_arguments=("--tls", "self-signed", "--tls-client-ca", str(client_ca)),
        envoy_arguments=(*client_options(folder), "--tls-sds", str(tmp_path)),
    ) as deployment:
        assert await outcomes(deployment, deployment.envoy) == {(200, True): 8}
        mount_pair(folder, new.pair("envoy"), version=2)
        replace(client_ca, new.pem)
        async with deployment.another_envoy("newcomer") as newcomer:
            assert await outcomes(deployment, newcomer) == {(200, True): 8}
        # The router presents the new certificate on new connections. After a restart, all connections are new.
        await deployment.kill_router()
        await deployment.restart_router()
        assert await outcomes(deployment, deployment.envoy) == {(200, True): 8}
