"""Converts token ids into chained keys, which are compared with the blocks that engines report.

A key covers a block of token ids and all earlier blocks. The block size is the engine's. The chain's root contains the
model, the LoRA adapter and ``cache_salt``, hashed with the secret key of ``dualmap.prompts.blocks``. A publisher of
events does not know the key, so it cannot construct tokens with a wanted key. The roots differ from the roots of chains
over text, so that no key of one kind is ever found among keys of the other kind.

Engines also hash blocks, but their hashes contain values that neither requests nor events contain, such as a seed or
the path of an adapter. The router therefore uses an engine's hash only as the name of a block.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import iter_unpack
from typing import Final

from xxhash import xxh3_64_intdigest

from dualmap.prompts.blocks import PUBLIC_KEY, chain_root

TOKEN_BYTES: Final = 4
_TOKEN_CODE: Final = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)
# A key has 60 of a link's 64 bits: a Python integer of 60 bits takes 32 bytes, and one of 64 bits takes 48 bytes.
KEY_SHIFT: Final = 4

MediaId = str | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """An image, video or audio clip of a prompt: its identifier and the token positions of its placeholders."""

    id: MediaId
    start: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChain:
    """The keys of a prompt's full blocks; ``tokens`` is the length of the whole prompt."""

    keys: tuple[int, ...]
    block_tokens: int
    tokens: int

    def reusable_tokens(self, blocks: int) -> int:
        """Return how many tokens of the first ``blocks`` blocks an engine reuses.

        Engines always compute the last token of a prompt, so the block that ends with the prompt is not reused.
        """
        return min(blocks, max(self.tokens - 1, 0) // self.block_tokens) * self.block_tokens


def pack_tokens(ids: Iterable[int]) -> bytes:
    """Encode token ids as four little-endian bytes each.

    A value that is not a whole number of 32 bits raises TypeError or OverflowError.
    """
    packed = array(_TOKEN_CODE, ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def token_root(*, model: str, adapter: str = "", cache_salt: str = "", key: bytes = PUBLIC_KEY) -> int:
    """Return the root of a chain over token ids."""
    return chain_root(model=model, lora=adapter, cache_salt=cache_salt, key=key, purpose=b"token ids")


def link_media(link: int, media: Iterable[MediaId]) -> int:
    """Return the link before a block that contains placeholders of media.

    The encoded length is never a multiple of a token's four bytes, so no token ids have the same encoding.
    """
    parts = [each if isinstance(each, bytes) else each.encode("utf-8", "surrogatepass") for each in media]
    encoded = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return xxh3_64_intdigest(encoded + b"media"[: 1 + -len(encoded) % TOKEN_BYTES], link)


def link_block(link: int, tokens: bytes) -> int:
    """Return the link after a block: the hash of its packed token ids and of all earlier blocks."""
    return xxh3_64_intdigest(tokens, link)


def chain_tokens(tokens: bytes, *, root: int, block_tokens: int, media: Sequence[Media] = ()) -> TokenChain:
    """Return the chain of a prompt's packed token ids; ``media`` are in the order of their positions."""
    size = block_tokens * TOKEN_BYTES
    blocks = len(tokens) // size
    touched = _media_of_blocks(media, block_tokens, blocks)
    link = root
    keys = []
    # The loop calls xxhash directly, because a prompt may have thousands of blocks.
    for number, (block,) in enumerate(iter_unpack(f"{size}s", memoryview(tokens)[: blocks * size])):
        if touched and number in touched:
            link = link_media(link, touched[number])
        link = xxh3_64_intdigest(block, link)
        keys.append(link >> KEY_SHIFT)
    return TokenChain(keys=tuple(keys), block_tokens=block_tokens, tokens=len(tokens) // TOKEN_BYTES)


def _media_of_blocks(media: Sequence[Media], block_tokens: int, blocks: int) -> dict[int, list[MediaId]]:
    touched: dict[int, list[MediaId]] = {}
    for each in media:
        last = min((each.start + each.tokens - 1) // block_tokens, blocks - 1)
        for number in range(each.start // block_tokens, last + 1):
            touched.setdefault(number, []).append(each.id)
    return touched
