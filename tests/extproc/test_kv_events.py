"""Tests of KV events in picks, with publishers on loopback that play vLLM."""

import asyncio
from dataclasses import replace

import msgspec
import zmq.asyncio

from dualmap.engines.profile import read_event_sources
from dualmap.pools.pool import Engine
from dualmap.requests import EventsStatus
from extproc.event_followers import PROMPT, Following, following
from extproc.event_publishers import BLOCK, CLEARED, Publisher, removed, stored


async def test_pick_goes_to_the_member_that_reported_the_prompt():
    async with following(members=4) as follows:
        for number, each in enumerate(follows.publishers):
            await each.publish(stored(1000 * number, PROMPT if number == 2 else [number] * BLOCK))
        for number in range(4):
            await follows.has(number=number, state="Live")
        picked = follows.pick()
        assert 'source="events"' in (picked.receipt or "")
        # The pair has two of four members; the member of the blocks is chosen if it is one of them.
        matched = 20 * BLOCK if 'chosen="m-2"' in (picked.receipt or "") else 0
        assert f"matched={matched}," in (picked.receipt or "")


async def test_removed_blocks_no_longer_match():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(blocks=20)
        await publisher.publish(removed(*range(5, 21)), as_map=True)
        await follows.has(blocks=4)
        assert f"matched={4 * BLOCK}," in (follows.pick().receipt or "")
        assert follows.sample("dualmap_kv_events_total", kind="stored") == 20
        assert follows.sample("dualmap_kv_events_total", kind="removed") == 16


async def test_prompt_without_token_ids_uses_the_records():
    async with following() as follows:
        await follows.publishers[0].publish(stored(1, PROMPT))
        await follows.has(state="Live")
        assert 'source="records"' in (follows.pick("text").receipt or "")
        assert 'source="records"' in (follows.pick([PROMPT, PROMPT]).receipt or "")


async def test_member_without_messages_uses_the_records():
    async with following() as follows:
        await follows.until(lambda: follows.status().state != "Off")
        assert 'source="records"' in (follows.pick().receipt or "")


async def test_prompt_of_another_salt_or_adapter_matches_nothing():
    async with following() as follows:
        await follows.publishers[0].publish(stored(1, PROMPT, salt="tenant"))
        await follows.has(blocks=20, state="Live")
        assert "matched=0," in (follows.pick().receipt or "")
        assert "matched=0," in (follows.pick(cache_salt="other").receipt or "")
        assert f"matched={20 * BLOCK}," in (follows.pick(cache_salt="tenant").receipt or "")


async def test_false_events_change_nothing_at_other_members():
    async with following(members=2) as follows:
        honest, liar = follows.publishers
        await honest.publish(stored(1, PROMPT[: 5 * BLOCK]))
        await liar.publish(stored(1, PROMPT), stored(500, [9] * BLOCK, parent=5))
        await follows.has(number=1, state="Live", blocks=21)
        # The hashes are equal to those of the other member.
        await liar.publish(removed(*range(1, 21)), CLEARED)
        await follows.has(number=1, blocks=0)
        await follows.has(number=0, state="Live", blocks=5)


async def test_claim_bridges_the_time_until_the_store():
    async with following() as follows:
        await follows.publishers[0].publish(stored(1, [7] * BLOCK))
        await follows.has(state="Live", blocks=1)
        assert "matched=0," in (follows.pick().receipt or "")
        assert f"matched={20 * BLOCK}," in (follows.pick().receipt or "")
        # Another life of the engine ends the claims.
        follows.publishers[0].restart()
        await follows.publishers[0].publish(stored(1, [7] * BLOCK))
        await follows.until(lambda: "matched=0," in (follows.pick(PROMPT[BLOCK:]).receipt or ""))


async def test_cleared_cache_forgets_records_too():
    async with following() as follows:
        publisher = follows.publishers[0]
        await publisher.publish(stored(1, PROMPT))
        await follows.has(blocks=20)
        follows.pick("text " * 1000)
        await publisher.publish(CLEARED)
        await follows.has(blocks=0)
        assert "matched=0," in (follows.pick("text " * 1000).receipt or "")
        assert follows.sample("dualmap_kv_events_total", kind="cleared") == 1


async def test_topic_of_the_pool_is_subscribed():
    async with following() as follows:
        publisher = follows.publishers[0]
        follows.tell("m-0", replace(publisher.profile(), event_sources=(replace(publisher.source, topic="kv@"),)))
        await publisher.subscribed()
        await publisher.publish(stored(1, PROMPT))
        await publisher.send_frames(b"kv@m-0", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.5, [], 0]))
        await follows.has(sequence=1, state="Live", blocks=20)


async def test_pool_without_events_opens_no_source():
    context = zmq.asyncio.Context()
    follows = Following(Publisher(context, "127.0.0.2"), engine=Engine())
    try:
        await asyncio.sleep(0.3)
        assert follows.status() == EventsStatus()
    finally:
        await follows.close()
        context.destroy(linger=0)


async def test_host_of_an_engine_is_ignored():
    async with following() as follows:
        answer = {"0": {"enable_kv_cache_events": True, "endpoint": f"tcp://10.1.2.3:{follows.publishers[0].port}"}}
        follows.tell("m-0", read_event_sources(answer))
        await follows.publishers[0].subscribed()
        await follows.publishers[0].publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
