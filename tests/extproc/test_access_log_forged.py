"""Access log entries that do not come from the Envoy of the request, sent to a router process."""

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from certificates import Authority, write_pair
from dualmap_extproc.names import ACCESS_LOG_METHOD, ACCESS_LOG_SERVICE, DUALMAP_NAMESPACE, REQUEST_ID_KEY
from dualmap_extproc.request.ids import KEY_BYTES, RequestIds
from dualmap_extproc.wire import access_log_pb2 as als
from dualmap_extproc.wire.peer import peer_of
from extproc.envoy_messages import NO_WAIT, chat, metadata_of, request_body, request_headers
from extproc.relays import relayed
from extproc.router_processes import Router, running, stream, write_pool

pytestmark = pytest.mark.usefixtures("transport")

KEY = b"secret"
# gRPC shares a connection between channels to one address with equal options. Different numbers prevent this.
_numbers = itertools.count()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def streaming(channel: grpc.aio.Channel, count: int) -> dict[str, grpc.aio.StreamStreamCall]:
    """Send requests whose ext_proc streams stay open; return the streams by request id."""
    calls = {}
    for number in range(count):
        call = stream(channel)
        await call.write(request_headers(NO_WAIT))
        await call.write(request_body(chat(f"prompt {number}")))
        answer = await call.read()
        metadata = metadata_of(answer) or metadata_of(await call.read())
        calls[metadata[DUALMAP_NAMESPACE][REQUEST_ID_KEY]] = call
    return calls


async def report(channel: grpc.aio.Channel, ids: Sequence[str], *, status: int = 200) -> None:
    """Send an access log entry for each id, and wait until the router has read the entries."""
    message = als.StreamAccessLogsMessage()
    for request_id in ids:
        entry = message.http_logs.log_entry.add()
        entry.common_properties.custom_tags["id"] = request_id
        entry.response.response_code.value = status
    method = channel.stream_unary(
        f"/{ACCESS_LOG_SERVICE}/{ACCESS_LOG_METHOD}", als.StreamAccessLogsMessage.SerializeToString
    )
    call = method()
    await call.write(message)
    await call.done_writing()
    await call


async def endpoints(router: Router) -> list[dict[str, object]]:
    shown: list[dict[str, object]] = json.loads(await router.get("/pools/llm/qwen"))["endpoints"]
    return shown


async def in_flight(router: Router) -> int:
    return sum(int(str(each["in_flight"])) for each in await endpoints(router))


async def foreign_entries(router: Router) -> float:
    page = (await router.get("/metrics")).decode().splitlines()
    return sum(float(line.split()[-1]) for line in page if line.startswith("dualmap_access_log_foreign_entries_total "))


@asynccontextmanager
async def serving(folder: Path, *options: str) -> AsyncIterator[Router]:
    async with running(write_pool(folder / "pool.yaml", members=3), options=options) as router:
        yield router


def plain(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("dualmap.number", next(_numbers))])


async def test_access_log_of_another_address_ends_no_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as router, plain(port_of(router.grpc)) as envoy:
        ids = await streaming(envoy, 6)
        assert await in_flight(router) == 6
        async with relayed(port_of(router.als)) as other, plain(other) as attacker:
            for status in (200, 400, 503):
                await report(attacker, list(ids), status=status)
        assert await in_flight(router) == 6
        assert not any(each["suspended"] for each in await endpoints(router))
        assert await foreign_entries(router) == 18
        async with plain(port_of(router.als)) as log:
            await report(log, list(ids))
        assert await in_flight(router) == 0
        assert await foreign_entries(router) == 18


async def test_access_log_failures_of_another_address_suspend_no_member(tmp_path: Path) -> None:
    async with serving(tmp_path) as router, plain(port_of(router.grpc)) as envoy:
        ids = await streaming(envoy, 12)
        async with relayed(port_of(router.als)) as other, plain(other) as attacker:
            await report(attacker, list(ids), status=503)
        assert not any(each["suspended"] for each in await endpoints(router))
        assert await in_flight(router) == 12


def channel_with(port: int, router_authority: bytes, pair: tuple[bytes, bytes]) -> grpc.aio.Channel:
    options = [("dualmap.number", next(_numbers)), ("grpc.ssl_target_name_override", "localhost")]
    credentials = grpc.ssl_channel_credentials(router_authority, *pair)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


@pytest.fixture
def authority() -> Authority:
    return Authority()


async def test_access_log_of_another_certificate_ends_no_request(tmp_path: Path, authority: Authority) -> None:
    folder = write_pair(tmp_path / "tls", authority.pair())
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    async with (
        serving(tmp_path, "--tls", str(folder), "--tls-client-ca", str(tmp_path / "ca.pem")) as router,
        channel_with(port_of(router.grpc), authority.pem, authority.pair("gateway")) as envoy,
    ):
        ids = list(await streaming(envoy, 2))
        async with channel_with(port_of(router.als), authority.pem, authority.pair("other")) as attacker:
            await report(attacker, ids)
        assert await in_flight(router) == 2
        # A renewed certificate has the same names. Behind NAT, one Envoy may have several addresses.
        async with (
            relayed(port_of(router.als)) as other,
            channel_with(other, authority.pem, authority.pair("gateway")) as renewed,
        ):
            await report(renewed, ids)
        assert await in_flight(router) == 0


class Context:
    def __init__(self, peer: str, names: list[bytes] | None = None) -> None:
        self._peer, self._names = peer, names

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> list[bytes] | None:
        return self._names


@pytest.mark.parametrize(
    ("peer", "identity"),
    [
        ("ipv4:10.0.0.7:40000", "10.0.0.7"),
        ("ipv6:%5Bfd00::7%5D:40000", "fd00::7"),
        ("ipv6:[fd00:0::7]:40000", "fd00::7"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:40000", "10.0.0.7"),
        ("unix:/run/router.sock", "unix:/run/router.sock"),
        ("", ""),
    ],
)
def test_peer_without_certificate_is_its_address(peer: str, identity: str) -> None:
    assert peer_of(Context(peer)) == identity
    assert peer_of(Context(peer, [])) == identity


def test_peer_with_certificate_is_its_names() -> None:
    assert peer_of(Context("ipv4:10.0.0.7:1", [b"b", b"a"])) == peer_of(Context("ipv4:10.0.0.8:2", [b"a", b"b"]))
    assert peer_of(Context("ipv4:10.0.0.7:1", [b"a b"])) != peer_of(Context("ipv4:10.0.0.7:1", [b"a", b"b"]))


class TestRequestIds:
    def test_id_is_accepted_from_its_peer_only(self) -> None:
        ids = RequestIds("r", KEY)
        made = ids.new("10.0.0.1")
        assert made.startswith(ids.prefix)
        assert ids.is_from(made, "10.0.0.1")
        assert not ids.is_from(made, "10.0.0.2")
        assert not RequestIds("r", bytes(KEY_BYTES)).is_from(made, "10.0.0.1")

    @pytest.mark.parametrize("forged", ["", "r", "r-", "r-1", "r-1-", "r-1-0000000000000000", "r-1-é"])
    def test_id_that_was_not_made_is_rejected(self, forged: str) -> None:
        assert not RequestIds("r", KEY).is_from(forged, "10.0.0.1")

    def test_ids_have_64_unpredictable_bits_each(self) -> None:
        ids = RequestIds("r", KEY)
        seals = {ids.new("10.0.0.1").rpartition("-")[2] for _ in range(1000)}
        assert len(seals) == 1000
        assert {len(seal) for seal in seals} == {16}
