"""Tests of the interface of every store: in memory, and with a real Redis server over TCP and a socket."""

import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from dualmap.keys.sessions import MAX_SESSIONS
from dualmap.replicas.peers import PEER_TTL_S
from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.scaling.reports import REMEMBERED_S, Report, Share
from dualmap_extproc.settings import RedisSettings
from dualmap_extproc.store.contract import (
    HISTORY_ENTRIES_MAX,
    PAGE_ENTRIES,
    Answer,
    Claim,
    Entry,
    Post,
    Question,
    Store,
)
from dualmap_extproc.store.memory import MemoryStore
from dualmap_extproc.store.redis import RedisStore
from dualmap_extproc.store.target import target_of
from redis_server import RedisServer, redis_server
from waiting import until

POOL = "llm/qwen"
NEWS = ReplicaUpdate(
    hotness=HotnessCounts(requests=7, nodes={2**64 - 1: 3, 5: 4}, split=(5, 2**64 - 1)),
    placements=(Placement(endpoint="10.0.0.1:8000", hashes=(1, 2, 2**63)),),
    bindings=(SharedBinding(session=2**64 - 2, host="m-0", tokens=1000, version=2, moved_ago_s=1.5),),
)
LOADS = {
    "m-0": SharedLoad(pending_prefill_tokens=9000, backlog_s=1.25, held_s=0.5, in_flight=3, active_kv_tokens=12),
    "m-1": SharedLoad(in_flight=1),
}
REPORT = Report(
    own=Share(desired_replicas=1.5, pending_prefill_tokens=2**40, in_flight=3, held=2, first_tokens=100, slo_met=99),
    pool=Share(desired_replicas=4.25, pending_prefill_tokens=9, in_flight=7, held=5, first_tokens=3, slo_met=0),
)
NOTHING = Report(own=Share(), pool=Share())
QUIET = ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["memory", "tcp", "socket"])
async def join(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Callable[[], Store]]:
    """A function that connects another replica to the same store."""
    memory = MemoryStore(time.monotonic)
    stores: list[Store] = []
    with server.admin as admin:
        admin.flushall()

    def one_more() -> Store:
        url = server.url if request.param == "tcp" else server.unix_url
        stores.append(memory if request.param == "memory" else RedisStore(target_of(RedisSettings(url=url))))
        return stores[-1]

    yield one_more
    for store in stores:
        await store.close()


def told(number: int) -> ReplicaUpdate:
    return replace(QUIET, hotness=HotnessCounts(requests=number, nodes={}))


def numbers(answer: Answer) -> list[int]:
    return numbers_of(answer.entries)


def numbers_of(entries: Sequence[Entry]) -> list[int]:
    return [entry.update.hotness.requests for entry in entries]


def bound(
    host: str = "m-0", *, session: int = 1, version: int = 1, tokens: int = 10, ago: float = 0.0
) -> SharedBinding:
    return SharedBinding(session=session, host=host, tokens=tokens, version=version, moved_ago_s=ago)


async def read(store: Store, peer: str, cursor: str | None = None, *, wanted: tuple[int, ...] = ()) -> Answer:
    question = Question(pool=POOL, window_s=60.0, cursor=cursor, wanted=wanted)
    (answer,) = await store.read(peer, [question])
    return answer


async def hear_all(store: Store, peer: str, cursor: str | None = None) -> tuple[list[Entry], str]:
    """Read all pages; return the entries and the cursor after the last entry."""
    entries: list[Entry] = []
    while True:
        answer = await read(store, peer, cursor)
        assert len(answer.entries) <= PAGE_ENTRIES
        entries += answer.entries
        cursor = answer.cursor
        if not answer.more:
            return entries, cursor


async def say(store: Store, peer: str, loads: Mapping[str, SharedLoad]) -> None:
    await store.publish(peer, [Post(pool=POOL, keep_s=60.0, loads=loads)])


async def report(store: Store, peer: str, told: Report) -> None:
    await store.publish(peer, [Post(pool=POOL, keep_s=60.0, report=told)])


async def publish(store: Store, peer: str, *update: ReplicaUpdate, keep_s: float = 60.0) -> None:
    for each in update:
        await store.publish(peer, [Post(pool=POOL, keep_s=keep_s, update=each)])


async def resolve(store: Store, *bindings: SharedBinding, ttl_s: float = 60.0) -> tuple[SharedBinding, ...]:
    (held,) = await store.resolve([Claim(pool=POOL, ttl_s=ttl_s, bindings=bindings)])
    return held


class TestUpdates:
    async def test_update_arrives_with_its_replica_and_age(self, join):
        began = time.monotonic()
        one, other = join(), join()
        await publish(one, "one", NEWS)
        (entry,) = (await read(other, "other")).entries
        assert (entry.peer, entry.update) == ("one", NEWS)
        # Redis has a resolution of one millisecond.
        assert 0 <= entry.age_s <= time.monotonic() - began + 0.001

    async def test_update_is_read_once_and_in_order(self, join):
        one, other = join(), join()
        await publish(one, "one", told(1), told(2))
        first = await read(other, "other")
        await publish(one, "one", told(3))
        second = await read(other, "other", first.cursor)
        third = await read(other, "other", second.cursor)
        assert [numbers(each) for each in (first, second, third)] == [[1, 2], [3], []]

    async def test_update_of_the_reading_replica_is_excluded(self, join):
        one, other = join(), join()
        await publish(one, "one-1", told(1))
        await publish(other, "other-1", told(2))
        assert numbers(await read(one, "one-1")) == [2]
        assert numbers(await read(one, "one-2")) == [1, 2]

    async def test_update_after_an_empty_response_arrives(self, join):
        one, other = join(), join()
        nothing = await read(other, "other")
        assert nothing.entries == ()
        await publish(one, "one", QUIET)
        answer = await read(other, "other", nothing.cursor)
        assert [entry.update for entry in answer.entries] == [QUIET]

    async def test_update_is_read_only_in_its_pool(self, join):
        one, other = join(), join()
        update = {"llm/a": told(1), "llm/b": told(2)}
        await one.publish("one", [Post(pool=pool, keep_s=60, update=each) for pool, each in update.items()])
        answers = await other.read("other", [Question(pool=pool, window_s=60) for pool in ("llm/b", "llm/a", "llm/c")])
        assert [numbers(each) for each in answers] == [[2], [1], []]

    async def test_update_older_than_the_window_is_not_read(self, join):
        one, other = join(), join()
        await publish(one, "one", told(1))

        async def aged() -> bool:
            return (await read(other, "other")).entries[0].age_s > 0.05

        await until(aged)
        await publish(one, "one", told(2))
        (answer,) = await other.read("other", [Question(pool=POOL, window_s=0.05)])
        assert 1 not in numbers(answer)
        (later,) = await other.read("other", [Question(pool=POOL, window_s=0.05, cursor=answer.cursor)])
        assert numbers(later) == []

    async def test_update_excludes_the_requested_sessions(self, join):
        one, other = join(), join()
        await publish(one, "one", replace(told(1), wanted=(1, 2)))
        (entry,) = (await read(other, "other")).entries
        assert entry.update.wanted == ()

    async def test_update_history_is_read_in_pages(self, join):
        one = join()
        await one.publish("one", [Post(pool=POOL, keep_s=60, update=told(number)) for number in range(1000)])
        entries, cursor = await hear_all(join(), "other")
        assert numbers_of(entries) == list(range(1000))
        await publish(one, "one", told(1000))
        assert numbers(await read(one, "other", cursor)) == [1000]

    @pytest.mark.parametrize("count", [PAGE_ENTRIES - 1, PAGE_ENTRIES, 300])
    async def test_update_history_reaches_a_replica_that_fell_behind(self, join, count):
        one, other = join(), join()
        cursor = (await read(other, "other")).cursor
        await one.publish("one", [Post(pool=POOL, keep_s=60, update=told(number)) for number in range(count)])
        await publish(other, "other", told(0))
        entries, _ = await hear_all(other, "other", cursor)
        assert numbers_of(entries) == list(range(count))

    async def test_update_infinite_times_are_bounded(self, join):
        one, other = join(), join()
        await publish(one, "one", replace(QUIET, bindings=(bound(ago=math.inf),)))
        await say(one, "one", {"m-0": SharedLoad(backlog_s=math.inf)})
        answer = await read(other, "other")
        assert answer.entries[0].update.bindings[0].moved_ago_s >= 1e9
        assert answer.loads[0].loads["m-0"].backlog_s >= 1e9


class TestLoads:
    async def test_loads_arrive_once_with_their_replica_and_age(self, join):
        began = time.monotonic()
        one, other = join(), join()
        await say(one, "one", LOADS)
        answer = await read(other, "other")
        (entry,) = answer.loads
        assert (entry.peer, entry.loads, answer.entries) == ("one", LOADS, ())
        assert 0 <= entry.age_s <= time.monotonic() - began + 0.001
        assert (await read(other, "other", answer.cursor)).loads == ()
        assert (await read(one, "one")).loads == ()

    async def test_loads_of_a_replica_are_its_latest_loads(self, join):
        one, other = join(), join()
        cursor = (await read(other, "other")).cursor
        for loads in (LOADS, {}):
            await say(one, "one", loads)
            await say(one, "two", LOADS)
        for since in (None, cursor):
            heard = {entry.peer: entry.loads for entry in (await read(other, "other", since)).loads}
            assert heard == {"one": {}, "two": LOADS}

    async def test_loads_are_stored_separately_from_updates(self, join):
        one, other = join(), join()
        await publish(one, "one", replace(told(1), loads=LOADS))
        answer = await read(other, "other")
        assert (answer.loads, answer.entries[0].update.loads) == ((), None)

    async def test_loads_arrive_at_once_despite_a_long_update_history(self, join):
        one, other = join(), join()
        await one.publish("one", [Post(pool=POOL, keep_s=60, update=told(number)) for number in range(200)])
        await say(one, "one", LOADS)
        first = await read(other, "other")
        assert first.more
        assert [entry.loads for entry in first.loads] == [LOADS]
        assert (await read(other, "other", first.cursor)).loads == ()

    async def test_loads_are_read_only_in_their_pool(self, join):
        one, other = join(), join()
        await say(one, "one", LOADS)
        (answer,) = await other.read("other", [Question(pool="llm/other", window_s=60)])
        assert answer.loads == ()


class TestReports:
    async def test_report_arrives_once_with_its_replica_and_age(self, join):
        began = time.monotonic()
        one, other = join(), join()
        await report(one, "one", REPORT)
        answer = await read(other, "other")
        (entry,) = answer.reports
        assert (entry.peer, entry.report, answer.loads, answer.entries) == ("one", REPORT, (), ())
        assert 0 <= entry.age_s <= time.monotonic() - began + 0.001
        assert (await read(other, "other", answer.cursor)).reports == ()
        assert (await read(one, "one")).reports == ()

    async def test_report_of_a_replica_is_its_latest_report(self, join):
        one, other = join(), join()
        cursor = (await read(other, "other")).cursor
        for each in (REPORT, NOTHING):
            await report(one, "one", each)
            await report(one, "two", REPORT)
        for since in (None, cursor):
            heard = {entry.peer: entry.report for entry in (await read(other, "other", since)).reports}
            assert heard == {"one": NOTHING, "two": REPORT}

    async def test_report_is_read_only_in_its_pool(self, join):
        one, other = join(), join()
        await report(one, "one", REPORT)
        (answer,) = await other.read("other", [Question(pool="llm/other", window_s=60)])
        assert answer.reports == ()

    async def test_report_expires_after_a_minute(self):
        """This is a test of the store in memory; test_store_redis.py has the test with Redis."""
        now = 1000.0
        store = MemoryStore(lambda: now)
        await report(store, "one", REPORT)
        now += REMEMBERED_S - 1.0
        assert [entry.age_s for entry in (await read(store, "late")).reports] == [REMEMBERED_S - 1.0]
        now += 1.0
        assert (await read(store, "late")).reports == ()


class TestHistory:
    """This is a test of the store in memory, with the test's clock; test_store_redis.py has the test with Redis."""

    async def test_history_has_minutes_of_updates_and_seconds_of_loads(self):
        now = 1000.0
        store = MemoryStore(lambda: now)
        for number in range(1, 4):
            post = Post(pool=POOL, keep_s=305.0, update=told(number), loads=LOADS)
            await store.publish(f"router-{number}", [post])
            now += 120.0 if number < 3 else 2.0
        (answer,) = await store.read("late", [Question(pool=POOL, window_s=240.0)])
        assert [(entry.update.hotness.requests, entry.age_s) for entry in answer.entries] == [(2, 122.0), (3, 2.0)]
        assert [(entry.peer, entry.age_s) for entry in answer.loads] == [("router-3", 2.0)]
        now += PEER_TTL_S - 2.0
        assert (await read(store, "late")).loads == ()

    async def test_history_above_the_limit_drops_the_oldest(self):
        store = MemoryStore(lambda: 1000.0)
        count = HISTORY_ENTRIES_MAX + 200
        await store.publish("one", [Post(pool=POOL, keep_s=60, update=told(number)) for number in range(count)])
        entries, _ = await hear_all(store, "other")
        assert numbers_of(entries) == list(range(200, count))


class TestBindingsInMemory:
    """Redis removes expired bindings by itself, and has its own limit of memory."""

    async def test_bindings_of_a_pool_are_bounded_and_the_oldest_end(self):
        store = MemoryStore(lambda: 1000.0)
        count = MAX_SESSIONS + 10
        await resolve(store, *(bound("m-0", session=session) for session in range(count)))
        found = (await read(store, "one", wanted=tuple(range(count)))).bindings
        assert [each.session for each in found] == list(range(10, count))

    async def test_expired_bindings_end_together(self):
        now = 1000.0
        store = MemoryStore(lambda: now)
        await resolve(store, *(bound("m-0", session=session) for session in range(10)), ttl_s=60)
        now += 60.0
        await resolve(store, bound("m-0", session=10), ttl_s=60)
        assert list(store._pool(POOL).bindings) == [10]


class TestBindings:
    async def test_binding_written_first_is_kept_at_equal_version(self, join):
        one, other = join(), join()
        assert [each.host for each in await resolve(one, bound("m-0"))] == ["m-0"]
        (held,) = await resolve(other, bound("m-1", tokens=99))
        assert (held.host, held.version, held.tokens) == ("m-0", 1, 10)

    async def test_binding_of_a_higher_version_replaces_the_old_binding(self, join):
        one, other = join(), join()
        await resolve(one, bound("m-0", version=9))
        (held,) = await resolve(other, bound("m-1", version=10))
        assert (held.host, held.version) == ("m-1", 10)

    async def test_binding_of_a_lower_version_is_rejected_for_the_same_host(self, join):
        one, other = join(), join()
        await resolve(one, bound("m-0", version=3, tokens=500))
        (held,) = await resolve(other, bound("m-0", version=2))
        assert (held.version, held.tokens) == (3, 500)

    async def test_binding_written_again_updates_tokens_but_not_move_time(self, join):
        one, other = join(), join()
        await resolve(one, bound(ago=100.0))
        (held,) = await resolve(other, bound(tokens=77, ago=0.0))
        assert held.tokens == 77
        assert held.moved_ago_s >= 100.0

    async def test_bindings_of_several_sessions_are_decided_separately(self, join):
        one, other = join(), join()
        await resolve(one, *(bound("m-0", session=session) for session in (1, 3)))
        held = await resolve(other, *(bound("m-1", session=session) for session in (1, 2, 3)))
        assert [(each.session, each.host) for each in held] == [(1, "m-0"), (2, "m-1"), (3, "m-0")]

    async def test_requested_bindings_are_found_if_stored(self, join):
        one, other = join(), join()
        first = bound("host with spaces", session=2**64 - 1, tokens=5, version=4, ago=2.0)
        await resolve(one, first)
        (found,) = (await read(other, "other", wanted=(2**64 - 1, 17))).bindings
        assert replace(found, moved_ago_s=2.0) == first
        assert found.moved_ago_s >= 2.0

    async def test_bindings_are_found_despite_a_long_update_history(self, join):
        one, other = join(), join()
        await one.publish("one", [Post(pool=POOL, keep_s=60, update=told(number)) for number in range(200)])
        await resolve(one, bound())
        answer = await read(other, "other", wanted=(1,))
        assert (len(answer.entries), len(answer.bindings), answer.more) == (PAGE_ENTRIES, 1, True)

    async def test_binding_is_read_only_in_its_pool(self, join):
        one = join()
        await resolve(one, bound())
        (answer,) = await one.read("one", [Question(pool="llm/other", window_s=60, wanted=(1,))])
        assert answer.bindings == ()

    async def test_binding_expires_unless_renewed(self, join):
        one, other = join(), join()
        await resolve(one, bound("m-0", session=1), bound("m-0", session=2), ttl_s=0.2)
        await resolve(one, bound("m-0", session=1), ttl_s=60)

        async def expired() -> bool:
            return len((await read(other, "other", wanted=(1, 2))).bindings) == 1

        await until(expired)
        held = await resolve(other, bound("m-1", session=1), bound("m-1", session=2))
        assert [each.host for each in held] == ["m-0", "m-1"]
