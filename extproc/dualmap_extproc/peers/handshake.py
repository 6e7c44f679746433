"""The first frames of a connection: both routers prove that they have the same key of hashes.

Each router sends its name and a random nonce, then a keyed hash of both names and nonces. Neither router learns the
key. Routers with different keys would compute different hashes for the same prompt, so they are no peers.
"""

import secrets
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Final

from dualmap_extproc.peers.codec import Hello, RouterState, UnreadableFrame, decode_frame, encode_hello, encode_proof

VERSION: Final = 1
"""The version of the protocol. A release changes it only if it cannot talk to earlier releases."""
NONCE_BYTES: Final = 16
# The first frames come from a router that is not known yet, so they are small.
_HELLO_BYTES_MAX: Final = 1024


class NotAPeer(Exception):
    """The other side of a connection is not a router of this deployment; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """This router's part of a handshake. ``dialed`` is whether this router opened the connection."""

    name: str
    hash_key: bytes
    dialed: bool
    nonce: bytes

    @classmethod
    def new(cls, name: str, hash_key: bytes, *, dialed: bool) -> "Introduction":
        """Return an introduction with a new nonce."""
        return cls(name=name, hash_key=hash_key, dialed=dialed, nonce=secrets.token_bytes(NONCE_BYTES))

    @property
    def hello(self) -> bytes:
        """The first frame."""
        return encode_hello(Hello(version=VERSION, name=self.name, nonce=self.nonce))

    def read_hello(self, data: bytes) -> Hello:
        """Return the other router's hello. Raises UnreadableFrame, and NotAPeer for another version."""
        hello = decode_frame(data, bytes_max=_HELLO_BYTES_MAX).hello
        if hello is None or len(hello.nonce) != NONCE_BYTES:
            raise UnreadableFrame("no hello")
        if hello.version != VERSION:
            raise NotAPeer(
                f"the protocol has version {hello.version} instead of {VERSION}; run the same release in all routers"
            )
        return hello

    def proof(self, other: Hello) -> bytes:
        """Return the second frame, after the other router's hello."""
        return encode_proof(self._hash(other, by_dialer=self.dialed))

    def check_proof(self, data: bytes, other: Hello) -> RouterState:
        """Return the other router's state, which is in its second frame.

        Raises UnreadableFrame, and NotAPeer for another key.
        """
        frame = decode_frame(data, bytes_max=_HELLO_BYTES_MAX)
        if not compare_digest(frame.proof, self._hash(other, by_dialer=not self.dialed)):
            raise NotAPeer("the hash key is another; start all routers with the same --hash-key-file")
        return frame.state or RouterState(warm=False, leaving=False)

    def _hash(self, other: Hello, *, by_dialer: bool) -> bytes:
        parts = [(self.name.encode(), self.nonce), (other.name.encode(), other.nonce)]
        if not self.dialed:
            parts.reverse()
        # The proof of one side is never a proof of the other side.
        hashed = blake2b(key=self.hash_key, digest_size=32, person=b"dialer" if by_dialer else b"dialed")
        for name, nonce in parts:
            hashed.update(len(name).to_bytes(8, "little") + name + nonce)
        return hashed.digest()
