"""Stores on a real Redis server, example updates, and a check of all operations of a store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.scaling.reports import Report, Share
from dualmap_extproc.settings import RedisSettings
from dualmap_extproc.store import redis as redis_store
from dualmap_extproc.store.contract import Answer, Claim, Failure, Post, Question, StoreError
from dualmap_extproc.store.redis import RedisStore
from dualmap_extproc.store.target import target_of
from redis_server import RedisServer, redis_server
from waiting import WAIT_S

POOL = "llm/qwen"
NEWS = ReplicaUpdate(hotness=HotnessCounts(requests=7, nodes={5: 4}))
BINDING = SharedBinding(session=255, host="m-0", tokens=10, version=1, moved_ago_s=0.0)
QUESTION = Question(pool=POOL, window_s=60.0)
LOADS = {"m-0": SharedLoad(in_flight=1)}
REPORT = Report(own=Share(desired_replicas=0.75, in_flight=3), pool=Share(desired_replicas=2.5, in_flight=9))
POST = Post(pool=POOL, keep_s=60.0, update=NEWS, loads=LOADS, report=REPORT)
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
async def opened(
    url: str, password: str | None = None, ca_file: Path | None = None, *, is_patient: bool = True
) -> AsyncIterator[RedisStore]:
    """A store. If ``is_patient``, it waits longer than a router, because Redis may answer late on a busy machine."""
    with pytest.MonkeyPatch.context() as patched:
        for limit_s in ("CONNECT_S", "REPLY_S", "_CALL_S") if is_patient else ():
            patched.setattr(redis_store, limit_s, WAIT_S)
        store = RedisStore(target_of(RedisSettings(url=url, password=password, ca_file=ca_file)))
        try:
            yield store
        finally:
            await store.close()


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A server that is not Redis and sends the same answer to every request."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                writer.write(answer * 10)
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as listener:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def read(store: RedisStore, cursor: str | None = None, *, wanted: tuple[int, ...] = ()) -> Answer:
    (answer,) = await store.read("listener", [replace(QUESTION, cursor=cursor, wanted=wanted)])
    return answer


async def failure(store: RedisStore) -> Failure:
    with pytest.raises(StoreError) as caught:
        await store.read("listener", [QUESTION])
    return caught.value.failure


async def works(store: RedisStore, pools: tuple[str, ...] = (POOL,)) -> None:
    """Run all operations of a store for several pools."""
    held = await store.resolve([replace(CLAIM, pool=pool) for pool in pools])
    assert [each.host for holding in held for each in holding] == ["m-0"] * len(pools)
    await store.publish("teller", [replace(POST, pool=pool) for pool in pools])
    questions = [replace(QUESTION, pool=pool, wanted=(BINDING.session,)) for pool in pools]
    for answer in await store.read("listener", questions):
        assert [entry.update for entry in answer.entries] == [NEWS]
        assert [entry.loads for entry in answer.loads] == [LOADS]
        assert [entry.report for entry in answer.reports] == [REPORT]
        assert [binding.host for binding in answer.bindings] == ["m-0"]


async def works_again(store: RedisStore, pool: str) -> None:
    (answer,) = await store.read("listener", [replace(QUESTION, pool=pool)])
    await store.publish("teller", [replace(POST, pool=pool)])
    (later,) = await store.read("listener", [replace(QUESTION, pool=pool, cursor=answer.cursor)])
    assert len(later.entries) == 1
