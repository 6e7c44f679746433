"""Tests of KV events that are missing: replays, restarts of engines, and messages that cannot be read."""

import asyncio
import random
from dataclasses import replace
from functools import partial

import msgspec
import pytest
import zmq.asyncio

from dualmap.engines import source
from dualmap.requests import EventsStatus
from extproc.event_followers import PROMPT, Following, answering, following, frames_of, logged, zmtp
from extproc.event_publishers import BLOCK, Publisher, removed, stored
from ports import reserved_port


async def test_late_subscriber_replays_the_blocks_before():
    def prepare(publisher: Publisher) -> None:
        publisher.history([stored(1, PROMPT)], [removed(20)])

    async with following(before=prepare) as follows:
        await follows.has(state="Live", blocks=19, sequence=1, resyncs=1)
        assert follows.publishers[0].asked == [0]
        assert follows.sample("dualmap_kv_resyncs_total", result="complete") == 1


async def test_lost_message_is_replayed():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
        await publisher.publish(removed(20), told=False)
        await publisher.publish(removed(19))
        await follows.has(state="Live", blocks=18, sequence=2, gaps=1)
        assert publisher.asked[-1] == 1
        assert follows.sample("dualmap_kv_event_gaps_total") == 1


async def test_hole_in_a_replay_leaves_a_partial_member():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
        publisher.lost = {1, 3}
        for block in (20, 19, 18):
            await publisher.publish(removed(block), told=False)
        await publisher.publish(removed(17))
        await follows.has(state="Partial", sequence=4)
        assert "lost" in follows.status().reason
        assert follows.sample("dualmap_kv_resyncs_total", result="incomplete") == 1
        # The member is still followed.
        await publisher.publish(removed(16))
        await follows.has(sequence=5)
        assert 'source="events"' in (follows.pick().receipt or "")


async def test_silent_replay_ends_and_live_messages_are_applied():
    def prepare(publisher: Publisher) -> None:
        publisher.hangs = True
        publisher.history([removed(1)])

    async with following(before=prepare) as follows:
        await follows.publishers[0].publish(stored(1, PROMPT))
        await follows.has(state="Partial", blocks=20)
        assert len(follows.publishers[0].asked) == 3


async def test_publisher_without_a_replay_port_is_partial_after_a_gap():
    async with following(replays=False) as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live")
        await publisher.publish(removed(20), told=False)
        await publisher.publish(removed(19))
        await follows.has(state="Partial", blocks=19, gaps=1, resyncs=0)


async def test_restart_at_zero_forgets_blocks_and_follows_again():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await publisher.publish(stored(100, [7] * BLOCK))
        await follows.has(blocks=21, sequence=1)
        publisher.restart()
        await publisher.publish(stored(5, [9] * (2 * BLOCK)))
        await follows.has(state="Live", blocks=2, sequence=0)
        assert "matched=0," in (follows.pick().receipt or "")
        # The start time of the new process, which the next profile contains, is no second restart.
        follows.tell("m-0", publisher.profile(started_s=2000.0))
        await asyncio.sleep(0.3)
        assert follows.status().blocks == 2


async def test_another_start_time_forgets_blocks_and_replays():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(blocks=20, state="Live")
        # An engine that published more in its new life than in its last one looks like a gap.
        publisher.history([stored(1, [3] * BLOCK)], [stored(2, [4] * BLOCK)], [stored(3, [5] * BLOCK)])
        follows.tell("m-0", publisher.profile(started_s=2000.0))
        await follows.has(state="Live", blocks=3, sequence=2)
        assert publisher.asked[-1] == 0


async def test_engine_that_slept_has_no_blocks_after_a_replay():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(blocks=20, state="Live")
        follows.tell("m-0", publisher.profile(asleep=True))
        await follows.has(blocks=0)
        follows.tell("m-0", publisher.profile(asleep=False))
        # The lost message is replayed, and those before the sleep are not.
        await publisher.publish(stored(30, [3] * BLOCK), told=False)
        await publisher.publish(stored(31, [4] * BLOCK))
        await follows.has(state="Live", blocks=2, sequence=2)
        assert publisher.asked == [0, 1]
        assert "matched=0," in (follows.pick().receipt or "")


async def test_router_that_starts_while_an_engine_sleeps_applies_no_replay():
    context = zmq.asyncio.Context()
    publisher = Publisher(context, "127.0.0.2")
    publisher.history([stored(1, PROMPT)])
    publisher.profile = partial(publisher.profile, asleep=True)  # type: ignore[method-assign]
    follows = Following(publisher)
    try:
        await follows.has(state="Live", blocks=0, sequence=0)
    finally:
        await follows.close()
        context.destroy(linger=0)


async def test_another_incarnation_starts_without_blocks():
    async with following() as follows:
        await follows.publishers[0].publish(stored(1, PROMPT))
        await follows.has(blocks=20, state="Live")
        member = replace(follows.pool.members[0], incarnation="2")
        follows.publishers[0].restart()
        follows.adopt(replace(follows.pool, members=(member,)))
        assert follows.status() == EventsStatus()
        follows.tell("m-0", follows.publishers[0].profile(started_s=2000.0))
        await follows.publishers[0].subscribed()
        await follows.publishers[0].publish(stored(1, [7] * BLOCK))
        await follows.has(blocks=1, state="Live")


async def test_port_that_another_pod_reuses_is_another_life():
    async with following() as follows:
        first = follows.publishers[0]
        await first.publish(stored(1, PROMPT))
        await first.publish(stored(50, [5] * BLOCK))
        await follows.has(blocks=21, sequence=1)
        other = await first.replaced()
        follows.publishers = (other,)
        await other.subscribed()
        await other.publish(stored(7, [7] * BLOCK))
        await follows.has(blocks=1, sequence=0)
        follows.adopt()
        await asyncio.sleep(0.1)
        assert not follows.picker.statuses()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode("junk"), msgspec.msgpack.encode([1.5, [[]] * 70000, 0]),
     msgspec.msgpack.encode({"\ud800".encode("utf-8", "surrogatepass"): 1}), msgspec.msgpack.encode([1, 2, 3])],
)  # fmt: skip
async def test_unreadable_message_forgets_blocks_and_is_partial(payload):
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(blocks=20)
        await publisher.send(payload)
        await follows.has(state="Partial", blocks=0, sequence=1)
        assert follows.status().reason
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Partial", blocks=20)


async def test_invalid_event_shows_a_partial_member():
    async with following() as follows:
        await follows.publishers[0].publish(stored(1, PROMPT), ["BlockRemoved", "not a list"])
        await follows.has(state="Partial", blocks=20, reason="an event was invalid")


async def test_frames_that_are_no_message_are_ignored():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.send_frames(b"alone")
        await publisher.send_frames(b"", b"short", b"payload")
        await publisher.send_frames(*[bytes(8)] * 20)
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)


async def test_publisher_that_changes_its_dialect_is_followed():
    async with following() as follows:
        publisher = follows.publishers[0]
        fields = list(stored(1, PROMPT[: 10 * BLOCK]).values())
        await publisher.publish(["BlockStored", *fields[1:5], None, "GPU"])
        await follows.has(blocks=10)
        await publisher.publish(stored(11, PROMPT[10 * BLOCK :], parent=10), as_map=True)
        await follows.has(state="Live", blocks=20)
        assert f"matched={20 * BLOCK}," in (follows.pick().receipt or "")


async def test_numbers_without_order_are_partial_and_logged_once(caplog):
    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await zmtp(reader, writer)
        while not writer.is_closing():
            number = random.getrandbits(62).to_bytes(8, "big")
            writer.write(frames_of(b"", number, msgspec.msgpack.encode([1.5, [removed(1)], 0])))
            await writer.drain()
            await asyncio.sleep(0.003)

    async with following() as follows, answering(publish) as port:
        source = replace(follows.publishers[0].source, port=port, replay_port=reserved_port("127.0.0.2"))
        follows.tell("m-0", replace(follows.publishers[0].profile(), event_sources=(source,)))
        await follows.has(state="Partial")
        before = follows.status().sequence
        await follows.until(lambda: follows.status().sequence != before)
        await asyncio.sleep(1.0)
        assert follows.status().state == "Partial"
        assert follows.status().resyncs <= 3
        (reason,) = logged(caplog)
        assert reason.endswith("are lost (too many restarts and gaps in succession)")
        assert follows.sample("dualmap_kv_resyncs_total", result="incomplete") == 1


async def test_holes_before_and_after_a_backoff_are_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(source, "BACKOFF_S", 0.2)

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await zmtp(reader, writer)
        for number in range(100, 10_000, 2):
            writer.write(frames_of(b"", number.to_bytes(8, "big"), b"\xc1"))
            await asyncio.sleep(0.02)

    async with following() as follows, answering(publish) as port:
        place = replace(follows.publishers[0].source, port=port)
        follows.tell("m-0", replace(follows.publishers[0].profile(), event_sources=(place,)))
        await follows.until(lambda: follows.status().resyncs >= 4)
        assert len(logged(caplog)) == 1


async def test_refused_replay_port_is_named():
    async with following() as follows:
        publisher, free = follows.publishers[0], reserved_port("127.0.0.2")
        await publisher.publish(removed(1), told=False)
        source = replace(publisher.source, replay_port=free)
        follows.tell("m-0", replace(publisher.profile(), event_sources=(source,)))
        await publisher.subscribed()
        await publisher.publish(stored(1, PROMPT))
        reason = f"messages 0 to 0 are lost (replay port {free}: connection refused)"
        await follows.has(state="Partial", reason=reason)


async def test_silent_replay_port_is_named():
    def prepare(publisher: Publisher) -> None:
        publisher.hangs = True

    async with following(before=prepare) as follows:
        publisher = follows.publishers[0]
        await publisher.publish(removed(1), told=False)
        await publisher.publish(stored(1, PROMPT))
        says = f"messages 0 to 0 are lost (replay port {publisher.replay_port}: no answer)"
        await follows.has(state="Partial", reason=says)
