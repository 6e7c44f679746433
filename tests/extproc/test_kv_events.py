"""Tests of the sockets of KV events, with publishers on loopback that play vLLM."""

import asyncio
import json
import random
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import msgspec
import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from dualmap.engines import source
from dualmap.engines.events import Batch, Removed, Stored
from dualmap.engines.profile import EngineProfile, read_event_sources, read_metrics
from dualmap.engines.source import MESSAGE_BYTES_MAX, Message
from dualmap.pools.pool import Engine, KvEvents, Member, Pool
from dualmap.prompts.api import Api
from dualmap.requests import EventsStatus
from dualmap_extproc.engines import kv_events, source_connection
from dualmap_extproc.engines.metrics import KvEventMetrics
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_sim.block_pool import EventBatch
from dualmap_sim.errors import CannotPublish
from dualmap_sim.kv_publisher import KvPublisher
from dualmap_sim.server_settings import KvEventSettings
from extproc import envoy_messages
from extproc.event_publishers import BLOCK, CLEARED, Publisher, removed, stored
from ports import reserved_port
from waiting import WAIT_S
from web_server import stop_accepting

PROMPT = list(range(100, 100 + 20 * BLOCK + 3))
HASHES = tuple(range(1, 21))
STORED = Stored(
    hashes=HASHES, parent=None, tokens=array("I", PROMPT[: 20 * BLOCK]).tobytes(), block_tokens=BLOCK, group=0
)
KEY = b"k" * 32
RANKS_HOST = "127.0.0.9"


class Following:
    """A picker whose pool has one member for each publisher, and the follower of their events."""

    def __init__(self, *publishers: Publisher, engine: Engine | None = None) -> None:
        self.publishers = publishers
        self.registry = CollectorRegistry()
        self.picker = Picker(Limits(), FanOut().report, id_prefix="r", hash_key=KEY)
        self.events = kv_events.KvEvents(self.picker.on_kv_events, KvEventMetrics(self.registry))
        self.pool = replace(
            envoy_messages.pool(),
            engine=engine or Engine(kv_events=KvEvents(enabled=True)),
            members=tuple(
                Member(id=f"m-{number}", address=each.host, port=8000) for number, each in enumerate(publishers)
            ),
        )
        self.adopt(self.pool)
        self._task = asyncio.create_task(self.events.run())
        for number, each in enumerate(publishers):
            self.tell(f"m-{number}", each.profile())

    def adopt(self, *pools: Pool) -> None:
        self.picker.set_pools(self.now, pools)
        self.events.set_pools(pools)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def tell(self, member: str, profile: EngineProfile) -> None:
        self.picker.on_profile(self.now, self.pool.id, member, profile)
        self.events.on_profile(self.pool.id, member, profile)

    def status(self, number: int = 0) -> EventsStatus:
        return self.picker.statuses()[0].endpoints[number].events

    def pick(self, prompt: object = PROMPT, **fields) -> Picked:
        body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        picked = self.picker.pick(
            self.now, body, None, self.now, headers={}, resume=lambda _: None, api=Api.COMPLETIONS
        )
        assert isinstance(picked, Picked)
        return picked

    async def until(self, condition: Callable[[], object], *, within_s: float = WAIT_S) -> None:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - the condition changes without an event
                await asyncio.sleep(0.01)

    async def has(self, *, number: int = 0, **expected) -> None:
        """Wait for a status."""
        try:
            await self.until(
                lambda: all(getattr(self.status(number), name) == value for name, value in expected.items())
            )
        except TimeoutError:
            pytest.fail(f"{expected} is expected, the status is {self.status(number)}")

    def time_turns(self, turns: list[float]) -> None:
        """Add the CPU seconds of each turn to ``turns``: on a busy machine, other processes interrupt a turn."""
        turn = self.events._turn

        def timed(until_s: float) -> None:
            began_s = time.thread_time()
            turn(until_s)
            turns.append(time.thread_time() - began_s)

        self.events._turn = timed

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"pool": self.pool.id, **labels})

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.events.close()
        for each in self.publishers:
            await each.close()


@asynccontextmanager
async def following(
    *, members: int = 1, replays: bool = True, before: Callable[[Publisher], None] = lambda _: None
) -> AsyncIterator[Following]:
    context = zmq.asyncio.Context()
    publishers = [Publisher(context, f"127.0.0.{2 + number}", replays=replays) for number in range(members)]
    for each in publishers:
        before(each)
    follows = Following(*publishers)
    try:
        for each in publishers:
            await each.subscribed()
        yield follows
    finally:
        await follows.close()
        context.destroy(linger=0)


async def ranks_of(count: int) -> tuple[KvEvents, list[KvPublisher]]:
    """Return the ports of rank 0, and the simulated engine's publishers of the ranks of one member."""
    first = KvPublisher(KvEventSettings(port=0, replay_port=0), host=RANKS_HOST)
    first.start()
    (source,) = read_event_sources(first.sources).event_sources
    assert source.port is not None
    assert source.replay_port is not None
    ports, ranks = KvEvents(enabled=True, port=source.port, replay_port=source.replay_port), [first]
    try:
        for rank in range(1, count):
            settings = KvEventSettings(port=ports.port, replay_port=ports.replay_port, rank=rank)
            ranks.append(KvPublisher(settings, host=RANKS_HOST))
            ranks[-1].start()
    except CannotPublish:
        # Another socket has the next port.
        for each in ranks:
            await each.close()
        return await ranks_of(count)
    return ports, ranks


def page_of(*ranks: int) -> EngineProfile:
    """Return what a vLLM without ``/kv_event_sources`` says about its ranks."""
    lines = [f'vllm:num_requests_{kind}{{engine="{rank}"}} 0\n' for rank in ranks for kind in ("running", "waiting")]
    return read_metrics("vLLM", "".join(lines).encode())


@asynccontextmanager
async def following_ranks(count: int) -> AsyncIterator[tuple[Following, list[KvPublisher]]]:
    """Follow a member whose ports only the pool says."""
    ports, ranks = await ranks_of(count)
    follows = Following(engine=Engine(kv_events=ports))
    follows.adopt(replace(follows.pool, members=(Member(id="m-0", address=RANKS_HOST, port=8000),)))
    try:
        yield follows, ranks
    finally:
        await follows.close()
        for each in ranks:
            await each.close()


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


async def test_topic_of_the_pool_is_subscribed():
    async with following() as follows:
        publisher = follows.publishers[0]
        follows.tell("m-0", replace(publisher.profile(), event_sources=(replace(publisher.source, topic="kv@"),)))
        await publisher.subscribed()
        await publisher.publish(stored(1, PROMPT))
        await publisher.send_frames(b"kv@m-0", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.5, [], 0]))
        await follows.has(sequence=1, state="Live", blocks=20)


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


async def test_pool_without_events_opens_no_source():
    context = zmq.asyncio.Context()
    follows = Following(Publisher(context, "127.0.0.2"), engine=Engine())
    try:
        await asyncio.sleep(0.3)
        assert follows.status() == EventsStatus()
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


async def test_host_of_an_engine_is_ignored():
    async with following() as follows:
        answer = {"0": {"enable_kv_cache_events": True, "endpoint": f"tcp://10.1.2.3:{follows.publishers[0].port}"}}
        follows.tell("m-0", read_event_sources(answer))
        await follows.publishers[0].subscribed()
        await follows.publishers[0].publish(stored(1, PROMPT))
        await follows.has(state="Live", blocks=20)


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


@asynccontextmanager
async def answering(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]) -> AsyncIterator[int]:
    """Serve connections on the first publisher's host; yield the port."""
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            answered = answer(reader, writer)
            if asyncio.iscoroutine(answered):
                await answered

    server = await asyncio.start_server(accept, "127.0.0.2", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await stop_accepting(server)
        server.close()
        for each in writers:
            each.close()


async def zmtp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *frames: bytes) -> None:
    """Answer the handshake of a subscriber, and send frames."""
    writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    await reader.readexactly(64)
    ready = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"PUB"
    writer.write(bytes((4, len(ready))) + ready + b"".join(frames))


def frames_of(*frames: bytes) -> bytes:
    last = len(frames) - 1
    return b"".join(bytes((number < last, len(each))) + each for number, each in enumerate(frames))


def logged(caplog: pytest.LogCaptureFixture, sentence: str = "KV events are incomplete") -> list[str]:
    return [each.__dict__["details"].get("reason", "") for each in caplog.records if each.getMessage() == sentence]


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
