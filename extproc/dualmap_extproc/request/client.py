"""The client of a request. A pool's router divides the pool between its clients (``dualmap.queue.fair_shares``)."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from dualmap_extproc.names import FAIRNESS_HEADER

NAME_CHARACTERS: Final = 1024
"""Only so many characters of a client's name are read."""


def client_of(headers: Mapping[str, str], pool_header: str, cache_salt: str, *, key: bytes) -> int:
    """Return a keyed hash of the name of a request's client, or 0 if the request names none.

    The name is the value of the fairness header, else of the pool's header ``pool_header``, else the salt of the body.
    Only with ``key`` can one find a name with the hash of another client, or check which name a hash belongs to.
    """
    header = headers.get(FAIRNESS_HEADER) or headers.get(pool_header)
    name = header or cache_salt
    if not name:
        return 0
    # A salt is never the same client as an equal header.
    kind = b"header" if header else b"salt"
    encoded = name[:NAME_CHARACTERS].encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(encoded, digest_size=8, key=key, person=kind).digest()) or 1
