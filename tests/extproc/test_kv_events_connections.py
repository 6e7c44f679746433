"""Tests of the connections to publishers of KV events: refused, lost, silent, or of another protocol."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from dualmap.engines.events import Batch
from dualmap.engines.profile import EngineProfile, read_event_sources
from dualmap.pools.pool import Engine, KvEvents, Member
from dualmap_extproc.engines import source_connection
from extproc.event_followers import PROMPT, answering, following, frames_of, logged, page_of, zmtp
from extproc.event_publishers import Publisher, removed, stored
from ports import reserved_port
from web_server import stop_accepting


async def test_server_of_another_protocol_leaves_a_member_connecting():
    writers: list[asyncio.StreamWriter] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writers.append(writer)

    async with following() as follows, await asyncio.start_server(answer, "127.0.0.2", 0) as server:
        port = server.sockets[0].getsockname()[1]
        other = replace(follows.publishers[0].source, port=port, replay_port=None)
        follows.tell("m-0", replace(follows.publishers[0].profile(), event_sources=(other,)))
        await asyncio.sleep(1.0)
        await follows.has(state="Connecting", blocks=0)
        assert 'source="records"' in (follows.pick().receipt or "")
        await stop_accepting(server)
        for each in writers:
            each.close()
            await each.wait_closed()


async def test_lost_connection_is_opened_again_and_replayed():
    async with following() as follows:
        first = follows.publishers[0]
        await first.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
        other = await first.replaced()
        await follows.has(state="Failed", reason=f"{first.place}: the connection was lost", blocks=20)
        follows.publishers = (other,)
        other.history([stored(1, PROMPT)], [removed(20)])
        # No message follows.
        await follows.has(state="Live", blocks=19, sequence=1)


async def test_port_without_a_publisher_is_asked_again():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live")
        await publisher.close()
        await follows.has(state="Connecting")
        other = Publisher(publisher._context, publisher.host, ports=(publisher.port, publisher.replay_port))
        follows.publishers = (other,)
        other.history([stored(1, PROMPT)], [removed(20)])
        await follows.has(state="Live", blocks=19)


async def test_refused_connection_forgets_blocks_before_the_engine_restarts():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
        follows.pick()
        await publisher.close()
        await follows.has(state="Connecting", blocks=0, sequence=None)
        # The router's own record and claims are gone as well.
        picked = follows.pick()
        assert "matched=0," in (picked.receipt or "")
        other = Publisher(publisher._context, publisher.host, ports=(publisher.port, publisher.replay_port))
        follows.publishers = (other,)
        other.history([stored(1, PROMPT)])
        await follows.has(state="Live", blocks=20)
        # The start time of the new process is no further restart.
        follows.tell("m-0", other.profile(started_s=2000.0))
        await follows.until(lambda: not follows.events._ready)
        assert follows.status().blocks == 20


async def test_another_start_time_ends_the_pause_before_the_next_connection(monkeypatch):
    monkeypatch.setattr(source_connection, "RETRY_S", (60.0, 60.0))
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
        await publisher.close()
        await follows.has(state="Failed")
        other = Publisher(publisher._context, publisher.host, ports=(publisher.port, publisher.replay_port))
        follows.publishers = (other,)
        other.history([stored(1, PROMPT)])
        follows.tell("m-0", other.profile(started_s=2000.0))
        await follows.has(state="Live", blocks=20)


async def test_silent_server_is_given_up(monkeypatch):
    monkeypatch.setattr(source_connection, "CONNECT_S", 0.2)
    connections: list[asyncio.StreamWriter] = []

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    async with following() as follows, await asyncio.start_server(accept, "127.0.0.2", 0) as server:
        port = server.sockets[0].getsockname()[1]
        silent = replace(follows.publishers[0].source, port=port, replay_port=None)
        follows.tell("m-0", replace(follows.publishers[0].profile(), event_sources=(silent,)))
        await follows.until(lambda: len(connections) >= 2)
        assert follows.status().state == "Connecting"
        await stop_accepting(server)
        for each in connections:
            each.close()


async def test_unexpected_error_stops_one_source_only():
    async with following(members=2) as follows:
        report = follows.events._report

        def fail(pool, member, rank, changes, status):
            if member == "m-0" and any(isinstance(each, Batch) for each in changes):
                raise ZeroDivisionError
            report(pool, member, rank, changes, status)

        follows.events._report = fail
        for each in follows.publishers:
            await each.publish(stored(1, PROMPT))
        await follows.has(number=0, state="Failed", blocks=0, reason="an unexpected error: ZeroDivisionError")
        await follows.has(number=1, state="Live", blocks=20)


async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # Unread bytes would reset the connection.
    await reader.readexactly(64)
    writer.close()


def answer_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def stay_silent(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    pass


async def send_one_frame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await zmtp(reader, writer, frames_of(b"alone"))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "connection refused"),
        (close_at_once, "the peer closed the connection"),
        (answer_http, "the peer does not use ZMTP"),
        (stay_silent, "no ZMTP greeting within 0.2 s"),
        (zmtp, "no message yet"),
        (send_one_frame, "the messages are not those of KV events"),
    ],
)
async def test_connecting_member_says_why_once(answer, says, monkeypatch, caplog):
    monkeypatch.setattr(source_connection, "CONNECT_S", 0.2)
    monkeypatch.setattr(source_connection, "RETRY_S", (0.05, 0.05))
    async with following(replays=False) as follows, AsyncExitStack() as stack:
        port = await stack.enter_async_context(answering(answer)) if answer else reserved_port("127.0.0.2")
        source = replace(follows.publishers[0].source, port=port)
        follows.tell("m-0", replace(follows.publishers[0].profile(), event_sources=(source,)))
        reason = f"port {port}: {says}"
        await follows.has(state="Connecting", reason=reason)
        await asyncio.sleep(0.6)
        await follows.has(state="Connecting", reason=reason)
        assert logged(caplog) == ([] if says == "no message yet" else [reason])


async def test_engine_that_publishes_nothing_is_off_beside_a_publisher(caplog):
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
        # The pool's ports are those of the first engine, which has the same address.
        ports = KvEvents(enabled=True, port=publisher.port, replay_port=publisher.replay_port)
        other = Member(id="m-1", address=publisher.host, port=8001)
        pool = replace(follows.pool, engine=Engine(kv_events=ports), members=(*follows.pool.members, other))
        follows.adopt(pool)
        follows.tell("m-1", replace(read_event_sources({}), engine="vLLM"))
        await follows.has(number=1, state="Off", reason="the engine reports no KV events")
        # The page is not answered at times.
        follows.tell("m-1", EngineProfile(engine="vLLM"))
        await asyncio.sleep(0.3)
        await follows.has(number=1, state="Off")
        await follows.has(number=0, state="Live", blocks=20)
        assert logged(caplog, "KV events are off") == ["the engine reports no KV events"]
        # An engine that does not answer the page may publish.
        follows.adopt()
        follows.adopt(pool)
        follows.tell("m-0", publisher.profile())
        follows.tell("m-1", page_of(0))
        await follows.has(number=1, state="Live")
        shared = [each.__dict__["details"] for each in caplog.records if "same port" in each.getMessage()]
        assert [(each["members"], each["address"]) for each in shared] == [
            (["m-0", "m-1"], f"{publisher.host}:{publisher.port}")
        ]


async def test_engine_that_publishes_no_longer_is_off():
    async with following() as follows:
        await follows.publishers[0].publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
        follows.tell("m-0", replace(read_event_sources({}), engine="vLLM", started_s=2000.0))
        await follows.has(state="Off", blocks=0, reason="the engine reports no KV events")
        follows.tell("m-0", follows.publishers[0].profile(started_s=3000.0))
        await follows.has(state="Live")
