"""Hot sessions of a pool with a KV store: router, real Envoy, a real Redis with Llumnix' sorted sets, and engines.

Each session's host gets a long prompt that takes it tens of seconds, so that the session's next turn finds it hot. The
requests are small enough to be tokenized at once, and their token ids are as many as the engines count.
"""

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dualmap.kv_store.chunks import ChunkKeys
from dualmap.pools.kv_store import ChunkHash, KvStore
from dualmap.prompts.api import Api
from dualmap_extproc.envoy.config.settings import Mode
from dualmap_extproc.tokens.files import FilesTokenizer
from extproc.tokenizer_files import write_tokenizer
from harness.clients import Reply
from harness.deployment import Deployment
from harness.documents import receipt
from harness.stack import Engine, pool_document
from harness.waiting import until
from redis_server import RedisServer

# Five processes start for the first test.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MODEL = "qwen-model"
COMPLETIONS = "/v1/completions"
CHUNK = 256
TURN_TOKENS = 6 * CHUNK
LONG_TOKENS = 20_000
# Two words of 12 bytes and three tokens: both the tokenizer and the engines count four bytes as a token.
ZERO, ONE = " hello world", " world hello"
PAIR_TOKENS = 3
SEED_BITS = 16


def prompt_of(seed: int, tokens: int) -> str:
    """Return a prompt of this many tokens, a multiple of three, with another beginning for each seed."""
    bits = [ONE if seed >> bit & 1 else ZERO for bit in range(SEED_BITS)]
    return "".join(bits) + ZERO * (tokens // PAIR_TOKENS - SEED_BITS)


class Site:
    """The processes, and the sessions of one pool."""

    def __init__(self, deployment: Deployment, redis: RedisServer, tokenizer: Path) -> None:
        self.deployment = deployment
        self._redis = redis
        self._tokenizer = FilesTokenizer(str(tokenizer))

    async def turn(self, session: str, prompt: str) -> Reply:
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        return await self.deployment.ask(asked, path=COMPLETIONS, headers={"x-session-id": session})

    def hold(self, prompt: str) -> None:
        """Put all whole chunks of a prompt into the store."""
        ids: array[int] = self._tokenizer.ids({"model": MODEL, "prompt": prompt}, Api.COMPLETIONS)
        with self._redis.admin as admin:
            for key in ChunkKeys(KvStore(hash=ChunkHash.XXHASH, chunk_tokens=CHUNK), MODEL).keys(ids):
                admin.zadd(key, {"127.0.0.1:9000": 1.0})

    @contextlib.asynccontextmanager
    async def hot(self, session: str, host: str, seed: int) -> AsyncIterator[None]:
        """Keep the session's host busy with a long prompt of the same session."""
        long = asyncio.create_task(self.turn(session, prompt_of(seed, LONG_TOKENS // PAIR_TOKENS * PAIR_TOKENS)))

        async def busy() -> bool:
            pending: int = (await self.deployment.page("qwen"))[host]["pending_prefill_tokens"]
            return pending > LONG_TOKENS // 2

        try:
            await until(busy, f"{host} computes a long prompt", timeout_s=60.0)
            yield
        finally:
            long.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await long


def described(engines: Mapping[str, Engine], redis: RedisServer, tokenizer: Path) -> dict[str, Any]:
    spec = {
        "model": {"name": MODEL},
        "engine": {
            "discovery": {"enabled": False},
            "tokenizer": {"source": "Files", "path": str(tokenizer)},
        },
        # First turns are shorter than minTokens, so they are not looked up.
        "kvStore": {
            "type": "Redis",
            "endpoint": redis.url,
            "hash": "xxhash",
            "chunkTokens": CHUNK,
            "minTokens": TURN_TOKENS + 1,
            "timeout": "1s",
        },
        "routing": {
            # Every host with pending work is hot.
            "spill": {"sloFraction": 0},
            "session": {"migration": {"enabled": True, "cooldown": "1ms"}},
        },
    }
    return pool_document([each.member for each in engines.values()], spec=spec)


@pytest.fixture(scope="module", name="redis")
def _redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("store"))
    server.start()
    yield server
    server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="site")
async def _site(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("hot-sessions")
    tokenizer = write_tokenizer(folder / "tokenizer")
    async with AsyncExitStack() as stack:
        engines = {
            # A long prompt takes 19 s.
            name: Engine(directory=folder, name=name, arguments=("--kv-transfer", "--speed", "0.2"))
            for name in ("engine-0", "engine-1", "engine-2")
        }
        for engine in engines.values():
            stack.push_async_callback(engine.stop)
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        pools = {"qwen": described(engines, redis, tokenizer)}
        deployment = Deployment(pools, mode=Mode.STREAMED, directory=folder)
        yield Site(await stack.enter_async_context(deployment), redis, tokenizer)


def cached(reply: Reply) -> int:
    """Return the prompt tokens that the engine did not compute."""
    assert reply.status == 200, reply.body
    tokens: int = json.loads(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_hot_session_fetches_its_kv_from_the_store(site: Site) -> None:
    moves = await site.deployment.metric("dualmap_session_moves_total", kv="fetched")
    seed = 0
    told: dict[str, str] = {}

    async def moved_with_its_kv() -> bool:
        """Let a new session become hot; return whether it moved and fetched its KV.

        On a slow machine, the host may be idle again before the next turn, or the store may answer late.
        """
        nonlocal seed, told
        seed += 2
        session, turn = f"hot-{seed}", prompt_of(seed, TURN_TOKENS)
        first = await site.turn(session, turn)
        assert cached(first) == 0
        host = receipt(first)["chosen"]
        site.hold(turn)
        async with site.hot(session, host, seed + 1):
            second = await site.turn(session, turn + ONE)
            third = await site.turn(session, turn + ONE + ONE)
        told = dict(receipt(second))
        if (told["rule"], told["fetch"]) != ("session-move", str(TURN_TOKENS)):
            return False
        assert told["moved_from"] == host != told["chosen"]
        # The engines pull what the store holds from the session's host, which the request names.
        assert cached(second) > 0
        assert receipt(third)["chosen"] == told["chosen"]
        return True

    await until(moved_with_its_kv, "a hot session moves and fetches its KV", timeout_s=60.0)

    assert (told["matched"], told["prompt"]) == ("0", str(TURN_TOKENS + PAIR_TOKENS))
    assert await site.deployment.metric("dualmap_session_moves_total", kv="fetched") > moves
    assert await site.deployment.metric("dualmap_session_move_tokens_total", kv="fetched") >= TURN_TOKENS
