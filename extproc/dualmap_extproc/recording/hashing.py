"""The keyed hashes of recordings: the router's own 64-bit hashes, encrypted with AES under the folder's key.

AES permutes its blocks, so equal hashes have equal encryptions and different ones do not, except for the truncation to
64 bits. Without the key, nobody can compute the encryption of a guessed prompt's hash. One call encrypts all hashes of
many requests (``HashDigits``), which takes a few microseconds for each request.
"""

import sys
from array import array
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import Final

from xxhash import xxh3_64_intdigest

SECRET_BYTES: Final = 32


class Purpose(IntEnum):
    """What a hash stands for. Equal hashes of different purposes have different encryptions."""

    BLOCK = 0
    SESSION = 1
    CLIENT = 2
    REQUEST = 3
    SAMPLE = 4


class KeyedHashes:
    """Encrypts hashes with a key from ``secret``."""

    def __init__(self, secret: bytes) -> None:
        # The import takes 0.1 s, and only routers that record need it.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        key = _derived(secret, b"record hashes")
        # Without chaining, a block's encryption depends on the block alone, so one encryptor serves all calls.
        self._encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()

    def keyed(self, hashes: Sequence[int], purpose: Purpose) -> tuple[int, ...]:
        """Return the encryptions of 64-bit hashes."""
        return tuple(self.encrypted(array("Q", hashes), array("Q", (purpose,)) * len(hashes)))

    def encrypted(self, hashes: "array[int]", purposes: "array[int]") -> "array[int]":
        """Return the encryptions of 64-bit hashes, each with its own purpose."""
        padded = array("Q", bytes(16 * len(hashes)))
        padded[::2], padded[1::2] = hashes, purposes
        return array("Q", self._encryptor.update(padded.tobytes()))[::2]

    def one(self, value: int, purpose: Purpose) -> int:
        """Return the encryption of one hash."""
        return self.keyed((value,), purpose)[0]

    def text(self, text: str, purpose: Purpose) -> int:
        """Return the keyed hash of a text."""
        return self.one(text_hash(text), purpose)


class HashDigits:
    """Encrypts the hashes of many requests by one call, and returns them in the order in which they were added.

    Add all hashes first. Then each call of ``take`` returns the next of them.
    """

    def __init__(self, hashes: KeyedHashes) -> None:
        self._hashes = hashes
        self._added = array("Q")
        self._purposes = array("Q")
        self._digits: str | None = None
        self._taken = 0

    def add(self, hashes: Sequence[int], purpose: Purpose) -> None:
        """Add 64-bit hashes."""
        # An array extends an array three times as fast as a tuple does.
        self._added.extend(array("Q", hashes))
        self._purposes.extend(array("Q", (purpose,)) * len(hashes))

    def take(self, number: int = 1) -> str:
        """Return the next encryptions: 16 hex digits each, one after the other."""
        if self._digits is None:
            encrypted = self._hashes.encrypted(self._added, self._purposes)
            if sys.byteorder == "little":
                encrypted.byteswap()
            self._digits = encrypted.tobytes().hex()
        begin, self._taken = 16 * self._taken, self._taken + number
        return self._digits[begin : 16 * self._taken]


def text_hash(text: str) -> int:
    """Return the hash of a text, without a key."""
    return xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def roots_key(secret: bytes) -> bytes:
    """Return the key of prompts' hashes for a router that has no other: the same for all copies of the secret."""
    return _derived(secret, b"record roots")


def fingerprint(secret: bytes, hash_key: bytes) -> str:
    """Return what tells recordings with other hashes apart: 16 hex digits that reveal neither key."""
    return blake2b(hash_key, key=secret, person=b"record print", digest_size=8).hexdigest()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return blake2b(key=secret, person=purpose, digest_size=32).digest()
