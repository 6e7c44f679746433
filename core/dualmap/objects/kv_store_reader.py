"""Reads ``spec.kvStore`` of an InferencePool."""

import re
from typing import Final

from dualmap.errors import PoolError
from dualmap.objects.fields import Fields, without_secrets
from dualmap.pools.kv_store import ChunkHash, KvStore, StoreType
from dualmap.pools.pool import Tokenizer, TokenSource

# The same as in the schema.
_HOST_PORT: Final = (
    r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])"
    r":([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
)
_HTTP: Final = re.compile(rf"http://{_HOST_PORT}/?", re.ASCII)
_REDIS: Final = re.compile(rf"redis://{_HOST_PORT}(/[0-9]{{1,5}})?", re.ASCII)
_ACCEPTED: Final = "with a port from 1 to 65535, without user, password and query"
_SEED: Final = re.compile(r"[ -~]{0,253}", re.ASCII)
# A comma would end the key in a question to Mooncake.
_KEY: Final = re.compile(r"([!-+\--z|~]|\{model\})*\{hash\}([!-+\--z|~]|\{model\})*", re.ASCII)
_KEY_ACCEPTED: Final = "at most 253 visible characters with {hash} once, perhaps {model}, and no comma"
_KEY_LONGEST: Final = 253


def read_kv_store(fields: Fields, tokenizer: Tokenizer, *, model: str = "") -> KvStore:
    """Return the store of a pool with a source of token ids. Raises PoolError.

    ``model`` is the name that replaces ``{model}`` in keys.
    """
    kind = StoreType(fields.choice("type", StoreType.NONE, list(StoreType)))
    default = KvStore()
    store = KvStore(
        type=kind,
        endpoint=_endpoint(fields, kind),
        hash=ChunkHash(fields.choice("hash", default.hash, list(ChunkHash))),
        seed=fields.matching("seed", _SEED, "at most 253 printable ASCII characters", default.seed),
        chunk_tokens=fields.integer("chunkTokens", default.chunk_tokens, 1, 8192),
        key=_key(fields),
        min_tokens=fields.integer("minTokens", default.min_tokens, 1, 10**8),
        timeout_s=fields.duration("timeout", default.timeout_s, low_s=0.001, high_s=1.0),
        fetch_tokens_per_second=fields.number(
            "fetchTokensPerSecond", default.fetch_tokens_per_second, 1000, 10_000_000
        ),
        world_size=fields.integer("worldSize", default.world_size, 1, 1024),
    )
    fields.refuse_others()
    if kind is StoreType.MOONCAKE and "," in model and "{model}" in store.key:
        raise PoolError(fields.at("key"), store.key, f"a key without {{model}}, because '{model}' has a comma")
    if store.is_used and tokenizer.source is TokenSource.ESTIMATE:
        accepted = (
            "None while spec.engine.tokenizer.source is Estimate, because stores are asked for hashes of token ids"
        )
        raise PoolError(fields.at("type"), kind.value, accepted)
    return store


def _endpoint(fields: Fields, kind: StoreType) -> str:
    match kind:
        case StoreType.NONE:
            given = fields.get("endpoint")
            if given not in (None, ""):
                raise PoolError(fields.at("endpoint"), without_secrets(given), "no value, because type is None")
            return ""
        case StoreType.REDIS:
            accepted = f"redis://HOST:PORT or redis://HOST:PORT/DB {_ACCEPTED}"
            return fields.address("endpoint", _REDIS, accepted)
        case _:
            return fields.address("endpoint", _HTTP, f"http://HOST:PORT {_ACCEPTED}").rstrip("/")


def _key(fields: Fields) -> str:
    value = fields.get("key")
    if value in (None, ""):
        return ""
    key = fields.matching("key", _KEY, _KEY_ACCEPTED)
    if len(key) > _KEY_LONGEST:
        raise PoolError(fields.at("key"), key, _KEY_ACCEPTED)
    return key
