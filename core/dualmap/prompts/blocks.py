"""Converts prompt text into chained block hashes, which routers compare to find equal prefixes.

Each block's hash includes the block and all earlier blocks (DualMap paper, sections 3.2 and A.1.1). The common prefix
of two prompts is therefore the common beginning of their chains. The chain's root is a hash of model, LoRA adapter and
``cache_salt``, so tenants with different salts never have equal hashes. A token is estimated as four bytes of canonical
prompt text. For prompts of token ids, each id is encoded as four bytes, so the count is exact.
"""

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChain:
    """The chained 64-bit hashes of a prompt's blocks.

    The last block may be partial, so that short prompts also have different keys. ``tokens`` is the estimated number of
    tokens of the prompt. ``block_tokens`` is the number of tokens of a full block.
    """

    hashes: tuple[int, ...]
    block_tokens: int
    tokens: int

    @property
    def cacheable(self) -> tuple[int, ...]:
        """The hashes of the full blocks, because engines cache only full blocks."""
        return self.hashes[: self.tokens // self.block_tokens]

    def tokens_of(self, blocks: int) -> int:
        """Return the number of prompt tokens in the first ``blocks`` blocks."""
        return min(blocks * self.block_tokens, self.tokens)


def chain_root(*, model: str, lora: str = "", cache_salt: str = "") -> int:
    """Return the root of a chain. Length prefixes ensure that different arguments have different encodings."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (model, lora, cache_salt)]
    return xxh3_64_intdigest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


def chain_blocks(text: bytes, *, root: int, block_tokens: int, max_tokens: int | None = None) -> BlockChain:
    """Split canonical prompt text into blocks of ``block_tokens`` tokens; hash each block with all earlier blocks.

    Text beyond ``max_tokens`` (None: no limit) is ignored, because an engine rejects longer prompts.
    """
    size = block_tokens * BYTES_PER_TOKEN
    if max_tokens is not None:
        text = text[: max_tokens * BYTES_PER_TOKEN]
    view = memoryview(text)
    link = root
    hashes = []
    for start in range(0, len(text), size):
        link = xxh3_64_intdigest(view[start : start + size], link)
        hashes.append(link)
    return BlockChain(hashes=tuple(hashes), block_tokens=block_tokens, tokens=-(-len(text) // BYTES_PER_TOKEN))
