"""Turns the token ids of a prompt into the keys under which a KV store has its chunks.

A chunk's digest covers its tokens and all chunks before it. The algorithms are those of Llumnix (``kvs-hash-algo``);
its ``sha256_cbor`` with seed 0 equals the block hash of vLLM's ``sha256_cbor`` under ``PYTHONHASHSEED=0``. Deviation: a
chunk that the prompt does not fill has no key.
"""

from array import array
from collections.abc import Iterator
from hashlib import sha256
from sys import byteorder
from typing import Final

from xxhash import xxh64

from dualmap.kv_store.cbor import BlockEncoder, encode_text
from dualmap.pools.kv_store import ChunkHash, KvStore

CHUNKS_MAX: Final = 1024
"""The most chunks of a prompt that a store is asked for: 262,144 tokens in chunks of 256."""


class ChunkKeys:
    """Names the chunks of prompts in one pool's store; ``model`` is the name of the pool's model."""

    def __init__(self, store: KvStore, model: str) -> None:
        self.chunk_tokens = store.chunk_tokens
        self._hash = store.hash
        self._seed = store.seed
        self._encoder = BlockEncoder()
        # The form has no other braces (``objects.pool_reader``).
        before, after = store.key_form.split("{hash}")
        self._prefix, self._suffix = before.replace("{model}", model), after.replace("{model}", model)

    def keys(self, ids: "array[int]") -> tuple[str, ...]:
        """Return the keys of a prompt's full chunks, the first CHUNKS_MAX at most."""
        chunks = self._chunks(ids)
        match self._hash:
            case ChunkHash.SHA256_CBOR:
                digests = self._sha256_cbor(chunks)
            case ChunkHash.SHA256_HEX:
                digests = _sha256_hex(chunks)
            case ChunkHash.XXHASH:
                digests = _xxhash(chunks)
        return tuple([f"{self._prefix}{digest}{self._suffix}" for digest in digests])

    def _chunks(self, ids: "array[int]") -> Iterator["array[int]"]:
        size = self.chunk_tokens
        return (ids[start : start + size] for start in range(0, min(len(ids) // size, CHUNKS_MAX) * size, size))

    def _sha256_cbor(self, chunks: Iterator["array[int]"]) -> Iterator[str]:
        digest = sha256(encode_text(self._seed)).digest()
        for chunk in chunks:
            digest = sha256(self._encoder.encode(digest, chunk, len(chunk))).digest()
            yield digest.hex()


def _sha256_hex(chunks: Iterator["array[int]"]) -> Iterator[str]:
    digest = b""
    for chunk in chunks:
        digest = sha256(digest + _little_endian(chunk, "I")).digest()
        yield digest.hex()


def _xxhash(chunks: Iterator["array[int]"]) -> Iterator[str]:
    running = xxh64()
    for chunk in chunks:
        running.update(_little_endian(chunk, "q"))
        yield str(running.intdigest())


def _little_endian(ids: "array[int]", code: str) -> bytes:
    packed = array(code, ids)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
