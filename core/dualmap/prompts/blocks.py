"""Converts prompt text into chained block hashes, which routers compare to find equal prefixes.

Each block's hash includes the block and all earlier blocks (DualMap paper, sections 3.2 and A.1.1). The common prefix
of two prompts is therefore the common beginning of their chains. The chain's root is a keyed hash of model, LoRA
adapter and ``cache_salt``. A client that does not know the key therefore cannot craft a prompt whose hashes equal those
of another tenant's prompt (docs/adr/0015-keyed-hashes.md). A token is estimated as four bytes of canonical prompt text,
until the engines report counts (``BlockChain.recounted``). For prompts of token ids, each id is encoded as four bytes,
so the count is exact.
"""

from hashlib import blake2b
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

BYTES_PER_TOKEN = 4
PUBLIC_KEY: Final = b"the public key of dualmap"
"""The default key of roots, for simulations and for routers without a secret key. Clients can know this key."""
MAX_BLOCKS: Final = 16_384
"""The most blocks of a prompt that a router hashes and indexes, which takes it a few milliseconds."""


class BlockChain(NamedTuple):
    """The chained 64-bit hashes of a prompt's blocks.

    The last block may be partial, so that short prompts also have different keys. ``tokens`` is the estimated number of
    tokens of the prompt, including those after the last hashed block. ``block_tokens`` is the estimated number of
    tokens of a full block. ``exact`` is true for a prompt of token ids, whose numbers are not estimates.
    ``full_blocks`` is the number of full blocks of text; None: as many as the tokens fill.
    """

    hashes: tuple[int, ...]
    block_tokens: int
    tokens: int
    exact: bool = False
    full_blocks: int | None = None

    @property
    def cacheable(self) -> tuple[int, ...]:
        """The hashes of the full blocks, because engines cache only full blocks."""
        full = self.tokens // self.block_tokens if self.full_blocks is None else self.full_blocks
        return self.hashes[:full]

    def tokens_of(self, blocks: int) -> int:
        """Return the number of prompt tokens in the first ``blocks`` blocks."""
        return min(blocks * self.block_tokens, self.tokens)

    def recounted(self, block_tokens: int) -> "BlockChain":
        """Return the same blocks with another estimate of the tokens of a full block.

        The hashes and the number of full blocks do not change, so all routers agree on keys whatever they estimate.
        """
        return self._replace(block_tokens=block_tokens, tokens=self.tokens * block_tokens // self.block_tokens)

    def bounded(self, tokens: int) -> "BlockChain":
        """Return the same blocks of a prompt that is counted as ``tokens`` tokens, fewer than before."""
        return self._replace(tokens=tokens, full_blocks=len(self.cacheable))

    def counted(self, tokens: int) -> "BlockChain":
        """Return the same blocks with the known number of tokens of the prompt, which the blocks share equally."""
        block_tokens = max(1, tokens * self.block_tokens // max(self.tokens, 1))
        full_blocks = self.tokens // self.block_tokens
        return self._replace(block_tokens=block_tokens, tokens=tokens, full_blocks=full_blocks)


def chain_root(
    *, model: str, lora: str = "", cache_salt: str = "", key: bytes = PUBLIC_KEY, purpose: bytes = b""
) -> int:
    """Return the root of a chain, hashed with ``key`` (at most 64 bytes).

    Length prefixes ensure that different arguments have different encodings. ``purpose`` (at most 16 bytes) separates
    the chains over text, whose purpose is empty, from other chains.
    """
    parts = [part.encode("utf-8", "surrogatepass") for part in (model, lora, cache_salt)]
    encoded = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return int.from_bytes(blake2b(encoded, digest_size=8, key=key, person=purpose).digest(), "little")


def chain_blocks(
    text: bytes,
    *,
    root: int,
    block_tokens: int,
    max_tokens: int | None = None,
    max_blocks: int | None = None,
    exact: bool = False,
) -> BlockChain:
    """Split canonical prompt text into blocks of ``block_tokens`` tokens; hash each block with all earlier blocks.

    Text beyond ``max_tokens`` (None: no limit) is ignored, because an engine rejects longer prompts. Text beyond
    ``max_blocks`` (None: no limit) counts as tokens, but is not hashed. ``exact`` is true for the text of token ids.
    """
    size = block_tokens * BYTES_PER_TOKEN
    if max_tokens is not None:
        text = text[: max_tokens * BYTES_PER_TOKEN]
    view = memoryview(text)
    link = root
    hashes = []
    hashed = len(text) if max_blocks is None else min(len(text), max_blocks * size)
    for start in range(0, hashed, size):
        link = xxh3_64_intdigest(view[start : start + size], link)
        hashes.append(link)
    tokens = -(-len(text) // BYTES_PER_TOKEN)
    return BlockChain(hashes=tuple(hashes), block_tokens=block_tokens, tokens=tokens, exact=exact)
