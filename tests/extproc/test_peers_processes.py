"""Tests of connections between routers in several processes: killed, stopped, cut off."""

import asyncio
import logging
import signal
import time

import pytest

from dualmap.ownership.messages import Declined
from dualmap_extproc.peers.dialer import Address
from dualmap_extproc.peers.link import HEARTBEAT_S, SILENT_BEATS
from extproc.peer_process import peer_process
from extproc.peer_routers import POOL, Router, routers
from extproc.relays import relayed
from waiting import until

LOST_S = HEARTBEAT_S * SILENT_BEATS


def lost_reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.details["reason"] for each in caplog.records if each.message.startswith("Lost the connection")]


async def echoed(router: Router, peer: str, number: str) -> None:
    """Send a message to an echoing peer until it comes back."""
    router.peers.send(POOL, peer, Declined(request_id=number))
    await until(lambda: number in router.heard.ids)


@pytest.mark.parametrize("name", ["0-1", "b-1"], ids=["sorts before", "sorts after"])
async def test_killed_router_is_lost_at_once_and_its_successor_connects(name, caplog):
    caplog.set_level(logging.INFO)
    async with routers("a-1", all_know_all=False) as (a,):
        a.start()
        async with peer_process(name, a.address.port) as (process, _):
            await until(lambda: a.peers.names == (name,))
            await echoed(a, name, "1")
            process.kill()
            await until(lambda: a.heard.lost == [name])
        (reason,) = lost_reasons(caplog)
        assert "silent" not in reason
        async with peer_process(f"{name}-next", a.address.port):
            await until(lambda: a.peers.names == (f"{name}-next",))
            await echoed(a, f"{name}-next", "2")
        assert a.heard.routers[0] == {"a-1"}


@pytest.mark.parametrize("dials", ["stopped", "other"])
async def test_stopped_router_is_lost_after_a_second_and_connects_again(dials):
    async with (
        routers("a-1", all_know_all=False) as (a,),
        peer_process("b-1", *([a.address.port] if dials == "stopped" else [])) as (process, port),
    ):
        a.start(*([Address("127.0.0.1", port)] if dials == "other" else []))
        await until(lambda: a.peers.names == ("b-1",))
        process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        await until(lambda: a.heard.lost == ["b-1"])
        assert time.monotonic() - began_s > LOST_S - HEARTBEAT_S
        a.peers.send(POOL, "b-1", Declined(request_id="lost"))
        process.send_signal(signal.SIGCONT)
        await until(lambda: a.peers.names == ("b-1",))
        await echoed(a, "b-1", "after")
        assert a.heard.ids == ["after"]


async def test_router_behind_a_cut_connection_is_lost_and_connects_again():
    async with routers("a-1", "b-1", all_know_all=False) as (a, b):
        b.start()
        async with relayed(b.address.port) as port:
            a.start(Address("127.0.0.1", port))
            await until(lambda: a.peers.names == ("b-1",) and b.peers.names == ("a-1",))
        await until(lambda: a.heard.lost == ["b-1"] and b.heard.lost == ["a-1"])
        a.addresses[:] = [b.address]
        await until(lambda: a.peers.names == ("b-1",) and b.peers.names == ("a-1",))


async def test_messages_between_processes_arrive_in_order():
    async with routers("a-1", all_know_all=False) as (a,), peer_process("b-1") as (_, port):
        a.start(Address("127.0.0.1", port))
        await until(lambda: a.peers.names == ("b-1",))
        ids = [str(number) for number in range(3000)]
        for number in ids:
            a.peers.send(POOL, "b-1", Declined(request_id=number))
            if number.endswith("0"):
                await asyncio.sleep(0)
        await until(lambda: len(a.heard.ids) == len(ids))
        assert a.heard.ids == ids


async def test_router_that_does_not_read_is_lost_before_it_counts_as_silent(caplog):
    caplog.set_level(logging.INFO)
    async with routers("a-1", all_know_all=False) as (a,), peer_process("b-1", a.address.port) as (process, _):
        a.start()
        await until(lambda: a.peers.names == ("b-1",))
        process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        payload = bytes(2**20)
        while not a.heard.lost and time.monotonic() - began_s < LOST_S:
            a.peers.share(payload)
            await asyncio.sleep(0)
        process.send_signal(signal.SIGCONT)
        await until(lambda: a.heard.lost == ["b-1"])
        await until(lambda: a.peers.names == ("b-1",))
        await echoed(a, "b-1", "after")
    assert lost_reasons(caplog)[0] == "it does not read what this router sends"
