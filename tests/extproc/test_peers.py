"""Tests of the connections between routers: real gRPC on loopback, several routers in one process."""

import asyncio

import pytest

from dualmap.ownership.messages import Declined
from dualmap_extproc.peers import peers as module
from dualmap_extproc.request.ending import AccessLogEntry
from extproc.peer_routers import POOL, connected, routers
from waiting import WAIT_S, until

pytestmark = pytest.mark.usefixtures("transport")


async def test_routers_that_know_each_other_connect_once():
    async with routers("a-1", "b-1", "c-1") as (a, b, c):
        await until(lambda: connected(a, b, c))
        await asyncio.sleep(0.6)

        assert connected(a, b, c)
        assert [each.heard.lost for each in (a, b, c)] == [[], [], []]
        assert a.heard.routers[-1] == b.heard.routers[-1] == c.heard.routers[-1] == {"a-1", "b-1", "c-1"}


async def test_messages_arrive_in_order_in_both_directions():
    async with routers("a-1", "b-1") as (a, b):
        await until(lambda: connected(a, b))
        ids = [str(number) for number in range(5000)]
        for number in ids:
            a.peers.send(POOL, "b-1", Declined(request_id=number))
            b.peers.send(POOL, "a-1", Declined(request_id=number))
            if number.endswith("00"):
                await asyncio.sleep(0)

        await until(lambda: len(a.heard.messages) == len(b.heard.messages) == len(ids))

        assert a.heard.ids == b.heard.ids == ids
        assert a.heard.messages[0][:2] == (POOL, "b-1")


async def test_messages_sent_as_soon_as_a_router_is_known_arrive():
    async with routers("a-1", "b-1", all_know_all=False) as (a, b):
        for router, peer in ((a, b), (b, a)):
            router.heard.on_connected = lambda by=router, to=peer: by.peers.send(
                POOL, to.name, Declined(request_id="first")
            )
        b.start(a.address)
        a.start()
        await until(lambda: a.heard.ids == b.heard.ids == ["first"])


async def test_entry_and_payload_reach_their_routers():
    async with routers("a-1", "b-1", "c-1") as (a, b, c):
        await until(lambda: connected(a, b, c))
        entry = AccessLogEntry(request_id="b-1-7-0123456789abcdef", status=200, sender="10.0.0.9")

        assert a.peers.forward(entry)
        assert not a.peers.forward(AccessLogEntry(request_id="d-1-7-0123456789abcdef"))
        a.peers.share(b"news")
        ended = AccessLogEntry(request_id="d-1-7-0123456789abcdef", status=200, sender="10.0.0.9")
        a.peers.orphan(ended)

        await until(lambda: b.heard.entries and b.heard.shared and c.heard.shared)
        await until(lambda: b.heard.orphans == c.heard.orphans == [ended])
        assert b.heard.entries == [entry]
        assert b.heard.shared == c.heard.shared == [("a-1", b"news")]
        assert not c.heard.entries


@pytest.mark.parametrize("ending", ["a-1", "b-1"])
async def test_router_that_ends_sends_its_last_messages(ending, monkeypatch):
    """The router whose name sorts first decides who opens the connection."""
    monkeypatch.setattr(module, "END_S", 600.0)
    async with routers("a-1", "b-1") as (a, b):
        await until(lambda: connected(a, b))
        ends, stays = (a, b) if ending == "a-1" else (b, a)
        ids = [str(number) for number in range(5000)]
        for number in ids:
            ends.peers.send(POOL, stays.name, Declined(request_id=number))
        entry = AccessLogEntry(request_id=f"{stays.name}-7-0123456789abcdef", status=200, sender="10.0.0.9")
        assert ends.peers.forward(entry)

        await ends.peers.end()

        assert stays.heard.ids == ids
        assert stays.heard.entries == [entry]
        assert stays.heard.lost == [ends.name]
        assert ends.peers.names == ()


async def test_router_that_ends_connects_to_no_router_again(monkeypatch):
    monkeypatch.setattr(module, "END_S", 600.0)
    async with routers("a-1", "b-1") as (a, b):
        await until(lambda: connected(a, b))
        await a.peers.end()
        await asyncio.sleep(0.6)
        assert a.heard.lost == ["b-1"]
        assert b.heard.lost == ["a-1"]
        assert a.peers.names == b.peers.names == ()


async def test_routers_that_end_together_end_at_once(monkeypatch):
    monkeypatch.setattr(module, "END_S", 600.0)
    async with routers("a-1", "b-1", "c-1", "d-1") as some:
        await until(lambda: connected(*some))
        await asyncio.wait_for(asyncio.gather(*(each.peers.end() for each in some)), WAIT_S)


async def test_router_that_ends_alone_ends_at_once(monkeypatch):
    monkeypatch.setattr(module, "END_S", 600.0)
    async with routers("a-1") as (a,):
        await asyncio.wait_for(a.peers.end(), WAIT_S)


async def test_lost_router_is_reported_to_who_sent_it_entries():
    async with routers("a-1", "b-1") as (a, b):
        lost: list[str] = []
        a.peers.on_lost(lost.append)
        await until(lambda: connected(a, b))
        await b.stop()
        await until(lambda: lost == ["b-1"])
