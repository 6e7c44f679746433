"""Tests of KV events of engines with several data-parallel ranks."""

from dataclasses import replace

import zmq.asyncio

from dualmap.engines.events import Removed
from dualmap.engines.profile import EngineProfile
from dualmap_extproc.engines import kv_events
from dualmap_sim.block_pool import EventBatch
from extproc.event_followers import HASHES, PROMPT, STORED, Following, following, following_ranks, page_of
from extproc.event_publishers import BLOCK, Publisher, stored


async def test_ranks_of_a_member_are_counted_apart():
    async with following(members=2) as follows:
        first, second = follows.publishers
        other = replace(second.source, rank=1, replay_port=None)
        # The second publisher listens at another address, which is not the member's.
        follows.tell("m-0", replace(first.profile(), event_sources=(first.source, other)))
        await first.publish(stored(1, PROMPT))
        await follows.has(number=0, state="Connecting", blocks=20)
        assert 'source="records"' in (follows.pick().receipt or "")


async def test_ports_of_the_pool_are_followed_at_each_rank():
    async with following_ranks(2) as (follows, ranks):
        # Messages before the subscription come from the replay port of their rank.
        for each in ranks:
            each.publish(EventBatch(0, 0.0, (STORED,)))
        follows.tell("m-0", page_of(0, 1))
        await follows.has(state="Live", blocks=40, sequence=0, resyncs=2)
        for each, left in zip(ranks, (20, 0), strict=True):
            assert f"matched={20 * BLOCK}," in (follows.pick().receipt or "")
            each.publish(EventBatch(1, 0.0, (Removed(hashes=HASHES, group=0),)))
            await follows.has(state="Live", blocks=left)


async def test_port_of_the_pool_is_above_the_base_for_a_later_rank():
    async with following_ranks(2) as (follows, ranks):
        ranks[1].publish(EventBatch(0, 0.0, (STORED,)))
        follows.tell("m-0", page_of(1))
        await follows.has(state="Live", blocks=20)


async def test_ranks_of_a_metrics_page_may_change():
    async with following_ranks(2) as (follows, ranks):
        for each in ranks:
            each.publish(EventBatch(0, 0.0, (STORED,)))
        for said in ((0,), (0, 1), (1,)):
            follows.tell("m-0", page_of(*said))
            await follows.has(state="Live", blocks=20 * len(said), resyncs=len(said))
        # A page that could not be read says nothing about ranks.
        before = list(follows.events._sources.values())
        follows.tell("m-0", EngineProfile(reason="silent"))
        assert list(follows.events._sources.values()) == before


async def test_rank_without_a_port_is_a_failed_member():
    async with following_ranks(1) as (follows, _):
        follows.tell("m-0", page_of(0, 65_000))
        port = follows.pool.engine.kv_events.port + 65_000
        await follows.has(state="Failed", reason=f"rank 65000: the subscription failed: there is no port {port}")


async def test_ranks_of_a_metrics_page_are_bounded(monkeypatch):
    monkeypatch.setattr(kv_events, "RANKS_MAX", 2)
    async with following_ranks(1) as (follows, _):
        follows.tell("m-0", page_of(*range(5)))
        assert [each.rank for each in follows.events._sources] == [0, 1]


async def test_source_limit_is_a_failed_member(monkeypatch):
    monkeypatch.setattr(kv_events, "SOURCES_MAX", 0)
    context = zmq.asyncio.Context()
    follows = Following(Publisher(context, "127.0.0.2"))
    try:
        await follows.has(state="Failed", reason="the router follows 0 sources already")
    finally:
        await follows.close()
        context.destroy(linger=0)


async def test_number_of_ranks_is_bounded(monkeypatch):
    monkeypatch.setattr(kv_events, "RANKS_MAX", 1)
    async with following() as follows:
        publisher = follows.publishers[0]
        ranks = tuple(replace(publisher.source, rank=rank) for rank in range(3))
        follows.tell("m-0", replace(publisher.profile(), event_sources=ranks))
        await publisher.publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)
