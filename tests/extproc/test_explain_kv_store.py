"""Tests of ``dualmap explain`` in pools with a KV store, with a real Redis as Llumnix' sorted sets."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner, Result

from dualmap.kv_store.chunks import ChunkKeys
from dualmap.pools.kv_store import ChunkHash, KvStore
from dualmap.prompts.api import Api
from dualmap_cli.explain.command import explain
from dualmap_extproc.tokens.files import FilesTokenizer
from extproc.kv_stores.stores import LmCacheStub
from extproc.tokenizer_files import write_tokenizer
from redis_server import RedisServer, redis_server

CHUNK = 16
BODY = json.dumps({"model": "Qwen", "prompt": "hello world " * 100})


class Site:
    """A pool file whose pool has a tokenizer, and a store at an endpoint."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = write_tokenizer(folder / "tokenizer")
        self._path = folder / "pool.yaml"

    def explained(self, *options: str, body: str = BODY, tokenizer: str = "", **store: Any) -> Result:
        spec: dict[str, Any] = {
            "model": {"name": "Qwen", "adapters": ["sql"]},
            "engine": {"tokenizer": {"source": "Files", "path": tokenizer or str(self.tokenizer)}},
            "kvStore": {"hash": "xxhash", "chunkTokens": CHUNK, "minTokens": 64, **store},
        }
        members = [{"id": f"qwen-{each}", "address": f"10.0.0.{each + 1}"} for each in range(2)]
        document = {
            "apiVersion": "serving.dualmap.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": "qwen", "namespace": "llm"},
            "spec": spec,
            "status": {"ring": {"members": members}},
        }
        self._path.write_text(json.dumps(document))
        return CliRunner().invoke(explain, ["--pool", str(self._path), "--request", "-", *options], input=body)

    def keys(self) -> tuple[str, ...]:
        """Return the store's keys of the prompt of BODY."""
        ids = FilesTokenizer(str(self.tokenizer)).ids(orjson.loads(BODY), Api.COMPLETIONS)
        return ChunkKeys(KvStore(hash=ChunkHash.XXHASH, chunk_tokens=CHUNK), "Qwen").keys(ids)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    # A busy machine may need more than a second for an answer.
    monkeypatch.setattr("dualmap_extproc.kv_stores.stores.QUESTION_S", 60.0)
    return Site(tmp_path)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


def test_explain_names_the_tiers_of_each_candidate(site: Site, redis: RedisServer) -> None:
    with redis.admin as admin:
        for key in site.keys()[:2]:
            admin.zadd(key, {"10.0.0.1:9000": 1.0})

    told = site.explained(type="Redis", endpoint=redis.url)
    receipt = json.loads(site.explained("--json", type="Redis", endpoint=redis.url).stdout)

    assert f"\nKV store: {redis.url} holds 32 tokens of the prompt.\n" in told.output
    computed = receipt["prompt_tokens"] - 2 * CHUNK
    assert told.output.count(f" would fetch 32 tokens and compute {computed},") == 2
    assert receipt["kv_store"] == {"state": "Answered", "tokens": 32, "reason": ""}
    assert receipt["fetch_tokens"] == 32
    assert [each["compute_tokens"] for each in receipt["candidates"]] == [computed] * 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "hello"}, "the prompt has 1 of spec.kvStore.minTokens (64) tokens"),
        ({"model": "sql"}, "the prompt is for an adapter"),
        ({"cache_salt": "tenant"}, "the prompt has a cache_salt"),
        ({"prompt": [1, 2, 3]}, "the token ids are not known: "),
    ],
)
def test_explain_says_why_the_store_is_not_asked(site: Site, body: dict[str, Any], reason: str) -> None:
    # No server listens there, so a question would fail.
    store = {"type": "Redis", "endpoint": "redis://127.0.0.1:9"}
    text = json.dumps({**json.loads(BODY), **body})

    told = site.explained(body=text, **store)
    said = json.loads(site.explained("--json", body=text, **store).stdout)["kv_store"]

    assert f"KV store: not asked, because {reason}" in told.stdout
    assert "would fetch" not in told.stdout
    assert said["state"] == "NotAsked"
    assert said["reason"].startswith(reason)


def test_explain_without_a_tokenizer_does_not_ask_the_store(site: Site, tmp_path: Path) -> None:
    told = site.explained(type="Redis", endpoint="redis://127.0.0.1:9", tokenizer=str(tmp_path / "none"))

    assert "KV store: not asked, because the token ids are not known: " in told.stdout
    assert "contains no tokenizer.json on this machine" in told.stderr


def test_explain_with_a_store_that_does_not_answer_names_the_fault(site: Site) -> None:
    told = site.explained(type="Redis", endpoint="redis://127.0.0.1:9")

    assert told.exit_code == 0
    assert "KV store: gave no answer, so fetched tokens are not known (redis://127.0.0.1:9: " in told.stdout
    assert "would fetch" not in told.stdout


async def test_explain_asks_lmcache_also_for_salted_prompts(site: Site) -> None:
    async with LmCacheStub(chunk_tokens=CHUNK).running() as stub:
        stub.held = [3]
        salted = json.dumps({**json.loads(BODY), "cache_salt": "tenant"})
        told = await asyncio.to_thread(site.explained, body=salted, type="LMCache", endpoint=stub.url)

    assert f"KV store: {stub.url} holds 48 tokens of the prompt." in told.stdout
