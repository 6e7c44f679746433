"""Every way in which Redis can fail the store: missing, a different server, hanging, full, read-only."""

import asyncio
import contextlib

import pytest
from redis.asyncio.client import Pipeline

from dualmap_extproc.store.contract import Failure, StoreError
from extproc import redis_stores
from extproc.redis_stores import (
    CLAIM,
    LOADS_STREAM,
    POST,
    QUESTION,
    SESSION,
    STREAM,
    answering,
    failure,
    hear,
    opened,
    works,
)
from redis_server import RedisServer, redis_server
from waiting import until

# The fixtures, which pytest looks for by their names here.
shared_server = redis_stores.shared_server
server = redis_stores.server


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
