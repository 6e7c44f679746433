"""Tests of the bounds on the memory and CPU time of KV events."""

import asyncio
from dataclasses import replace

import msgspec

from dualmap.engines.source import MESSAGE_BYTES_MAX, Message
from dualmap_extproc.engines import kv_events, source_connection
from extproc.event_followers import PROMPT, answering, following, logged, zmtp
from extproc.event_publishers import BLOCK, Publisher, removed, stored


async def test_flood_delays_the_loop_by_a_few_milliseconds():
    async with following() as follows:
        publisher = follows.publishers[0]
        tokens = list(range(64 * BLOCK))
        events = [stored(64 * number, [number, *tokens[1:]]) for number in range(200)]
        payload = msgspec.msgpack.encode([1.5, events, 0])
        for _ in range(10):
            await publisher.send(payload)
        turns: list[float] = []
        follows.time_turns(turns)
        await follows.has(sequence=9, blocks=200 * 64)
        # A slice ends after its bound, so a turn can take longer by one slice.
        assert sorted(turns)[len(turns) // 2] < 2 * kv_events.TURN_S


async def test_flood_leaves_half_of_the_time_to_other_work():
    async with following() as follows:
        publisher = follows.publishers[0]
        events = [stored(64 * number, [number] * (64 * BLOCK)) for number in range(200)]
        payload = msgspec.msgpack.encode([1.5, events, 0])
        loop = asyncio.get_running_loop()
        turns: list[float] = []
        follows.time_turns(turns)
        others_s = 0.0
        busy = True

        def work() -> None:
            nonlocal others_s
            began_s = loop.time()
            while loop.time() < began_s + 0.001:
                pass
            others_s += loop.time() - began_s
            if busy:
                loop.call_later(0, work)

        work()
        for _ in range(20):
            await publisher.send(payload)
        await follows.has(sequence=19)
        busy = False
        assert others_s > 0.8 * sum(turns)


async def test_message_above_the_bound_is_a_gap():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live")
        publisher.hangs = True
        await publisher.send(bytes(MESSAGE_BYTES_MAX + 1))
        await publisher.subscribed()
        await publisher.publish(removed(20))
        await follows.has(state="Partial", sequence=2, blocks=19)


async def test_endless_message_closes_the_connection():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
        await publisher.send_frames(*[bytes(1_000_000)] * 6)
        says = f"{publisher.place}: the connection was closed: a message has more than 4194304 bytes"
        await follows.has(state="Failed", reason=says)
        await publisher.subscribed()
        await follows.has(state="Live", blocks=20)


async def test_waiting_messages_of_all_sources_have_a_common_bound(monkeypatch):
    monkeypatch.setattr(kv_events, "WAITING_BYTES_MAX", 500_000)

    def hang(publisher: Publisher) -> None:
        publisher.hangs = True

    async with following(members=2, before=hang) as follows:
        quiet, loud = follows.publishers
        await quiet.publish(stored(1, PROMPT))
        most = 0
        for _ in range(20):
            # The messages wait for the replay, which is not answered.
            await loud.send(bytes(100_000))
            await asyncio.sleep(0.02)
            most = max(most, follows.events._waiting_bytes)
            if follows.status(1).state == "Failed":
                break
        assert follows.status(1).reason == "too many of its messages waited"
        assert 300_000 < most <= 600_000
        await follows.has(number=0, blocks=20)
        assert follows.events._waiting_bytes == sum(source.waiting_bytes for source in follows.events._sources.values())


async def test_source_begins_again_if_messages_were_not_applied():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
        (source,) = follows.events._sources.values()
        # The position is behind the message before its events are applied.
        source._act(source.events.on_live(0.0, Message(1, b"")))
        source.fail("closed", retry_s=0.0)
        assert source.events.sequence is None
        await publisher.publish(removed(20))
        await follows.has(state="Live", blocks=19, sequence=1)


async def test_oversized_frame_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(source_connection, "RETRY_S", (0.05, 0.05))
    connections = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await zmtp(reader, writer, b"\x02" + (1 << 62).to_bytes(8, "big"))

    async with following(replays=False) as follows, answering(flood) as port:
        source = replace(follows.publishers[0].source, port=port)
        follows.tell("m-0", replace(follows.publishers[0].profile(), event_sources=(source,)))
        await follows.until(lambda: connections >= 4)
        assert logged(caplog) == [
            f"port {port}: the connection was closed: a message has more than {MESSAGE_BYTES_MAX} bytes"
        ]
