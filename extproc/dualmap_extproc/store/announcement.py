"""Finds the addresses of the other routers in Redis, where each router announces its own."""

import asyncio
import socket
from collections.abc import Collection
from ipaddress import ip_address
from typing import Protocol

from dualmap_edge.ports import address
from dualmap_extproc.store.contract import StoreError
from dualmap_extproc.store.target import Target


class AddressStore(Protocol):
    """The method of ``redis.RedisStore`` that announcements use."""

    async def announce(self, name: str, address: str) -> tuple[str, ...]:
        """Announce a router's address for a few seconds; return the addresses that routers announced."""


class Announcement:
    """Announces the address of router ``name``, and finds those of the others, at each call of ``find``.

    ``host`` is the router's ``--host``, and ``port`` the bound gRPC port. A router that listens on all addresses
    announces the one from which it reaches the store. While the store is unreachable, the last addresses apply.
    """

    def __init__(self, store: AddressStore, *, name: str, host: str, port: int, target: Target) -> None:
        self._store = store
        self._name = name
        self._host = host
        self._port = port
        self._target = target
        self._found: tuple[tuple[str, int], ...] = ()

    async def find(self) -> Collection[tuple[str, int]]:
        """Announce this router; return the addresses of all routers."""
        try:
            host = await asyncio.to_thread(reachable_host, self._host, self._target)
            found = await self._store.announce(self._name, address(host, self._port))
        except (OSError, StoreError):
            # The exchange with the store logs that it is unreachable.
            return self._found
        self._found = tuple(each for each in map(_split, found) if each is not None)
        return self._found


def reachable_host(host: str, target: Target) -> str:
    """Return the IP address under which others reach a router that listens on ``host``. Raises OSError.

    A router that listens on all addresses uses the local address of its connections to the store.
    """
    listening = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0][4][0]
    if not ip_address(str(listening).partition("%")[0]).is_unspecified:
        return str(listening)
    if target.path:
        return "127.0.0.1"
    family, kind, protocol, _, where = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # To connect a UDP socket sends nothing, but selects the local address.
        probe.connect(where)
        return str(probe.getsockname()[0])


def _split(text: str) -> tuple[str, int] | None:
    """Return an announced IP address and port; None for any other text."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        ip_address(host)
    except ValueError:
        return None
    return (host, int(port)) if port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16 else None
