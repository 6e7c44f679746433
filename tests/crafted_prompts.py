"""Prompts of token ids, crafted to have the hashes of another tenant's prompt.

The attacker must know the roots of both chains, because xxh3 can be inverted for a known seed.
"""

from array import array
from typing import Final

from xxhash import xxh3_64_intdigest

BLOCK_TOKENS: Final = 4
"""The block length of the crafted prompts: blocks of 16 bytes, for which xxh3 is shortest."""

_BLOCK_BYTES: Final = 4 * BLOCK_TOKENS
_MASK: Final = 2**64 - 1
# Bytes 24 to 55 of XXH3's default secret, as the words that a 16-byte input uses.
_SECRET: Final = tuple(
    int.from_bytes(bytes.fromhex(word), "little")
    for word in ("7240a4a4b7b3671f", "cb79e64eccc0e578", "825ad07dccff7221", "b8084674f743248e")
)
_AVALANCHE_PRIME: Final = 0x165667919E3779F9


def crafted_ids(token_ids: list[int], root: int, own_root: int) -> list[int]:
    """Return token ids whose chain under ``own_root`` equals the chain of ``token_ids`` under ``root``."""
    first = array("I", token_ids[:BLOCK_TOKENS]).tobytes()
    assert len(first) == _BLOCK_BYTES
    block = _preimage(xxh3_64_intdigest(first, root), own_root)
    assert xxh3_64_intdigest(block, own_root) == xxh3_64_intdigest(first, root)
    return [*array("I", block), *token_ids[BLOCK_TOKENS:]]


def _preimage(digest: int, seed: int) -> bytes:
    """Return a block of 16 bytes with this xxh3 hash (XXH3_len_9to16_64b, with a product of zero)."""
    low = (_SECRET[0] ^ _SECRET[1]) + seed & _MASK
    high = (_SECRET[2] ^ _SECRET[3]) - seed & _MASK
    # For shifts of at least 32 bits, ``value ^ value >> shift`` is its own inverse.
    mixed = (digest ^ digest >> 32) * pow(_AVALANCHE_PRIME, -1, 2**64) & _MASK
    mixed ^= mixed >> 37
    return low.to_bytes(8, "little") + ((mixed - _BLOCK_BYTES & _MASK) ^ high).to_bytes(8, "little")
