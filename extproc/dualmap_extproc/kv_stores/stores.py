"""The KV stores of all pools: adds what a pool's store holds of a prompt to the prompt's token ids.

Stores are asked by hashes of token ids, so the ids come first (``dualmap_extproc.tokens``). In a pool without a store,
a request costs one look into a dictionary.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

from dualmap.kv_store.chunks import ChunkKeys
from dualmap.kv_store.view import StoreMatch, StoreView
from dualmap.pools.kv_store import ChunkHash, KvStore, StoreType
from dualmap.pools.pool import Model, Pool
from dualmap.prompts.api import Api
from dualmap.prompts.parity import TokenClass
from dualmap.prompts.prompt import Prompt
from dualmap_extproc.kv_stores.contract import Question, StoreClient, StoreError
from dualmap_extproc.kv_stores.lmcache import LmCacheClient
from dualmap_extproc.kv_stores.lookups import QUESTION_S, Lookups
from dualmap_extproc.kv_stores.metrics import KvStoreMetrics, LookupResult
from dualmap_extproc.kv_stores.mooncake import MooncakeClient
from dualmap_extproc.request.tokens import Pending, Tokens, TokensDone, TokenSources


class _ChunkNames:
    """The keys of prompts' chunks in the store of a pool."""

    def __init__(self, pool: Pool) -> None:
        store = pool.kv_store
        # LMCache computes the hashes. The keys are then only names of chunks in this router.
        own = store.type is StoreType.LMCACHE
        self._keys = ChunkKeys(replace(store, hash=ChunkHash.XXHASH, key="{hash}") if own else store, pool.model.name)
        self._takes_salts = own

    def of(self, tokens: Tokens, salt: str) -> tuple[str, ...]:
        """Return the keys of a prompt's chunks."""
        keys = self._keys.keys(tokens.ids)
        if not salt:
            return keys
        name = sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()
        return tuple([f"{name}:{key}" for key in keys])

    def reason(self, prompt: Prompt, model: Model) -> str:
        """Return why the chunks of a prompt have other keys, as the end of a sentence; empty if they have not."""
        if prompt.lora or prompt.lora_name or model.adapter_of(prompt.model):
            return "is for an adapter"
        if prompt.cache_salt and not self._takes_salts:
            return "has a cache_salt"
        return ""


class _PoolStore:
    """The store of one pool: the names of chunks in it, and the lookups."""

    def __init__(self, pool: Pool, metrics: KvStoreMetrics) -> None:
        store = pool.kv_store
        self.store, self.model = store, pool.model
        self.names = _ChunkNames(pool)
        self.lookups = Lookups(
            pool.id,
            store.endpoint,
            _client_of(store, pool.model),
            metrics,
            chunk_tokens=store.chunk_tokens,
            timeout_s=store.timeout_s,
        )
        self.reason = ""
        """Why the last prompt was not looked up; empty if it was."""


class KvStores:
    """The stores of all pools. It implements ``request.tokens.TokenSources``, with the ids of ``tokens``.

    ``trusts`` returns whether the ids of a pool's class of requests are used, and ``pool_of`` returns a pool with the
    adapters that its engines name. Construct it in an event loop.
    """

    def __init__(
        self,
        tokens: TokenSources,
        metrics: KvStoreMetrics,
        *,
        trusts: Callable[[str, TokenClass], bool],
        pool_of: Callable[[str], Pool | None],
    ) -> None:
        self._tokens = tokens
        self._metrics = metrics
        self._trusts = trusts
        self._pool_of = pool_of
        self._stores: dict[str, _PoolStore] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def set_pools(self, pools: Sequence[Pool]) -> None:
        """Use the stores of these pools from now on."""
        used = {pool.id: pool for pool in pools if pool.kv_store.is_used}
        self._metrics.set_pools(used)
        before = dict(self._stores)
        self._stores = {
            pool_id: before.pop(pool_id) if _is_same(before.get(pool_id), pool) else _PoolStore(pool, self._metrics)
            for pool_id, pool in used.items()
        }
        for store in before.values():
            self._close(store)

    def is_left_alone(self, pool: str) -> bool:
        """Return whether a pool has a store that is left alone after failures."""
        store = self._stores.get(pool)
        return store is not None and not store.lookups.availability.is_up

    def status(self, pool: str) -> dict[str, object] | None:
        """Return the state of a pool's store as JSON values; None for a pool without a store."""
        store = self._stores.get(pool)
        if store is None:
            return None
        availability = store.lookups.availability
        return {
            "type": store.store.type.value,
            "endpoint": store.store.endpoint,
            "state": "Up" if availability.is_up else "LeftAlone",
            "reason": availability.reason or store.reason,
        }

    def tokens(
        self, pool: str, prompt: Prompt, chunks: Sequence[bytes], api: Api, *, small: bool, done: TokensDone
    ) -> Tokens | Pending | None:
        """Return the tokens of a body with what the pool's store holds of them (``request.tokens``)."""
        store = self._stores.get(pool)
        if store is None:
            return self._tokens.tokens(pool, prompt, chunks, api, small=small, done=done)
        cancels: list[Callable[[], None]] = []

        def look_up(now: float, found: Tokens | None) -> None:
            cancels.clear()
            stored = self._look_up(pool, store, prompt, found, done)
            if isinstance(stored, Pending):
                cancels.append(stored.cancel)
            else:
                done(now, stored)

        found = self._tokens.tokens(pool, prompt, chunks, api, small=small, done=look_up)
        if not isinstance(found, Pending):
            return self._look_up(pool, store, prompt, found, done)
        cancels.append(found.cancel)

        def cancel() -> None:
            for each in cancels:
                each()

        return Pending(cancel)

    async def close(self) -> None:
        """Stop all work."""
        stores, self._stores = tuple(self._stores.values()), {}
        for store in stores:
            self._close(store)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _look_up(
        self, pool: str, store: _PoolStore, prompt: Prompt, found: Tokens | None, done: TokensDone
    ) -> Tokens | Pending | None:
        if found is not None and len(found.ids) < store.store.min_tokens:
            return found
        store.reason = self._reason(pool, store, prompt, found)
        if found is None or store.reason:
            self._metrics.count(pool, LookupResult.SKIPPED)
            return found
        chunks = store.names.of(found, prompt.cache_salt)
        if not chunks:
            return found

        def answer(match: StoreMatch) -> None:
            done(asyncio.get_running_loop().time(), found._replace(stored=match))

        match = store.lookups.match(chunks, found.ids, prompt.cache_salt, answer)
        return found._replace(stored=match) if isinstance(match, StoreMatch) else Pending(match)

    def _reason(self, pool: str, store: _PoolStore, prompt: Prompt, found: Tokens | None) -> str:
        """Return why a prompt is not looked up; empty if it is."""
        if found is None:
            return "the last prompt had no token ids (spec.engine.tokenizer)"
        if not self._trusts(pool, found.requests):
            return "the engines count other numbers of tokens than the tokenizer"
        known = self._pool_of(pool)
        reason = store.names.reason(prompt, store.model if known is None else known.model)
        return f"the last prompt {reason}" if reason else ""

    def _close(self, store: _PoolStore) -> None:
        store.lookups.release()
        task = asyncio.get_running_loop().create_task(store.lookups.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class NotAskedError(Exception):
    """A prompt for which a store is not asked; the text says why."""


async def ask_once(pool: Pool, prompt: Prompt, found: Tokens) -> StoreMatch:
    """Return what a pool's store holds of a prompt, with a connection for this one question.

    Raises NotAskedError, or StoreError if the store does not answer within QUESTION_S.
    """
    store, names = pool.kv_store, _ChunkNames(pool)
    if len(found.ids) < store.min_tokens:
        raise NotAskedError(f"the prompt has {len(found.ids)} of spec.kvStore.minTokens ({store.min_tokens}) tokens")
    reason = names.reason(prompt, pool.model)
    if reason:
        raise NotAskedError(f"the prompt {reason}")
    chunks = names.of(found, prompt.cache_salt)
    if not chunks:
        raise NotAskedError(f"the prompt has no whole chunk of {store.chunk_tokens} tokens")
    client, view = _client_of(store, pool.model), StoreView()
    try:
        async with asyncio.timeout(QUESTION_S):
            answer = await client.ask(Question(keys=chunks, chunks=chunks, ids=found.ids, salt=prompt.cache_salt))
    except TimeoutError:
        raise StoreError(f"no answer within {QUESTION_S:g} s") from None
    finally:
        await client.close()
    view.put(0.0, chunks, answer)
    return view.match(0.0, chunks, store.chunk_tokens)


def _is_same(used: _PoolStore | None, pool: Pool) -> bool:
    """Return whether a pool has the same store as before."""
    return used is not None and (used.store, used.model.name) == (pool.kv_store, pool.model.name)


def _client_of(store: KvStore, model: Model) -> StoreClient:
    match store.type:
        case StoreType.REDIS:
            # This import takes 0.4 s, and imports OpenTelemetry if that is installed.
            from dualmap_extproc.kv_stores.redis_sets import RedisSetsClient

            return RedisSetsClient(store.endpoint)
        case StoreType.LMCACHE:
            return LmCacheClient(
                store.endpoint, model=model.name, chunk_tokens=store.chunk_tokens, world_size=store.world_size
            )
        case _:
            return MooncakeClient(store.endpoint)
