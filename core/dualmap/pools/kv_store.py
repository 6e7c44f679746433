"""The shared KV store of a pool: where routers ask what it holds, and how it names what it holds."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class StoreType(StrEnum):
    """What answers for the store; NONE stands for no store."""

    NONE = "None"
    MOONCAKE = "Mooncake"
    LMCACHE = "LMCache"
    REDIS = "Redis"


class ChunkHash(StrEnum):
    """The algorithm that turns the token ids of a chunk, and of all chunks before it, into the chunk's digest."""

    SHA256_CBOR = "sha256_cbor"
    SHA256_HEX = "sha256_hex"
    XXHASH = "xxhash"


KEY_FORMS: Final = {
    ChunkHash.SHA256_CBOR: "{hash}_0",
    ChunkHash.SHA256_HEX: "{hash}",
    ChunkHash.XXHASH: "iris.block.hash.key.{hash}",
}
"""How Llumnix makes a store's key of a chunk's digest, the default of ``KvStore.key``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStore:
    """The KV store that the members of a pool share.

    Only whole chunks of ``chunk_tokens`` tokens are in the store, under the key that ``key`` makes of the digest:
    ``{hash}`` stands for the digest and ``{model}`` for the pool's model; empty for the form of Llumnix. ``seed``
    begins the digests of SHA256_CBOR. Prompts of fewer than ``min_tokens`` tokens are not looked up. A request waits at
    most ``timeout_s`` for an answer. ``fetch_tokens_per_second`` is the first guess of the speed with which a member
    fetches from the store. With LMCACHE, a chunk counts if all ``world_size`` ranks have it.
    """

    type: StoreType = StoreType.NONE
    endpoint: str = ""
    hash: ChunkHash = ChunkHash.SHA256_CBOR
    seed: str = "0"
    chunk_tokens: int = 256
    key: str = ""
    min_tokens: int = 1024
    timeout_s: float = 0.005
    fetch_tokens_per_second: float = 200_000.0
    world_size: int = 1

    @property
    def is_used(self) -> bool:
        """Whether the pool has a store."""
        return self.type is not StoreType.NONE

    @property
    def key_form(self) -> str:
        """The form of the store's keys."""
        return self.key or KEY_FORMS[self.hash]
