"""Tests of connections between routers that must not be used, or that are lost."""

import asyncio
import logging
import time

import grpc
import grpc.aio
import pytest

from dualmap.ownership.messages import Declined
from dualmap_extproc.peers import link as link_module
from dualmap_extproc.peers import peers as module
from dualmap_extproc.peers.codec import ACCEPT, Frame, Hello, RouterState, encode_hello, encode_message, encode_state
from dualmap_extproc.peers.dialer import Address
from dualmap_extproc.peers.handshake import Introduction
from dualmap_extproc.peers.link import SILENT_BEATS, Link
from extproc.logged_errors import logged_errors
from extproc.peer_routers import KEY, POOL, Router, connected, routers
from waiting import WAIT_S, until

pytestmark = pytest.mark.usefixtures("transport")

REFUSED = "Not connecting to another router"
SAME_ID = "Another router has the same replica id"
UNREADABLE = "Closed a connection with an unreadable frame"


def said(caplog: pytest.LogCaptureFixture, message: str) -> list[str]:
    return [record.details["reason"] for record in caplog.records if record.message == message]


async def never_connected(*some: Router) -> None:
    await asyncio.sleep(0.4)
    assert [each.peers.names for each in some] == [()] * len(some)


async def test_router_with_another_hash_key_is_no_peer(caplog):
    async with routers("a-1", all_know_all=False) as (a,), routers("b-1", all_know_all=False, key=b"other") as (b,):
        a.start(b.address)
        b.start(a.address)

        await never_connected(a, b)

        assert said(caplog, REFUSED) == ["the hash key is another; start all routers with the same --hash-key-file"] * 2


async def test_second_router_of_one_replica_id_is_logged_once(caplog):
    async with routers("a-1", "a-2", "a-3", "b-1") as some:
        await until(lambda: connected(*some))
        for each in some[:3]:
            await each.stop()
        warned = [record.details["replica_id"] for record in caplog.records if SAME_ID in record.message]
        assert warned == ["a", "a", "a"]


async def test_successor_of_a_router_that_ends_is_not_logged(caplog):
    async with routers("a-1", "a-2", all_know_all=False) as (old, new):
        old.peers.leave()
        old.start()
        new.start(old.address)
        await until(lambda: connected(old, new))
        assert [record for record in caplog.records if SAME_ID in record.message] == []


async def test_first_attempts_end_with_and_without_a_connection():
    async with routers("a-1", "b-1", all_know_all=False) as (a, b):
        b.start()
        closed = Router("c-1")
        await closed.listen()
        await closed.stop()
        a.start(b.address, closed.address, a.address)
        await asyncio.wait_for(a.peers.tried(), WAIT_S)
        assert a.peers.names == ("b-1",)
        await asyncio.wait_for(b.peers.tried(), WAIT_S)


async def test_router_does_not_connect_to_itself():
    async with routers("a-1") as (a,):
        await asyncio.sleep(0.3)
        assert a.peers.names == ()
        assert a.heard.routers == [{"a-1"}]
        # The address is not dialed again.
        assert [task.done() for task in a.peers._dialer._dials.values()] == [True]


@pytest.mark.parametrize("dialing", [0, 1], ids=["first name dials", "second name dials"])
async def test_one_router_that_finds_the_other_is_enough(dialing):
    async with routers("a-1", "b-1", all_know_all=False) as some:
        some[1 - dialing].start()
        some[dialing].start(some[1 - dialing].address)

        await until(lambda: connected(*some))
        some[0].peers.send(POOL, "b-1", Declined(request_id="x"))
        some[1].peers.send(POOL, "a-1", Declined(request_id="y"))
        await until(lambda: some[0].heard.ids == ["y"] and some[1].heard.ids == ["x"])


async def test_routers_that_may_own_pools_are_warm_and_stay():
    async with routers("a-1", "b-1", "c-1") as (a, b, c):
        await until(lambda: connected(a, b, c))
        await until(lambda: a.heard.routers[-1] == {"a-1", "b-1", "c-1"})

        b.peers.warm()
        await until(lambda: all(each.heard.routers[-1] == {"b-1"} for each in (a, b, c)))
        c.peers.warm()
        await until(lambda: all(each.heard.routers[-1] == {"b-1", "c-1"} for each in (a, b, c)))
        b.peers.leave()
        await until(lambda: all(each.heard.routers[-1] == {"c-1"} for each in (a, b, c)))
        await c.stop()
        await until(lambda: all(each.heard.routers[-1] == {"a-1"} for each in (a, b)))
        assert a.heard.lost == b.heard.lost == ["c-1"]


async def test_message_to_an_unknown_router_is_dropped():
    async with routers("a-1", all_know_all=False) as (a,):
        a.peers.send(POOL, "b-1", Declined(request_id="x"))
        a.peers.share(b"news")
        assert a.peers.names == ()


async def test_lost_router_returns_under_the_same_address():
    async with routers("a-1", "b-1") as (a, b):
        await until(lambda: connected(a, b))
        await b.stop()
        await until(lambda: a.heard.lost == ["b-1"])
        a.peers.send(POOL, "b-1", Declined(request_id="lost"))
        again = Router("b-2")
        try:
            await again.listen(port=b.address.port)
            again.start(a.address)
            await until(lambda: connected(a, again))
        finally:
            await again.stop()


async def test_too_many_routers_are_refused(monkeypatch, caplog):
    monkeypatch.setattr(module, "ROUTERS_MAX", 1)
    async with routers("a-1", "b-1", all_know_all=False) as (a, b), routers("c-1", all_know_all=False) as (c,):
        a.start(b.address)
        await until(lambda: connected(a, b))
        c.start(a.address)
        await until(lambda: "Not connecting to further routers" in caplog.messages)
        assert connected(a, b)


class Stranger:
    """A client of a router's port that can do the handshake of the router ``name``."""

    def __init__(self, to: Address, name: str) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{to.port}")
        self.call = self._channel.stream_stream(f"/{module.SERVICE}/{module.METHOD}")()
        self._own = Introduction.new(name, KEY, dialed=True)

    async def __aenter__(self) -> "Stranger":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def connect(self) -> None:
        await self.call.write(self._own.hello)
        other = self._own.read_hello(await self.call.read())
        await self.call.write(self._own.proof(other) + encode_state(RouterState(warm=False, leaving=False)))
        self._own.check_proof(await self.call.read(), other)

    async def closed(self) -> bool:
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    if await self.call.read() is grpc.aio.EOF:
                        return True
                except grpc.RpcError:
                    return True


HELLO = Hello(version=1, name="b-1", nonce=bytes(16))
NOT_HELLO = {
    "no protobuf": b"\xff\xff\xff",
    "no hello": b"",
    "another frame": encode_message(POOL, Declined(request_id="x")),
    "short nonce": encode_hello(Hello(version=1, name="b-1", nonce=b"1")),
    "name that is a header": b"\n\x16\x08\x01\x12\x02b\n\x1a" + b"\x0e" + bytes(14),
    "large hello": encode_hello(HELLO) + b"\x82\x7d\x90\x4e" + bytes(10_000),
}


@pytest.mark.parametrize("data", NOT_HELLO.values(), ids=NOT_HELLO)
async def test_stranger_without_a_hello_is_closed_with_one_line(data, caplog):
    async with routers("a-1", all_know_all=False) as (a,):
        a.start()
        for _ in range(3):
            async with Stranger(a.address, "b-1") as stranger:
                await stranger.call.write(data)
                assert await stranger.closed()
        assert len(said(caplog, UNREADABLE)) == 1
        assert a.peers.names == ()
        assert not logged_errors(caplog)


async def test_router_of_another_protocol_version_is_no_peer(caplog):
    async with routers("a-1", all_know_all=False) as (a,):
        async with Stranger(a.address, "b-1") as stranger:
            await stranger.call.write(encode_hello(Hello(version=2, name="b-1", nonce=bytes(16))))
            assert await stranger.closed()
        assert said(caplog, REFUSED) == ["the protocol has version 2 instead of 1; run the same release in all routers"]


async def test_stranger_that_repeats_the_routers_proof_is_closed(caplog):
    async with routers("a-1", all_know_all=False) as (a,):
        async with Stranger(a.address, "b-1") as stranger:
            await stranger.call.write(encode_hello(HELLO))
            await stranger.call.read()
            proof = await stranger.call.read()
            await stranger.call.write(proof)
            assert await stranger.closed()
        assert len(said(caplog, REFUSED)) == 1
        assert a.peers.names == ()


async def test_stranger_that_sends_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.2)
    async with routers("a-1", all_know_all=False) as (a,), Stranger(a.address, "b-1") as stranger:
        assert await stranger.closed()
        assert a.peers.names == ()


async def test_further_strangers_are_refused_before_their_handshake(monkeypatch):
    monkeypatch.setattr(module, "_HANDSHAKES_MAX", 1)
    async with routers("a-1", all_know_all=False) as (a,), Stranger(a.address, "b-1") as first:
        await first.call.read()
        async with Stranger(a.address, "c-1") as second:
            with pytest.raises(grpc.RpcError):
                await second.call.read()


@pytest.mark.parametrize("name", ["0-1", "b-1"], ids=["sorts before", "sorts after"])
async def test_unreadable_frame_of_a_peer_closes_the_connection(name, caplog):
    caplog.set_level(logging.INFO)
    async with routers("a-1", all_know_all=False) as (a,), Stranger(a.address, name) as stranger:
        await stranger.connect()
        if name < "a-1":
            await stranger.call.write(ACCEPT)
        await until(lambda: a.peers.names == (name,))
        await stranger.call.write(encode_message(POOL, Declined(request_id="x" * 600)))
        assert await stranger.closed()
        assert a.heard.lost == [name]
        assert a.heard.messages == []
        assert said(caplog, "Lost the connection to another router") == [
            "it sent an unreadable frame: invalid request id"
        ]


async def test_message_before_the_connection_is_accepted_closes_it(caplog):
    async with routers("a-1", all_know_all=False) as (a,), Stranger(a.address, "0-1") as stranger:
        await stranger.connect()
        await stranger.call.write(encode_message(POOL, Declined(request_id="x")))
        assert await stranger.closed()
        assert a.peers.names == ()
        assert said(caplog, UNREADABLE) == ["a frame before the connection is accepted"]


@pytest.mark.parametrize("dialing", [0, 1], ids=["first name dials", "second name dials"])
async def test_message_that_cannot_be_applied_only_ends_the_connection(dialing, caplog):
    async with routers("a-1", "b-1", all_know_all=False) as some:
        some[1 - dialing].start()
        some[dialing].start(some[1 - dialing].address)
        a, b = some
        await until(lambda: connected(a, b))
        a.peers.send(POOL, "b-1", Declined(request_id="cannot be applied"))
        a.peers.send(POOL, "b-1", Declined(request_id="never"))
        await until(lambda: b.heard.lost == ["a-1"] and a.heard.lost == ["b-1"])
        await until(lambda: connected(a, b))
        a.peers.send(POOL, "b-1", Declined(request_id="later"))
        await until(lambda: b.heard.ids == ["later"])
        (failed,) = [each for each in caplog.records if each.message.startswith("Failed to apply")]
        assert failed.details["error"] == "ValueError"
        assert "peer_routers.py:" in failed.details["place"]


async def test_connections_that_break_at_once_are_opened_at_growing_intervals():
    async with routers("a-1", "b-1", all_know_all=False) as (a, b):
        b.start()
        a.start(b.address)
        a.heard.on_connected = lambda: a.peers.send(POOL, "b-1", Declined(request_id="cannot be applied"))
        began_s = time.monotonic()
        await until(lambda: len(b.heard.lost) == 6)
        # The pauses are 0.05, 0.1, 0.2, 0.4 and 0.8 s.
        assert time.monotonic() - began_s > 1.5


async def test_listener_that_fails_ends_no_router(caplog):
    async with routers("a-1", "b-1", all_know_all=False) as (a, b):
        b.start()
        a.start(b.address)
        await until(lambda: connected(a, b))
        a.heard.fails = True
        await b.stop()
        await until(lambda: a.peers.names == ())
        a.peers.warm()
        a.heard.fails = False
        await b.listen(port=b.address.port)
        b.start()
        await until(lambda: connected(a, b))
        assert a.heard.routers[-1] == {"a-1"}
        (failed,) = [each for each in caplog.records if each.message.startswith("Failed to apply")]
        assert failed.details["error"] == "ValueError"


async def test_frame_that_fails_to_decode_only_ends_the_connection(monkeypatch, caplog):
    caplog.set_level(logging.INFO)

    def fail(_: bytes) -> Frame:
        raise RecursionError("a secret")

    async with routers("a-1", "b-1", all_know_all=False) as (a, b):
        b.start()
        a.start(b.address)
        await until(lambda: connected(a, b))
        monkeypatch.setattr(link_module, "decode_frame", fail)
        await until(lambda: a.heard.lost == ["b-1"] and b.heard.lost == ["a-1"])
        monkeypatch.undo()
        await until(lambda: connected(a, b))
        assert "it sent an unreadable frame: RecursionError" in said(caplog, "Lost the connection to another router")
        assert not logged_errors(caplog)


async def test_connection_lost_between_living_routers_is_opened_again():
    async with routers("a-1", "b-1", all_know_all=False) as (a, b):
        b.start()
        a.start(b.address)
        await until(lambda: connected(a, b))
        await until(lambda: a.heard.routers[-1] == b.heard.routers[-1] == {"a-1", "b-1"})
        a.peers._links["b-1"].end("test")
        await until(lambda: a.heard.lost == ["b-1"] and b.heard.lost == ["a-1"])
        await until(lambda: connected(a, b))
        await until(lambda: a.heard.routers[-3:] == [{"a-1", "b-1"}, {"a-1"}, {"a-1", "b-1"}])
        a.peers.send(POOL, "b-1", Declined(request_id="later"))
        await until(lambda: b.heard.ids == ["later"])


async def test_second_connection_of_a_peer_is_closed():
    async with (
        routers("a-1", all_know_all=False) as (a,),
        Stranger(a.address, "b-1") as first,
        Stranger(a.address, "b-1") as second,
    ):
        await first.connect()
        await until(lambda: a.peers.names == ("b-1",))
        await second.connect()
        assert await second.closed()
        assert a.peers.names == ("b-1",)
        assert a.heard.lost == []


async def test_peer_that_accepts_a_second_connection_gave_up_the_first():
    async with (
        routers("a-1", all_know_all=False) as (a,),
        Stranger(a.address, "0-1") as first,
        Stranger(a.address, "0-1") as second,
    ):
        for stranger in (first, second):
            await stranger.connect()
            await stranger.call.write(ACCEPT)
        await until(lambda: a.heard.lost == ["0-1"])
        assert await first.closed()
        await second.call.write(encode_message(POOL, Declined(request_id="x")))
        await until(lambda: a.heard.ids == ["x"])


async def test_silent_peer_is_lost():
    async with routers("a-1", all_know_all=False) as (a,), Stranger(a.address, "b-1") as stranger:
        await stranger.connect()
        await until(lambda: a.peers.names == ("b-1",))
        assert await stranger.closed()
        assert a.heard.lost == ["b-1"]


async def test_router_that_ends_does_not_wait_longer_for_a_peer_that_does_not_close(monkeypatch):
    monkeypatch.setattr(module, "END_S", 0.1)
    async with routers("a-1", all_know_all=False) as (a,), Stranger(a.address, "b-1") as stranger:
        await stranger.connect()
        await until(lambda: a.peers.names == ("b-1",))
        await asyncio.wait_for(a.peers.end(), WAIT_S)
        assert a.peers.names == ("b-1",)


class Stuck:
    """A stream on which nothing arrives, and of which the other side reads nothing after ``frames``."""

    def __init__(self, frames: int) -> None:
        self.written: list[bytes] = []
        self._frames = frames

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def write(self, message: bytes) -> None:
        if len(self.written) == self._frames:
            await asyncio.Event().wait()
        self.written.append(message)


async def ignore(_: Frame) -> None:
    pass


async def test_link_with_a_full_outbox_ends():
    stream = Stuck(1)
    link = Link("b-1", stream, outbox_bytes_max=1000)
    running = asyncio.create_task(link.run(ignore))
    for _ in range(20):
        link.send(bytes(100))
        await asyncio.sleep(0)

    assert await running == "it does not read what this router sends"
    assert sum(map(len, stream.written)) < 1000


async def test_link_writes_the_frames_of_one_step_together():
    stream = Stuck(100)
    link = Link("b-1", stream)
    running = asyncio.create_task(link.run(ignore))
    await asyncio.sleep(0.01)
    stream.written.clear()
    frames = bytes([100, 101, 102])
    for number in frames:
        link.send(bytes([number]))
    await until(lambda: any(frames[:1] in each for each in stream.written))
    # A heartbeat may come before them.
    assert frames in stream.written
    link.end("test")
    assert await running == "test"


async def test_link_counts_silence_by_its_own_heartbeats(monkeypatch):
    """The event loop was busy for longer than a router may be silent."""
    stream = Stuck(100)
    link = Link("b-1", stream)
    running = asyncio.create_task(link.run(ignore))
    await asyncio.sleep(0)
    time.sleep(0.3 * SILENT_BEATS)  # noqa: ASYNC251
    await asyncio.sleep(0.1)
    assert not running.done()
    link.end("test")
    await running
