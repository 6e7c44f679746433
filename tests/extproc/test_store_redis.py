"""What the Redis store does beyond the contract: keys, credentials, TLS, Redis Cluster, and every way to fail."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis.asyncio.client import Pipeline

from dualmap.hotness import HotnessCounts
from dualmap.news import News, Placement, SharedBinding, SharedLoad
from dualmap.peers import PEER_TTL_S
from dualmap.shares import REMEMBERED_S, Report, Share
from dualmap_extproc.settings import RedisSettings
from dualmap_extproc.store.codec import encode_news, encode_report
from dualmap_extproc.store.contract import (
    HISTORY_ENTRIES_MAX,
    Answer,
    Claim,
    Failure,
    Post,
    Question,
    StoreError,
)
from dualmap_extproc.store.redis import RedisStore, loads_key, news_key, reports_key, session_key
from dualmap_extproc.store.target import target_of
from dualmap_extproc.tls import self_signed
from redis_server import RedisServer, redis_cluster, redis_server
from waiting import until

POOL = "llm/qwen"
NEWS = News(hotness=HotnessCounts(requests=7, nodes={5: 4}))
BINDING = SharedBinding(session=255, host="m-0", tokens=10, version=1, moved_ago_s=0.0)
QUESTION = Question(pool=POOL, window_s=60.0)
LOADS = {"m-0": SharedLoad(in_flight=1)}
REPORT = Report(own=Share(desired_replicas=0.75, in_flight=3), pool=Share(desired_replicas=2.5, in_flight=9))
POST = Post(pool=POOL, keep_s=60.0, news=NEWS, loads=LOADS, report=REPORT)
CLAIM = Claim(pool=POOL, ttl_s=60.0, bindings=(BINDING,))
STREAM = "dualmap:1:{llm/qwen}:news"
LOADS_STREAM = "dualmap:1:{llm/qwen}:loads"
DEMAND_STREAM = "dualmap:1:{llm/qwen}:demand"
SESSION = "dualmap:1:{llm/qwen}:session:00000000000000ff"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with shared_server.admin as admin:
        admin.flushall()
    return shared_server


@contextlib.asynccontextmanager
async def opened(url: str, password: str | None = None, ca_file: Path | None = None) -> AsyncIterator[RedisStore]:
    store = RedisStore(target_of(RedisSettings(url=url, password=password, ca_file=ca_file)))
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """What is no Redis server: it says the same to everything."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                writer.write(answer * 10)
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as listener:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def hear(store: RedisStore, cursor: str | None = None, *, wanted: tuple[int, ...] = ()) -> Answer:
    (answer,) = await store.hear("listener", [replace(QUESTION, cursor=cursor, wanted=wanted)])
    return answer


async def failure(store: RedisStore) -> Failure:
    with pytest.raises(StoreError) as caught:
        await store.hear("listener", [QUESTION])
    return caught.value.failure


async def works(store: RedisStore, pools: tuple[str, ...] = (POOL,)) -> None:
    """Everything a store does, for several pools in one go."""
    held = await store.settle([replace(CLAIM, pool=pool) for pool in pools])
    assert [each.host for holding in held for each in holding] == ["m-0"] * len(pools)
    await store.publish("teller", [replace(POST, pool=pool) for pool in pools])
    questions = [replace(QUESTION, pool=pool, wanted=(BINDING.session,)) for pool in pools]
    for answer in await store.hear("listener", questions):
        assert [entry.news for entry in answer.entries] == [NEWS]
        assert [entry.loads for entry in answer.loads] == [LOADS]
        assert [entry.report for entry in answer.reports] == [REPORT]
        assert [binding.host for binding in answer.bindings] == ["m-0"]


class TestKeys:
    async def test_they_are_named_as_documented_and_all_expire(self, server):
        async with opened(server.url) as store:
            await works(store)
        keys = (STREAM, LOADS_STREAM, DEMAND_STREAM, SESSION)
        with server.admin as admin:
            assert {key.decode() for key in admin.scan_iter()} == set(keys)
            assert 0 < admin.pttl(STREAM) <= 60_000
            assert 0 < admin.pttl(LOADS_STREAM) <= 9_000
            assert 60_000 < admin.pttl(DEMAND_STREAM) <= 66_000
            assert 0 < admin.pttl(SESSION) <= 60_000
        assert (news_key(POOL), loads_key(POOL), reports_key(POOL), session_key(POOL, 255)) == keys
        document = (Path(__file__).parents[2] / "docs/state.md").read_text()
        assert all(f"`{key}`" in document for key in keys)

    async def test_a_stream_is_trimmed_by_age(self, server):
        with server.admin as admin:
            for number in range(1, 1001):
                for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM):
                    admin.xadd(stream, {"n": "old"}, id=f"{number}-0")
            async with opened(server.url) as store:
                await store.publish("teller", [POST])
            # Redis trims whole blocks of a hundred entries.
            assert max(admin.xlen(stream) for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM)) <= 101

    async def test_streams_are_trimmed_by_length_when_the_servers_clock_was_set_back(self, server):
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

    async def test_a_stream_is_trimmed_by_bytes(self, server):
        # As large as an entry of a busy router can be, and a bit more than 128 KiB.
        placement = Placement(endpoint="10.0.0.1:8000", hashes=tuple(range(2**14)))
        large = Post(pool=POOL, keep_s=60.0, news=replace(NEWS, placements=(placement,)))
        async with opened(server.url) as store:
            await store.publish("teller", [POST])
            for _ in range(73):
                await store.publish("teller", [large] * 7)
            with server.admin as admin:
                assert admin.xlen(STREAM) == 512
                (oldest,) = admin.xrange(STREAM, count=1)
                await store.publish("teller", [large])
                # Some more than what is too much, so that it is not done at every time.
                assert 490 < admin.xlen(STREAM) < 512
                assert not admin.xrange(STREAM, oldest[0], oldest[0])
                assert admin.xlen(LOADS_STREAM) == 1

    @pytest.mark.parametrize("bytes_told", [b"1" * 400, b"-5", b"inf", b"9" * 15, b"", b"junk"])
    async def test_junk_for_the_count_of_bytes_does_not_last(self, server, bytes_told):
        async with opened(server.url) as store:
            with server.admin as admin:
                await store.publish("teller", [POST])
                admin.xadd(STREAM, {"p": "teller", "n": encode_news(NEWS), "b": bytes_told})
                for _ in range(5):
                    await store.publish("teller", [POST])
                assert admin.xlen(STREAM) >= 5

    async def test_a_database_is_chosen_by_the_url(self, server):
        async with opened(f"{server.url}/3") as store:
            await works(store)
        with server.admin as admin:
            assert not admin.keys()
            admin.select(3)
            assert len(admin.keys()) == 4


class TestJunk:
    async def test_keys_of_another_type_are_ours_and_are_mended(self, server):
        async with opened(server.url) as store:
            with server.admin as admin:
                for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM):
                    admin.set(stream, "a string")
                admin.lpush(SESSION, "a list")
                answer = await hear(store, wanted=(255,))
                assert (answer.entries, answer.loads, answer.reports, answer.bindings) == ((), (), (), ())
                assert answer.unreadable == 4
                assert (await hear(store, answer.cursor, wanted=(255,))).unreadable == 1
                for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM):
                    admin.set(stream, "a string")
            await works(store)
            assert (await hear(store, wanted=(255,))).unreadable == 0

    @pytest.mark.parametrize("stream", [STREAM, LOADS_STREAM, DEMAND_STREAM], ids=["news", "loads", "demand"])
    async def test_the_last_id_there_is_ends_nothing(self, server, stream):
        async with opened(server.url) as store:
            answer = await hear(store)
            with server.admin as admin:
                admin.xadd(stream, {"p": "q", "n": "z"}, id="18446744073709551615-18446744073709551614")
            # Whoever hears of it first, and whoever writes first.
            for _ in range(3):
                answer = await hear(store, answer.cursor)
            await works(store)
            with server.admin as admin:
                admin.delete(stream)
                admin.xadd(stream, {"p": "q", "n": "z"}, id="18446744073709551615-18446744073709551615")
            await store.publish("teller", [POST])
            for _ in range(3):
                answer = await hear(store, answer.cursor)

    @pytest.mark.parametrize(
        "fields",
        [
            {"p": "teller"},
            {"n": encode_news(NEWS)},
            {"p": b"\xff", "n": encode_news(NEWS)},
            {"p": "teller", "n": encode_news(NEWS)[:-1]},
            {"p": "teller", "n": b"\x00" * 100},
            {"": ""},
        ],
    )
    async def test_an_entry_that_is_no_news_is_counted_and_left_out(self, server, fields):
        async with opened(server.url) as store:
            await store.publish("teller", [POST])
            with server.admin as admin:
                for stream in (STREAM, LOADS_STREAM, DEMAND_STREAM):
                    admin.xadd(stream, fields)
            assert [entry.loads for entry in (await hear(store)).loads] == [LOADS]
            await store.publish("teller", [POST])
            answer = await hear(store)
            assert (len(answer.entries), len(answer.loads), len(answer.reports), answer.unreadable) == (2, 1, 1, 3)
            assert (await hear(store, answer.cursor)).unreadable == 0

    async def test_each_stream_is_taken_for_its_own_kind_only(self, server):
        everything = {"p": "teller", "n": encode_news(replace(NEWS, loads=LOADS))}
        async with opened(server.url) as store:
            with server.admin as admin:
                admin.xadd(STREAM, everything)
                admin.xadd(LOADS_STREAM, everything)
            answer = await hear(store)
        assert [entry.news for entry in answer.entries] == [NEWS]
        assert [entry.loads for entry in answer.loads] == [LOADS]

    @pytest.mark.parametrize("value", [b"", b"nonsense", b"1 2 3 4", b"1 a b c host", b"9 1 2 3 host", b"\xff" * 50])
    async def test_a_binding_that_is_none_is_unknown_and_overwritten(self, server, value):
        async with opened(server.url) as store:
            with server.admin as admin:
                admin.set(SESSION, value)
            answer = await hear(store, wanted=(255,))
            assert (answer.bindings, answer.unreadable) == ((), 1)
            ((held,),) = await store.settle([CLAIM])
            assert held.host == "m-0"
            assert len((await hear(store, wanted=(255,))).bindings) == 1

    @pytest.mark.parametrize(
        "value", [b"1 9999999999 0 5 host", b"1 0 0 -5 host", b"1 -1 0 5 host", b"1 0 0 1%s host" % (b"0" * 400)]
    )
    async def test_a_binding_out_of_bounds_is_unknown(self, server, value):
        async with opened(server.url) as store:
            with server.admin as admin:
                admin.set(SESSION, value)
            assert (await hear(store, wanted=(255,))).bindings == ()
            await store.settle([CLAIM])

    async def test_a_host_that_only_the_script_took_for_one_does_no_harm(self, server):
        async with opened(server.url) as store:
            with server.admin as admin:
                admin.set(SESSION, b"1 9 1 1 \xff")
            assert await store.settle([CLAIM]) == ((BINDING,),)

    @pytest.mark.parametrize("emptied", [True, False])
    async def test_a_cursor_of_a_clock_that_was_ahead_does_not_make_deaf(self, server, emptied):
        async with opened(server.url) as store:
            with server.admin as admin:
                news = encode_news(replace(NEWS, loads=LOADS))
                for stream, told in ((STREAM, news), (LOADS_STREAM, news), (DEMAND_STREAM, encode_report(REPORT))):
                    admin.xadd(stream, {"p": "teller", "n": told}, id=f"{2**45}-5")
                ahead = await hear(store)
                assert (len(ahead.entries), len(ahead.loads), len(ahead.reports)) == (1, 1, 1)
                if emptied:
                    admin.delete(STREAM, LOADS_STREAM, DEMAND_STREAM)
            again = await hear(store, ahead.cursor)
            await store.publish("teller", [POST])
            assert (again.entries, again.loads, again.reports) == ((), (), ())
            later = await hear(store, again.cursor)
            assert (len(later.entries), len(later.loads), len(later.reports)) == (1, 1, 1)


class TestAges:
    """By the server's clock: entries are put there with the times that they shall have."""

    async def test_a_replica_that_joins_hears_minutes_of_news_and_seconds_of_loads(self, server):
        async with opened(server.url) as store:
            with server.admin as admin:
                seconds, microseconds = admin.time()
                now_ms = 1000 * seconds + microseconds // 1000
                for ago_s in (400, 240, 20):
                    told = {"p": f"before-{ago_s}", "n": encode_news(NEWS)}
                    admin.xadd(STREAM, told, id=f"{now_ms - 1000 * ago_s}-0")
                for peer, ago_s in (("gone", 4.0), ("there", 2.5), ("there", 1.0)):
                    told = {"p": peer, "n": encode_news(replace(NEWS, loads=LOADS if ago_s < 2 else {}))}
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
            (answer,) = await store.hear("late", [Question(pool=POOL, window_s=300.0)])
            assert [(entry.peer, entry.report.own.held) for entry in answer.reports] == [("gone", 30), ("there", 1)]
            assert [round(entry.age_s) for entry in answer.reports] == [30, 1]
        assert [entry.peer for entry in answer.entries] == ["before-240", "before-20"]
        assert 240 <= answer.entries[0].age_s < 260
        assert [(entry.peer, entry.loads) for entry in answer.loads] in ([("there", LOADS)], [])
        assert all(1.0 <= entry.age_s < PEER_TTL_S for entry in answer.loads)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis"), password="hidden@word") as running:
        yield running


class TestCredentials:
    async def test_the_password_opens_and_another_does_not(self, guarded):
        with guarded.admin as admin:
            admin.flushall()
        async with opened(guarded.url, "hidden@word") as store:
            await works(store)
        for password in ("wrong", None):
            async with opened(guarded.url, password) as store:
                assert await failure(store) is Failure.DENIED

    async def test_the_documented_rights_are_enough_and_needed(self, guarded):
        words = documented_rights("other")[0]
        url = guarded.url.replace("redis://", "redis://router:other@")
        with guarded.admin as admin:
            admin.execute_command(*words)
            rights = [word for word in words if word.startswith("+")]
            async with opened(url) as store:
                await needs_every_right(store, admin)
            for right in rights:
                admin.execute_command("ACL", "SETUSER", "router", f"-{right[1:]}")
                async with opened(url) as store:
                    with pytest.raises(StoreError) as caught:
                        await needs_every_right(store, admin)
                    assert caught.value.failure is Failure.DENIED, right
                admin.execute_command("ACL", "SETUSER", "router", right)

    async def test_no_error_shows_the_password(self, guarded):
        url = guarded.url.replace("redis://", "redis://hidden@")
        async with opened(url, "hidden@wrong") as store:
            with pytest.raises(StoreError) as caught:
                await hear(store)
        assert "hidden" not in repr(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__

    async def test_a_server_that_repeats_the_password_is_quoted_without_it(self):
        answer = b"-ERR unknown command `AUTH`, with args beginning with: `hidden-word`\r\n"
        async with answering(answer) as url, opened(url, "hidden-word") as store:
            with pytest.raises(StoreError, match=r"with args beginning with: `\*\*\*`"):
                await hear(store)


def documented_rights(password: str) -> list[list[str]]:
    """The commands of the document that give a user its rights: the ones always needed, and a cluster's."""
    document = (Path(__file__).parents[2] / "docs/state.md").read_text().splitlines()
    return [line.replace("PASSWORD", password).split() for line in document if line.startswith("ACL SETUSER router ")]


async def needs_every_right(store: RedisStore, admin: redis.Redis) -> None:
    admin.flushall()
    await works(store)
    await works_again(store, POOL)
    admin.delete(STREAM)
    admin.set(STREAM, "a string")
    await store.publish("teller", [POST])


class TestTls:
    @pytest.fixture
    async def front(self, server: RedisServer, tmp_path: Path) -> AsyncIterator[tuple[int, Path]]:
        """A port that speaks TLS in front of the server, and the file its certificate is checked against."""
        key, certificate = self_signed()
        (tmp_path / "tls.key").write_bytes(key)
        (tmp_path / "tls.crt").write_bytes(certificate)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    writer.write(data)
            writer.close()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(carry(reader, server_writer), carry(server_reader, writer))

        listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
        async with listener:
            yield listener.sockets[0].getsockname()[1], tmp_path / "tls.crt"

    async def test_it_works_with_the_servers_ca(self, front):
        port, ca_file = front
        async with opened(f"rediss://127.0.0.1:{port}", ca_file=ca_file) as store:
            await works(store)

    async def test_a_server_that_nobody_vouches_for_is_refused(self, front):
        async with opened(f"rediss://127.0.0.1:{front[0]}") as store:
            assert await failure(store) is Failure.CONNECTION

    async def test_a_server_by_another_name_is_refused(self, front):
        port, ca_file = front
        async with opened(f"rediss://127.0.0.2:{port}", ca_file=ca_file) as store:
            assert await failure(store) is Failure.CONNECTION

    async def test_a_server_in_plain_text_is_refused(self, server, front):
        async with opened(f"rediss://127.0.0.1:{server.port}", ca_file=front[1]) as store:
            assert await failure(store) in (Failure.CONNECTION, Failure.TIMEOUT)


class TestCluster:
    async def test_pools_on_several_nodes_whichever_is_named(self, tmp_path):
        # llm/a and llm/d are on different nodes of the two.
        pools = ("llm/a", "llm/b", "llm/c", "llm/d")
        with redis_cluster(tmp_path / "cluster") as nodes:
            for node in nodes:
                with node.admin as admin:
                    for words in documented_rights("other"):
                        admin.execute_command(*words)
            counts = []
            for node in nodes:
                for each in nodes:
                    with each.admin as admin:
                        admin.flushall()
                async with opened(node.url.replace("redis://", "redis://router:other@")) as store:
                    await works(store, pools)
                    for pool in pools:
                        await works_again(store, pool)
                with node.admin as admin:
                    counts.append(len(admin.keys()))
            assert sum(counts) == 4 * len(pools)
            assert 0 not in counts

    async def test_a_node_that_is_gone_is_a_failure_in_bounded_time(self, tmp_path):
        with redis_cluster(tmp_path / "cluster") as nodes:
            async with opened(nodes[0].url) as store:
                questions = [replace(QUESTION, pool=pool) for pool in ("llm/a", "llm/d")]
                await store.hear("listener", questions)
                nodes[1].kill()
                with pytest.raises(StoreError) as caught:
                    await store.hear("listener", questions)
                assert caught.value.failure in (Failure.CONNECTION, Failure.TIMEOUT)


async def works_again(store: RedisStore, pool: str) -> None:
    (answer,) = await store.hear("listener", [replace(QUESTION, pool=pool)])
    await store.publish("teller", [replace(POST, pool=pool)])
    (later,) = await store.hear("listener", [replace(QUESTION, pool=pool, cursor=answer.cursor)])
    assert len(later.entries) == 1


class TestFailures:
    async def test_nobody_there(self, server, tmp_path):
        gone = RedisServer(tmp_path / "redis")
        async with opened(gone.url) as store:
            assert await failure(store) is Failure.CONNECTION
        async with opened(gone.unix_url) as store:
            assert await failure(store) is Failure.CONNECTION
        async with opened("redis://nowhere.invalid") as store:
            assert await failure(store) is Failure.CONNECTION

    @pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad\r\n\r\n", b"+OK\r\n", b":1\r\n", b"*0\r\n", b"\xff\r\n"])
    async def test_something_else_is_there(self, answer):
        async with answering(answer) as url, opened(url) as store:
            assert await failure(store) in (Failure.REPLY, Failure.CONNECTION)

    async def test_it_is_used_again_after_a_restart_and_a_script_flush(self, tmp_path):
        with redis_server(tmp_path / "redis") as running:
            async with opened(running.url) as store:
                await works(store)
                running.kill()
                assert await failure(store) is Failure.CONNECTION
                running.start()
                await works(store)
                with running.admin as admin:
                    admin.script_flush()
                    admin.flushall()
                await works(store)

    async def test_a_server_that_hangs_is_given_up(self, tmp_path):
        with redis_server(tmp_path / "redis") as running:
            async with opened(running.url) as store:
                await works(store)
                running.pause()
                assert await failure(store) is Failure.TIMEOUT
                assert await failure(store) is Failure.TIMEOUT
                running.resume()
                assert len((await hear(store)).entries) == 1

    async def test_a_call_that_is_cancelled_leaves_nothing_half_read(self, tmp_path):
        with redis_server(tmp_path / "redis") as running:
            async with opened(running.url) as store:
                await works(store)
                running.pause()
                call = asyncio.create_task(store.hear("listener", [QUESTION]))
                await asyncio.sleep(0)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                running.resume()
                ((held,),) = await store.settle([CLAIM])
                assert held.host == "m-0"

    async def test_a_cancellation_that_the_library_loses_is_none_the_less_one(self, server, monkeypatch):
        async def answered_at_that_moment(pipeline: Pipeline, *, raise_on_error: bool) -> list[object]:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
            return []

        monkeypatch.setattr(Pipeline, "execute", answered_at_that_moment)
        async with opened(server.url) as store:
            call = asyncio.create_task(store.hear("listener", []))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    async def test_a_full_server_can_still_be_heard(self, server):
        async with opened(server.url) as store:
            await works(store)
            with server.admin as admin:
                admin.config_set("maxmemory", "1")
                try:
                    for write in (store.publish("teller", [POST]), store.settle([CLAIM])):
                        with pytest.raises(StoreError) as caught:
                            await write
                        assert caught.value.failure is Failure.FULL
                    assert len((await hear(store, wanted=(255,))).entries) == 1
                finally:
                    admin.config_set("maxmemory", "0")

    async def test_a_replica_can_be_heard_and_says_that_it_takes_nothing(self, server, tmp_path):
        with redis_server(tmp_path / "replica") as replica, replica.admin as admin:
            async with opened(server.url) as store:
                await works(store)
            admin.replicaof("127.0.0.1", server.port)
            await until(lambda: admin.exists(STREAM, LOADS_STREAM, SESSION) == 3)
            async with opened(replica.url) as store:
                for write in (store.publish("teller", [POST]), store.settle([CLAIM])):
                    with pytest.raises(StoreError) as caught:
                        await write
                    assert caught.value.failure is Failure.READ_ONLY
                answer = await hear(store, wanted=(255,))
                assert (len(answer.entries), len(answer.bindings)) == (1, 1)
                admin.replicaof("NO", "ONE")
                await store.publish("teller", [POST])
