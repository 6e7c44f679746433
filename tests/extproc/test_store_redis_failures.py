"""Tests of failures of Redis: absent, another server, hanging, full, read-only."""

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
    opened,
    read,
    works,
)
from redis_server import RedisServer, redis_server
from waiting import until

# This imports fixtures, which pytest finds by their names in this module.
shared_server = redis_stores.shared_server
server = redis_stores.server


class TestFailures:
    async def test_unreachable_redis_counts_as_connection_failure(self, server, tmp_path):
        gone = RedisServer(tmp_path / "redis")
        async with opened(gone.url) as store:
            assert await failure(store) is Failure.CONNECTION
        async with opened(gone.unix_url) as store:
            assert await failure(store) is Failure.CONNECTION
        async with opened("redis://nowhere.invalid") as store:
            assert await failure(store) is Failure.CONNECTION

    @pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad\r\n\r\n", b"+OK\r\n", b":1\r\n", b"*0\r\n", b"\xff\r\n"])
    async def test_server_that_is_no_redis_counts_as_reply_failure(self, answer):
        async with answering(answer) as url, opened(url) as store:
            assert await failure(store) in (Failure.REPLY, Failure.CONNECTION)

    async def test_redis_store_recovers_after_restart_and_script_flush(self, tmp_path):
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

    async def test_hung_redis_counts_as_timeout(self, tmp_path):
        with redis_server(tmp_path / "redis") as running:
            async with opened(running.url) as store:
                await works(store)
            async with opened(running.url, is_patient=False) as store:
                running.pause()
                assert await failure(store) is Failure.TIMEOUT
                assert await failure(store) is Failure.TIMEOUT
                running.resume()
                assert len((await read(store)).entries) == 1

    async def test_cancelled_redis_call_leaves_no_unread_reply(self, tmp_path):
        with redis_server(tmp_path / "redis") as running:
            async with opened(running.url) as store:
                await works(store)
                running.pause()
                call = asyncio.create_task(store.read("listener", [QUESTION]))
                await asyncio.sleep(0)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                running.resume()
                ((held,),) = await store.resolve([CLAIM])
                assert held.host == "m-0"

    async def test_redis_call_is_cancelled_if_the_library_loses_cancellation(self, server, monkeypatch):
        async def answered_at_that_moment(pipeline: Pipeline, *, raise_on_error: bool) -> list[object]:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
            return []

        monkeypatch.setattr(Pipeline, "execute", answered_at_that_moment)
        async with opened(server.url) as store:
            call = asyncio.create_task(store.read("listener", []))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    async def test_full_redis_can_still_be_read(self, server):
        async with opened(server.url) as store:
            await works(store)
            with server.admin as admin:
                admin.config_set("maxmemory", "1")
                try:
                    for write in (store.publish("teller", [POST]), store.resolve([CLAIM])):
                        with pytest.raises(StoreError) as caught:
                            await write
                        assert caught.value.failure is Failure.FULL
                    assert len((await read(store, wanted=(255,))).entries) == 1
                finally:
                    admin.config_set("maxmemory", "0")

    async def test_read_only_redis_replica_can_be_read_but_rejects_writes(self, server, tmp_path):
        with redis_server(tmp_path / "replica") as replica, replica.admin as admin:
            async with opened(server.url) as store:
                await works(store)
            admin.replicaof("127.0.0.1", server.port)
            await until(lambda: admin.exists(STREAM, LOADS_STREAM, SESSION) == 3)
            async with opened(replica.url) as store:
                for write in (store.publish("teller", [POST]), store.resolve([CLAIM])):
                    with pytest.raises(StoreError) as caught:
                        await write
                    assert caught.value.failure is Failure.READ_ONLY
                answer = await read(store, wanted=(255,))
                assert (len(answer.entries), len(answer.bindings)) == (1, 1)
                admin.replicaof("NO", "ONE")
                await store.publish("teller", [POST])
