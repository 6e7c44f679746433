"""Builds the request that a pool's router decides from what the client sent."""

from array import array
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Final

from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.token_chain import pack_tokens, token_root
from dualmap.kv_store.view import NO_MATCH, StoreMatch
from dualmap.pools.pool import Pool
from dualmap.prompts.blocks import MAX_BLOCKS, chain_blocks, chain_root
from dualmap.prompts.prompt import Prompt
from dualmap.requests import Request
from dualmap_extproc.names import OBJECTIVE_HEADER
from dualmap_extproc.request.body import session_of
from dualmap_extproc.request.client import client_of
from dualmap_extproc.request.ids import RequestIds
from dualmap_extproc.settings import Limits

# At most this many roots of models and their adapters are kept, of about 200 bytes each.
_COMMON_ROOTS_MAX: Final = 4096


class RequestBuilder:
    """Builds requests with new ``ids``.

    ``hash_key`` is the key of the hashes of prompts and sessions, and ``client_key`` that of clients' names.
    """

    def __init__(self, limits: Limits, ids: RequestIds, *, hash_key: bytes, client_key: bytes) -> None:
        self._limits = limits
        self._ids = ids
        self._hash_key = hash_key
        self._client_key = client_key
        # The roots of prompts without an adapter or a salt from the body. Clients cannot fill this cache, nor measure
        # whether a salt is in use.
        self._common_root = lru_cache(_COMMON_ROOTS_MAX)(partial(chain_root, key=hash_key))

    def build(
        self,
        pool: Pool,
        prompt: Prompt,
        subset: frozenset[str] | None,
        arrived_s: float,
        *,
        headers: Mapping[str, str],
        peer: str,
        ids: "array[int] | None",
        stored: StoreMatch = NO_MATCH,
        twin: Request | None = None,
    ) -> Request:
        """Return the request with a prompt for a pool; ``ids`` are the prompt's token ids of the pool's tokenizer.

        ``stored`` is what the pool's KV store holds of these ids. ``twin`` is the same request for another pool with
        the same model.
        """
        adapter, model = pool.model.adapter_of(prompt.model), pool.model.base_of(prompt.model)
        # An adapter that is the base has keys of its own before an engine says that it is an adapter.
        named = "" if adapter == model else adapter
        if prompt.lora or prompt.cache_salt:
            lora, salt = named or prompt.lora, prompt.cache_salt
            root = chain_root(model=model, lora=lora, cache_salt=salt, key=self._hash_key)
        else:
            root = self._common_root(model=model, lora=named)
        client_header = pool.routing.fairness.header
        # Without headers, only the salt may name the client.
        client = client_of(headers, client_header, "", key=self._client_key) if headers else 0
        return Request(
            id=self._ids.new(peer) if twin is None else twin.id,
            chain=chain_blocks(
                prompt.text,
                root=root,
                block_tokens=pool.routing.prefix.block_tokens,
                max_tokens=pool.engine.max_model_len,
                max_blocks=MAX_BLOCKS,
                exact=prompt.exact,
            ),
            arrived_s=arrived_s,
            subset=subset,
            streamed=prompt.streamed,
            session=session_of(headers.get(pool.routing.session.header.lower()) or prompt.session, root, self._limits),
            client=client or client_of(headers, client_header, prompt.cache_salt, key=self._client_key),
            client_is_salt=not client,
            comparable=prompt.comparable,
            tokens=self._tokens(pool, prompt, adapter, ids),
            sequences=prompt.sequences,
            adapter=adapter or pool.model.adapter_of(prompt.lora_name),
            model=prompt.model,
            priority=pool.objectives.priority_of(headers.get(OBJECTIVE_HEADER, "")),
            stored=stored,
        )

    def _tokens(self, pool: Pool, prompt: Prompt, adapter: str, ids: "array[int] | None") -> PromptTokens | None:
        """Return the token ids of a prompt, by which the engines' KV events find its blocks; None if not known.

        Ids in the body precede those of the pool's tokenizer. Most engines with own fields for an adapter do not name
        it in their events.
        """
        if prompt.lora or not pool.engine.kv_events.enabled:
            return None
        packed = prompt.token_ids
        if packed is None:
            if ids is None:
                return None
            packed = pack_tokens(ids)
        root = token_root(model=pool.model.name, adapter=adapter, cache_salt=prompt.cache_salt, key=self._hash_key)
        return PromptTokens(packed, root=root)
