"""Tests of the Redis store's implementation: keys and their expiry, trimming, invalid entries, and ages."""

from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.replicas.peers import PEER_TTL_S
from dualmap.replicas.update import Placement
from dualmap.scaling.reports import REMEMBERED_S
from dualmap_extproc.store.codec import encode_report, encode_update
from dualmap_extproc.store.contract import HISTORY_ENTRIES_MAX, Post, Question
from dualmap_extproc.store.redis import loads_key, reports_key, session_key, updates_key
from extproc import redis_stores
from extproc.redis_stores import (
    BINDING,
    CLAIM,
    DEMAND_STREAM,
    LOADS,
    LOADS_STREAM,
    NEWS,
    POOL,
    POST,
    REPORT,
    SESSION,
    STREAM,
    opened,
    read,
    works,
)

# The size of the largest entry that a router reads.
ENTRY_BYTES = 4 * 2**20

# This imports fixtures, which pytest finds by their names in this module.
shared_server = redis_stores.shared_server
server = redis_stores.server


class TestKeys:
    async def test_redis_keys_have_the_documented_names_and_expire(self, server):
        async with opened(server.url) as store:
            await works(store)
        keys = (STREAM, LOADS_STREAM, DEMAND_STREAM, SESSION)
        with server.admin as admin:
            assert {key.decode() for key in admin.scan_iter()} == set(keys)
            assert 0 < admin.pttl(STREAM) <= 60_000
            assert 0 < admin.pttl(LOADS_STREAM) <= 9_000
            assert 60_000 < admin.pttl(DEMAND_STREAM) <= 66_000
            assert 0 < admin.pttl(SESSION) <= 60_000
        assert (updates_key(POOL), loads_key(POOL), reports_key(POOL), session_key(POOL, 255)) == keys
        document = (Path(__file__).parents[2] / "docs/state.md").read_text()
        assert all(f"`{key}`" in document for key in keys)

    async def test_redis_stream_is_trimmed_by_age(self, server):
        with server.admin as admin:
            for number in range(1, 1001):
                for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM):
                    admin.xadd(stream, {"n": "old"}, id=f"{number}-0")
            async with opened(server.url) as store:
                await store.publish("teller", [POST])
            # Redis trims a stream in blocks of a hundred entries.
            assert max(admin.xlen(stream) for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM)) <= 101

    async def test_redis_stream_is_trimmed_by_length_after_clock_goes_back(self, server):
        with server.admin as admin:
            pipeline = admin.pipeline()
            for stream, count in (
                (STREAM, HISTORY_ENTRIES_MAX + 1000),
                (LOADS_STREAM, 5096),
                (DEMAND_STREAM, 9192),
            ):
                for number in range(count):
                    pipeline.xadd(stream, {"n": "ahead"}, id=f"{2**45}-{number}")
            pipeline.execute()
            async with opened(server.url) as store:
                await store.publish("teller", [POST])
            assert admin.xlen(STREAM) <= HISTORY_ENTRIES_MAX + 100
            assert admin.xlen(LOADS_STREAM) <= 4196
            assert admin.xlen(DEMAND_STREAM) <= 8292

    async def test_redis_stream_is_trimmed_by_size_in_bytes(self, server):
        # The size is the maximum for a busy router's entry, slightly more than 128 KiB.
        placement = Placement(endpoint="10.0.0.1:8000", hashes=tuple(range(2**14)))
        large = Post(pool=POOL, keep_s=60.0, update=replace(NEWS, placements=(placement,)))
        async with opened(server.url) as store:
            await store.publish("teller", [POST])
            for _ in range(73):
                await store.publish("teller", [large] * 7)
            with server.admin as admin:
                assert admin.xlen(STREAM) == 512
                (oldest,) = admin.xrange(STREAM, count=1)
                await store.publish("teller", [large])
                # The store removes slightly more than the excess, so that it does not trim every time.
                assert 490 < admin.xlen(STREAM) < 512
                assert not admin.xrange(STREAM, oldest[0], oldest[0])
                assert admin.xlen(LOADS_STREAM) == 1

    @pytest.mark.parametrize("bytes_told", [b"1" * 400, b"-5", b"inf", b"9" * 15, b"", b"junk"])
    async def test_redis_stream_with_invalid_byte_count_is_corrected(self, server, bytes_told):
        async with opened(server.url) as store:
            with server.admin as admin:
                await store.publish("teller", [POST])
                admin.xadd(STREAM, {"p": "teller", "n": encode_update(NEWS), "b": bytes_told})
                for _ in range(5):
                    await store.publish("teller", [POST])
                assert admin.xlen(STREAM) >= 5

    async def test_redis_url_selects_the_database(self, server):
        async with opened(f"{server.url}/3") as store:
            await works(store)
        with server.admin as admin:
            assert not admin.keys()
            admin.select(3)
            assert len(admin.keys()) == 4


class TestInvalidData:
    async def test_redis_key_of_another_type_is_replaced(self, server):
        async with opened(server.url) as store:
            with server.admin as admin:
                for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM):
                    admin.set(stream, "a string")
                admin.lpush(SESSION, "a list")
                answer = await read(store, wanted=(255,))
                assert (answer.entries, answer.loads, answer.reports, answer.bindings) == ((), (), (), ())
                assert answer.unreadable == 4
                assert (await read(store, answer.cursor, wanted=(255,))).unreadable == 1
                for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM):
                    admin.set(stream, "a string")
            await works(store)
            assert (await read(store, wanted=(255,))).unreadable == 0

    @pytest.mark.parametrize("stream", [STREAM, LOADS_STREAM, DEMAND_STREAM], ids=["news", "loads", "demand"])
    async def test_redis_stream_with_largest_id_still_accepts_entries(self, server, stream):
        async with opened(server.url) as store:
            answer = await read(store)
            with server.admin as admin:
                admin.xadd(stream, {"p": "q", "n": "z"}, id="18446744073709551615-18446744073709551614")
            # The result is the same for each order of reads and writes.
            for _ in range(3):
                answer = await read(store, answer.cursor)
            await works(store)
            with server.admin as admin:
                admin.delete(stream)
                admin.xadd(stream, {"p": "q", "n": "z"}, id="18446744073709551615-18446744073709551615")
            await store.publish("teller", [POST])
            for _ in range(3):
                answer = await read(store, answer.cursor)

    @pytest.mark.parametrize(
        "fields",
        [
            {"p": "teller"},
            {"n": encode_update(NEWS)},
            {"p": b"\xff", "n": encode_update(NEWS)},
            {"p": "teller", "n": encode_update(NEWS)[:-1]},
            {"p": "teller", "n": b"\x00" * 100},
            {"": ""},
        ],
    )
    async def test_invalid_redis_entry_is_counted_and_skipped(self, server, fields):
        async with opened(server.url) as store:
            await store.publish("teller", [POST])
            with server.admin as admin:
                for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM):
                    admin.xadd(stream, fields)
            assert [entry.loads for entry in (await read(store)).loads] == [LOADS]
            await store.publish("teller", [POST])
            answer = await read(store)
            assert (len(answer.entries), len(answer.loads), len(answer.reports), answer.unreadable) == (2, 1, 1, 3)
            assert (await read(store, answer.cursor)).unreadable == 0

    @pytest.mark.parametrize("stream", [STREAM, LOADS_STREAM, DEMAND_STREAM], ids=["news", "loads", "demand"])
    async def test_oversized_redis_entries_are_removed(self, server, stream):
        async with opened(server.url) as store:
            cursor, unreadable, entries = None, 0, 0
            with server.admin as admin:
                for _ in range(3):
                    admin.xadd(stream, {"p": "teller", "n": bytes(ENTRY_BYTES)})
                    await store.publish("teller", [POST])
                for _ in range(8):
                    answer = await read(store, cursor)
                    cursor = answer.cursor
                    unreadable += answer.unreadable
                    entries += len(answer.entries)
                assert admin.memory_usage(stream) < ENTRY_BYTES
                assert admin.xlen(stream) == 1
                assert (unreadable, entries) == (3, 3)
                admin.xadd(stream, {"n": bytes(ENTRY_BYTES)}, id=f"{2**45}-{2**63}")
                assert (await read(store, cursor)).unreadable == 1
                assert not admin.exists(stream), "the script cannot compute with a large number"

    async def test_redis_page_ends_after_many_bytes(self, server):
        with server.admin as admin:
            for _ in range(8):
                admin.xadd(STREAM, {"p": "teller", "n": bytes(ENTRY_BYTES // 2)})
        async with opened(server.url) as store:
            cursor, pages = None, []
            for _ in range(5):
                answer = await read(store, cursor)
                cursor = answer.cursor
                pages.append(answer.unreadable)
        assert pages == [2, 2, 2, 2, 0]

    async def test_oversized_redis_binding_is_removed(self, server):
        async with opened(server.url) as store:
            with server.admin as admin:
                value = b"1 9 0 9 " + b"m" * 2000
                admin.set(SESSION, value)
                answer = await read(store, wanted=(255,))
                assert (answer.bindings, answer.unreadable) == ((), 1)
                assert not admin.exists(SESSION)
                admin.set(SESSION, value)
                ((held,),) = await store.resolve([CLAIM])
                assert held.host == "m-0"
                assert len(admin.get(SESSION)) < 100

    async def test_redis_entry_of_another_stream_is_skipped(self, server):
        everything = {"p": "teller", "n": encode_update(replace(NEWS, loads=LOADS))}
        async with opened(server.url) as store:
            with server.admin as admin:
                admin.xadd(STREAM, everything)
                admin.xadd(LOADS_STREAM, everything)
            answer = await read(store)
        assert [entry.update for entry in answer.entries] == [NEWS]
        assert [entry.loads for entry in answer.loads] == [LOADS]

    @pytest.mark.parametrize("value", [b"", b"nonsense", b"1 2 3 4", b"1 a b c host", b"9 1 2 3 host", b"\xff" * 50])
    async def test_invalid_redis_binding_is_ignored_and_overwritten(self, server, value):
        async with opened(server.url) as store:
            with server.admin as admin:
                admin.set(SESSION, value)
            answer = await read(store, wanted=(255,))
            assert (answer.bindings, answer.unreadable) == ((), 1)
            ((held,),) = await store.resolve([CLAIM])
            assert held.host == "m-0"
            assert len((await read(store, wanted=(255,))).bindings) == 1

    @pytest.mark.parametrize(
        "value", [b"1 9999999999 0 5 host", b"1 0 0 -5 host", b"1 -1 0 5 host", b"1 0 0 1%s host" % (b"0" * 400)]
    )
    async def test_redis_binding_out_of_bounds_is_ignored(self, server, value):
        async with opened(server.url) as store:
            with server.admin as admin:
                admin.set(SESSION, value)
            assert (await read(store, wanted=(255,))).bindings == ()
            await store.resolve([CLAIM])

    async def test_invalid_host_accepted_by_the_redis_script_is_ignored(self, server):
        async with opened(server.url) as store:
            with server.admin as admin:
                admin.set(SESSION, b"1 9 1 1 \xff")
            assert await store.resolve([CLAIM]) == ((BINDING,),)

    @pytest.mark.parametrize("emptied", [True, False])
    async def test_redis_cursor_ahead_of_the_clock_still_reads_new_entries(self, server, emptied):
        async with opened(server.url) as store:
            with server.admin as admin:
                update = encode_update(replace(NEWS, loads=LOADS))
                for stream, told in ((STREAM, update), (LOADS_STREAM, update), (DEMAND_STREAM, encode_report(REPORT))):
                    admin.xadd(stream, {"p": "teller", "n": told}, id=f"{2**45}-5")
                ahead = await read(store)
                assert (len(ahead.entries), len(ahead.loads), len(ahead.reports)) == (1, 1, 1)
                if emptied:
                    admin.delete(STREAM, LOADS_STREAM, DEMAND_STREAM)
            again = await read(store, ahead.cursor)
            await store.publish("teller", [POST])
            assert (again.entries, again.loads, again.reports) == ((), (), ())
            later = await read(store, again.cursor)
            assert (len(later.entries), len(later.loads), len(later.reports)) == (1, 1, 1)


class TestAges:
    """The test writes entries with explicit times of the server's clock."""

    async def test_joining_replica_reads_updates_by_age_at_the_server(self, server):
        async with opened(server.url) as store:
            with server.admin as admin:
                seconds, microseconds = admin.time()
                now_ms = 1000 * seconds + microseconds // 1000
                for ago_s in (400, 240, 20):
                    told = {"p": f"before-{ago_s}", "n": encode_update(NEWS)}
                    admin.xadd(STREAM, told, id=f"{now_ms - 1000 * ago_s}-0")
                for peer, ago_s in (("gone", 4.0), ("there", 2.5), ("there", 1.0)):
                    told = {"p": peer, "n": encode_update(replace(NEWS, loads=LOADS if ago_s < 2 else {}))}
                    admin.xadd(LOADS_STREAM, told, id=f"{int(now_ms - 1000 * ago_s)}-0")
                for peer, ago_s in (
                    ("forgotten", REMEMBERED_S + 2),
                    ("gone", 40),
                    ("gone", 30),
                    ("there", 1),
                ):
                    own = replace(REPORT.own, held=int(ago_s))
                    told = {"p": peer, "n": encode_report(replace(REPORT, own=own))}
                    admin.xadd(DEMAND_STREAM, told, id=f"{int(now_ms - 1000 * ago_s)}-0")
            (answer,) = await store.read("late", [Question(pool=POOL, window_s=300.0)])
            assert [(entry.peer, entry.report.own.held) for entry in answer.reports] == [("gone", 30), ("there", 1)]
            assert all(ago_s <= entry.age_s < ago_s + 20 for entry, ago_s in zip(answer.reports, (30, 1), strict=True))
        assert [entry.peer for entry in answer.entries] == ["before-240", "before-20"]
        assert 240 <= answer.entries[0].age_s < 260
        assert [(entry.peer, entry.loads) for entry in answer.loads] in ([("there", LOADS)], [])
        assert all(1.0 <= entry.age_s < PEER_TTL_S for entry in answer.loads)
