"""Prompt text to chained block hashes, which are used to compare prefixes.

Each block's hash names the block *with everything before it* (DualMap paper, sections 3.2 and A.1.1). Two prompts
therefore share a prefix exactly as long as their chains agree. The chain is rooted in model, LoRA adapter and
``cache_salt``: tenants with different salts never share a hash. A token is estimated as four bytes of canonical prompt
text. Prompts that arrive as token ids are encoded as four bytes an id, so their count is exact.
"""

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChain:
    """The chained 64-bit hashes of a prompt's blocks.

    The last block may be partial: it gives short prompts a key of their own. ``tokens`` counts the whole
    prompt (estimated, see the module), ``block_tokens`` the tokens of a full block.
    """

    hashes: tuple[int, ...]
    block_tokens: int
    tokens: int

    @property
    def cacheable(self) -> tuple[int, ...]:
        """The hashes of the full blocks: engines cache no others, so only these can be found again."""
        return self.hashes[: self.tokens // self.block_tokens]

    def tokens_of(self, blocks: int) -> int:
        """Return how many prompt tokens the first ``blocks`` blocks hold."""
        return min(blocks * self.block_tokens, self.tokens)


def chain_root(*, model: str, lora: str = "", cache_salt: str = "") -> int:
    """Return the seed of a chain. The parts are length-prefixed, so no two triples run together."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (model, lora, cache_salt)]
    return xxh3_64_intdigest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


def chain_blocks(text: bytes, *, root: int, block_tokens: int, max_tokens: int | None = None) -> BlockChain:
    """Cut canonical prompt text into blocks of ``block_tokens`` tokens and hash each with all before it.

    Text beyond ``max_tokens`` (None: no limit) is ignored: an engine computes no longer prompt.
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
