"""Ids of requests, each bound to the Envoy that sent the request.

An Envoy reports the end of a request to every router or to any, and other programs may reach the access log port. An
id contains a keyed hash of the Envoy's identity (``wire.peer``). The router accepts a report about an id only from the
same identity.
"""

from hashlib import blake2b
from hmac import compare_digest
from itertools import count
from typing import Final

SEAL_BYTES: Final = 8
"""The length of the keyed hash in an id: 64 bits, which no client can guess."""
KEY_BYTES: Final = 32
"""The length of the secret key of the hashes."""


def router_of(request_id: str) -> str:
    """Return the name of the router that made an id, whichever router that is."""
    return request_id.rsplit("-", 2)[0]


class RequestIds:
    """The request ids of this process.

    ``prefix`` makes the ids unique among replicas and restarts. ``key`` is the secret that makes the ids unguessable.
    """

    def __init__(self, prefix: str, key: bytes) -> None:
        self.prefix = f"{prefix}-"
        self._keyed = blake2b(digest_size=SEAL_BYTES, key=key)
        self._sequence = count()

    def new(self, peer: str) -> str:
        """Return the id of a new request, which the Envoy with identity ``peer`` sent."""
        body = f"{self.prefix}{next(self._sequence)}"
        return f"{body}-{self._seal(body, peer)}"

    def is_from(self, request_id: str, peer: str) -> bool:
        """Return whether this process made ``request_id`` for a request of ``peer``."""
        body, _, seal = request_id.rpartition("-")
        return compare_digest(seal.encode(), self._seal(body, peer).encode())

    def _seal(self, body: str, peer: str) -> str:
        # A copy of the keyed state takes less time than a new one.
        state = self._keyed.copy()
        state.update(f"{body} {peer}".encode())
        return state.hexdigest()
