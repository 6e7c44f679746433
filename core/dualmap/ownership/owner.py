"""The choice of the router that owns a pool."""

from collections.abc import Collection

from xxhash import xxh3_64_intdigest


def owner_of(pool: str, routers: Collection[str]) -> str | None:
    """Return the router that owns a pool, None without routers.

    Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): routers that
    know the same routers agree without a message, and a router that leaves or joins moves only its own pools.
    """
    return max(routers, key=lambda router: (xxh3_64_intdigest(f"{pool}\0{router}".encode()), router), default=None)
