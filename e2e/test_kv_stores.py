"""KV stores through real Envoy: a real Mooncake master, a real Redis, LMCache's stub, and stores that do not work.

The token ids of requests come from the render endpoint of an engine. A request whose ids are late is not looked up, so
tests repeat a request until its receipt names the expected fetch.
"""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from dualmap.kv_store.availability import FAILURES_MAX
from dualmap.kv_store.chunks import ChunkKeys
from dualmap.pools.kv_store import ChunkHash, KvStore
from dualmap_extproc.envoy.config.settings import Mode
from extproc.kv_stores.stores import LmCacheStub, serving
from harness import mooncake
from harness.clients import Reply, http1
from harness.deployment import CHAT, Deployment
from harness.documents import document, receipt
from harness.stack import Engine
from harness.waiting import until
from redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="session")

POOL = "qwen"
POOL_ID = f"llm/{POOL}"
LOOKUPS = "dualmap_kv_store_lookups_total"
UP = "dualmap_kv_store_up"
CHUNK = 256
CHUNKS = 4
SLOWLY = {"timeout": "1s"}


class Site:
    """Two engines behind a router and an Envoy, whose pool gets the store of each test."""

    def __init__(self, directory: Path) -> None:
        fast = ("--speed", "1000")
        self.engines = [Engine(directory=directory, name=f"engine-{each}", arguments=fast) for each in range(2)]
        self._directory = directory
        self.deployment: Deployment

    async def start(self) -> None:
        await asyncio.gather(*(each.start() for each in self.engines))
        self.deployment = Deployment({POOL: self._document()}, mode=Mode.STREAMED, directory=self._directory)
        await self.deployment.start()

    async def stop(self) -> None:
        await self.deployment.stop()
        await asyncio.gather(*(each.stop() for each in self.engines))

    async def use(self, **store: Any) -> None:
        """Give the pool a store, as a new one."""
        for document_now in (self._document(), self._document(store)):
            self.deployment.write(POOL, document_now)
            wanted = document_now["spec"].get("kvStore", {}).get("type")

            async def applied(wanted: str | None = wanted) -> bool:
                status = await self.store()
                return (status or {}).get("type") == wanted

            await until(applied, f"the pool's store is {wanted}", timeout_s=60.0)
        await self._wait_until_picked()

    async def store(self) -> dict[str, Any] | None:
        """Return what the pool's page says about its store; None without one."""
        reply = await http1(f"http://127.0.0.1:{self.deployment.router.ports['metrics']}/pools/llm/{POOL}")
        status: dict[str, Any] | None = json.loads(reply.body).get("kv_store")
        return status

    async def ask(self, text: str, **fields: Any) -> Reply:
        """Send a chat request through Envoy."""
        return await self.deployment.ask(
            {**messages(text), "model": f"{POOL}-model", "max_tokens": 1, **fields}, path=CHAT
        )

    async def fetch(self, text: str, **fields: Any) -> int:
        """Return the tokens that a request's receipt says will be fetched."""
        reply = await self.ask(text, **fields)
        assert reply.status == 200, reply
        return int(receipt(reply)["fetch"])

    async def wait_for_fetch(self, tokens: int, seed: str) -> None:
        """Ask for prompts with the same beginning until one has token ids, and its fetch is as expected."""
        number = 0

        async def fetched() -> bool:
            nonlocal number
            number += 1
            return await self.fetch(f"{prompt_of(seed)} {number}") == tokens

        await until(fetched, f"a request fetches {tokens} tokens", timeout_s=60.0)

    async def chunks(self, text: str) -> list["array[int]"]:
        """Return the token ids of the full chunks of a prompt, as the renderer says."""
        body = json.dumps({**messages(text), "model": f"{POOL}-model"}).encode()
        reply = await http1(
            f"http://{self.engines[0].endpoint}{CHAT}/render", body=body, headers={"content-type": "application/json"}
        )
        answer = json.loads(reply.body)
        ids = array("I", (answer[0] if isinstance(answer, list) else answer)["token_ids"])
        return [ids[start : start + CHUNK] for start in range(0, CHUNKS * CHUNK, CHUNK)]

    async def keys(self, seed: str, algorithm: ChunkHash) -> tuple[str, ...]:
        """Return the store's keys of the first chunks of the prompts that ``wait_for_fetch`` sends."""
        ids = array("I")
        for each in await self.chunks(prompt_of(seed)):
            ids.extend(each)
        return ChunkKeys(KvStore(hash=algorithm, chunk_tokens=CHUNK), f"{POOL}-model").keys(ids)

    async def counted(self, result: str) -> float:
        return await self.deployment.router.metric(LOOKUPS, pool=POOL_ID, result=result)

    async def wait_until_left_alone(self) -> str:
        """Ask for new prompts until the store is left alone; every answer is 200. Return the reason."""
        number = 0

        async def left_alone() -> bool:
            nonlocal number
            number += 1
            assert await self.fetch(f"{number} {prompt_of('x')}") == 0
            return ((await self.store()) or {})["state"] == "LeftAlone"

        await until(left_alone, "the store is left alone", timeout_s=60.0)
        assert await self.deployment.router.metric(UP, pool=POOL_ID) == 0
        status = await self.store()
        assert status is not None
        return str(status["reason"])

    async def _wait_until_picked(self) -> None:
        """Wait until every worker of Envoy asks the router.

        The router imports the client of a store at its first use. On a busy machine, Envoy may meanwhile take the
        router for one that hangs, and send requests without a pick.
        """
        in_a_row = 0

        async def picked() -> bool:
            nonlocal in_a_row
            in_a_row = in_a_row + 1 if "x-dualmap-decision" in (await self.ask("hello")).headers else 0
            return in_a_row >= 8

        await until(picked, "Envoy asks the router", timeout_s=60.0)

    def _document(self, store: Mapping[str, Any] | None = None) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "engine": {"tokenizer": {"source": "Renderer", "url": f"http://{self.engines[0].endpoint}"}}
        }
        if store is not None:
            spec["kvStore"] = dict(store)
        return document(POOL, [each.member for each in self.engines], **spec)


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="site")
async def _site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    site = Site(tmp_path_factory.mktemp("kv-stores"))
    try:
        await site.start()
        yield site
    finally:
        await site.stop()


def messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def prompt_of(seed: str) -> str:
    """Return a prompt with more than CHUNKS chunks, with a different beginning for each ``seed``."""
    return f"{seed} " + "All work and no play makes Jack a dull boy. " * (2 * CHUNKS * CHUNK // 10)


async def test_chunks_in_mooncake_are_fetched(site: Site, tmp_path: Path) -> None:
    lacks = mooncake.missing()
    if lacks:
        pytest.skip(f"this machine lacks {lacks}")
    store = mooncake.Mooncake(tmp_path)
    try:
        await store.start()
        await site.use(type="Mooncake", endpoint=store.url, **SLOWLY)
        await store.hold(await site.keys("mooncake", ChunkHash.SHA256_CBOR))

        await site.wait_for_fetch(CHUNKS * CHUNK, "mooncake")

        assert await site.counted("hit") >= 1
        assert await site.deployment.router.metric(UP, pool=POOL_ID) == 1
        # The master goes: each answer is as good as without a store.
        await store.stop()
        assert "Connect" in await site.wait_until_left_alone() or await site.counted("error") >= FAILURES_MAX
    finally:
        await store.stop()


async def test_chunks_in_redis_are_fetched_up_to_the_first_gap(site: Site, tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis")
    redis.start()
    try:
        keys = await site.keys("redis", ChunkHash.XXHASH)
        with redis.admin as admin:
            for key in (*keys[:2], keys[3]):
                admin.zadd(key, {"127.0.0.1:9000": 1.0})
        await site.use(type="Redis", endpoint=redis.url, hash="xxhash", **SLOWLY)

        await site.wait_for_fetch(2 * CHUNK, "redis")
    finally:
        redis.kill()


async def test_chunks_in_lmcache_are_fetched_also_for_salted_prompts(site: Site) -> None:
    async with LmCacheStub().running() as stub:
        stub.held = [3]
        await site.use(type="LMCache", endpoint=stub.url, **SLOWLY)

        await site.wait_for_fetch(3 * CHUNK, "lmcache")
        asked = len(stub.questions)

        async def salted() -> bool:
            return await site.fetch(prompt_of("salted"), cache_salt="tenant") == 3 * CHUNK

        await until(salted, "a salted prompt is looked up", timeout_s=60.0)
        assert {each["cache_salt"] for each in stub.questions[asked:]} == {"tenant"}


async def test_short_and_salted_prompts_are_not_looked_up(site: Site, tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis")
    redis.start()
    try:
        await site.use(type="Redis", endpoint=redis.url, **SLOWLY)
        assert await site.fetch("hello") == 0
        assert await site.fetch(prompt_of("salt"), cache_salt="tenant") == 0

        assert "cmdstat_zrange" not in redis.admin.info("commandstats")
        assert await site.counted("skipped") >= 1
        assert await site.counted("miss") == 0
    finally:
        redis.kill()


async def test_slow_store_costs_requests_its_timeout_and_is_left_alone(site: Site) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            pass
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    try:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await site.use(type="Mooncake", endpoint=endpoint, timeout="5ms")

        assert await site.wait_until_left_alone() == "no answer within 5 ms"
        assert await site.counted("timeout") >= FAILURES_MAX
    finally:
        server.close()


@pytest.mark.parametrize("answer", [b"<html>", b'{"success": true, "data": {"x": 1}}', b" " * 5_000_000])
async def test_wrong_answers_of_a_store_cost_only_its_hits(site: Site, answer: bytes) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    async with serving(web.get("/batch_query_keys", handle)) as url:
        await site.use(type="Mooncake", endpoint=url, **SLOWLY)

        reason = await site.wait_until_left_alone()

        assert any(word in reason for word in ("not JSON", "lacks a key", "more than"))
        assert await site.counted("error") >= FAILURES_MAX


async def test_store_that_does_not_exist_is_left_alone(site: Site) -> None:
    await site.use(type="Redis", endpoint="redis://127.0.0.1:9", **SLOWLY)

    assert "redis://127.0.0.1:9: ConnectionError" in await site.wait_until_left_alone()
