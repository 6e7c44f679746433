"""Tests of the stores' clients: against a real Redis, LMCache's stub, and recorded answers of Mooncake's master."""

import asyncio
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from dualmap.kv_store.view import HOLDERS_MAX, Chunk
from dualmap_extproc.kv_stores.contract import Question, StoreError, host_of
from dualmap_extproc.kv_stores.http_client import ANSWER_MAX_BYTES, NotFound
from dualmap_extproc.kv_stores.lmcache import LmCacheClient
from dualmap_extproc.kv_stores.mooncake import MooncakeClient
from dualmap_extproc.kv_stores.redis_sets import CONNECTIONS_MAX, RedisSetsClient
from extproc.kv_stores.stores import LmCacheStub, mooncake_answer, serving
from redis_server import RedisServer

IDS = array("I", range(1000))
KEYS = ("a", "b", "c")


def question(*keys: str, salt: str = "") -> Question:
    return Question(keys=keys or KEYS, chunks=keys or KEYS, ids=IDS, salt=salt)


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [("10.0.0.1:15648", "10.0.0.1"), ("[fd00::1]:15648", "fd00::1"), ("node-1:1", "node-1"), ("node-1", "node-1")],
)
def test_host_of_an_endpoint_is_without_port(endpoint: str, host: str) -> None:
    assert host_of(endpoint) == host


# Mooncake.


def answering(answer: Callable[[list[str]], object], asked: list[str] | None = None) -> web.RouteDef:
    async def handle(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(request.query["keys"])
        return web.json_response(answer(request.query["keys"].split(",")))

    return web.get("/batch_query_keys", handle)


async def test_mooncakes_chunks_have_the_hosts_of_their_replicas() -> None:
    asked: list[str] = []
    held = {"x@{m}%&+": ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.1:3"], "b": []}
    async with serving(answering(lambda keys: mooncake_answer(held, keys), asked)) as url:
        client = MooncakeClient(url)
        found = await client.ask(question("x@{m}%&+", "b", "c"))
        await client.close()

    assert asked == ["x@{m}%&+,b,c"]
    assert found == {
        "x@{m}%&+": Chunk(is_held=True, holders=frozenset(("10.0.0.1", "10.0.0.2"))),
        "b": Chunk(is_held=True),
    }


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([], "not a JSON object"),
        ({"success": False, "error": "not leader"}, "no data: not leader"),
        ({"success": True, "data": []}, "no data"),
        ({"success": True, "data": {"a": {"ok": True}}}, "lacks a key"),
        ({"success": True, "data": {"a": {"ok": "yes"}, "b": {"ok": False}, "c": {"ok": False}}}, "lacks a key"),
    ],
)
async def test_unusable_answer_of_a_master_is_a_named_error(answer: object, said: str) -> None:
    async with serving(answering(lambda _: answer)) as url:
        client = MooncakeClient(url)
        with pytest.raises(StoreError, match=said):
            await client.ask(question())
        await client.close()


async def test_unusable_replicas_of_a_master_are_held_without_a_host() -> None:
    values = [None, 1, {}, {"transport_endpoint_": ""}, {"transport_endpoint_": "x" * 1000}]
    data = {key: {"ok": True, "values": values} for key in KEYS}
    async with serving(answering(lambda _: {"success": True, "data": data})) as url:
        client = MooncakeClient(url)
        found = await client.ask(question())
        await client.close()

    assert found == {key: Chunk(is_held=True) for key in KEYS}


async def test_huge_answer_of_a_master_is_not_read() -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=b" " * (ANSWER_MAX_BYTES + 1), content_type="application/json")

    async with serving(web.get("/batch_query_keys", handle)) as url:
        client = MooncakeClient(url)
        with pytest.raises(StoreError, match="more than"):
            await client.ask(question())
        await client.close()


@pytest.mark.parametrize("status", [301, 400, 503])
async def test_other_status_of_a_master_is_a_named_error(status: int) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async with serving(web.get("/batch_query_keys", handle)) as url:
        client = MooncakeClient(url)
        with pytest.raises(StoreError, match=f"answered with {status}"):
            await client.ask(question())
        await client.close()


async def test_master_that_refuses_connections_is_a_named_error() -> None:
    async with serving() as url:
        pass
    client = MooncakeClient(url)
    with pytest.raises(StoreError, match="Connect"):
        await client.ask(question())
    await client.close()


async def test_server_that_speaks_no_http_is_a_named_error() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-ERR unknown command\r\n")
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = MooncakeClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(StoreError, match="no valid HTTP answer"):
        await client.ask(question())
    await client.close()
    server.close()


# LMCache.


def lmcache(url: str, *, world_size: int = 1, chunk_tokens: int = 256) -> LmCacheClient:
    return LmCacheClient(url, model="m", chunk_tokens=chunk_tokens, world_size=world_size)


async def test_coordinators_chunks_are_held_by_somebody() -> None:
    async with LmCacheStub().running() as stub:
        stub.held = [2]
        client = lmcache(stub.url)
        found = await client.ask(question(salt="s"))
        await client.close()

    assert found == {"a": Chunk(True), "b": Chunk(True), "c": Chunk(False)}
    (asked,) = stub.questions
    assert asked == {"token_ids": IDS[:768].tolist(), "model_name": "m", "world_size": 1, "cache_salt": "s"}


async def test_coordinators_chunk_counts_if_all_ranks_have_it() -> None:
    async with LmCacheStub(world_size=2).running() as stub:
        stub.held = [3, 1]
        client = lmcache(stub.url, world_size=2)
        found = await client.ask(question())
        await client.close()

    assert found == {"a": Chunk(True), "b": Chunk(False), "c": Chunk(False)}


async def test_other_chunk_size_of_the_coordinator_is_named() -> None:
    async with LmCacheStub(chunk_tokens=128).running() as stub:
        client = lmcache(stub.url)
        with pytest.raises(StoreError, match="6 chunks of a prompt with 3 chunks of 256 tokens"):
            await client.ask(question())
        await client.close()


async def test_controllers_answer_is_what_somebody_has() -> None:
    async with LmCacheStub(controller=True).running() as stub:
        stub.held = [2]
        client = lmcache(stub.url)
        with pytest.raises(NotFound):
            await client.ask(question())
        found = await client.ask(question())
        await client.close()

    assert found == {"a": Chunk(True), "b": Chunk(True)}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"chunks": 3, "results": [{}, {}, {}]},
        {"chunks": 3, "results": [{"key": {"chunk_hash_hex": "x"}, "placements": []}]},
        {"chunks": "3", "results": []},
    ],
)
async def test_unusable_answer_of_a_coordinator_is_a_named_error(answer: object) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.json_response(answer)

    async with serving(web.post("/directory/lookup", handle)) as url:
        client = lmcache(url)
        with pytest.raises(StoreError, match="coordinator"):
            await client.ask(question())
        await client.close()


# Redis.


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


async def test_sets_of_redis_name_the_hosts_of_chunks(redis: RedisServer) -> None:
    with redis.admin as admin:
        admin.execute_command("SELECT", 3)
        admin.zadd("a", {"10.0.0.1:8000": 1, "[fd00::1]:8000": 2})
        admin.zadd("b", {f"10.0.1.{each}:1": each for each in range(2 * HOLDERS_MAX)})
    client = RedisSetsClient(f"{redis.url}/3")
    found = await client.ask(question())
    await client.close()

    assert found["a"] == Chunk(is_held=True, holders=frozenset(("10.0.0.1", "fd00::1")))
    assert len(found["b"].holders) == HOLDERS_MAX
    assert "c" not in found


async def test_more_questions_than_connections_to_redis_are_all_answered(redis: RedisServer) -> None:
    with redis.admin as admin:
        admin.zadd("a", {"10.0.0.1:8000": 1})
    client = RedisSetsClient(redis.url)
    found = await asyncio.gather(*(client.ask(question()) for _ in range(4 * CONNECTIONS_MAX)))
    await client.close()

    assert all("a" in each for each in found)


async def test_value_of_another_type_in_redis_is_a_named_error(redis: RedisServer) -> None:
    with redis.admin as admin:
        admin.set("b", "text")
    client = RedisSetsClient(redis.url)
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await client.ask(question())
    await client.close()


async def test_redis_that_refuses_connections_is_a_named_error(redis: RedisServer) -> None:
    redis.kill()
    client = RedisSetsClient(redis.url)
    with pytest.raises(StoreError, match="ConnectionError"):
        await client.ask(question())
    await client.close()


async def test_redis_with_a_password_is_a_named_error(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis", password="secret")
    server.start()
    client = RedisSetsClient(server.url)
    with pytest.raises(StoreError, match="AuthenticationError"):
        await client.ask(question())
    await client.close()
    server.kill()
