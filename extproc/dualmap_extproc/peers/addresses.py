"""The addresses of the other routers by their names: a DNS name stands for all its addresses."""

import asyncio
import socket
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import Final

from dualmap_edge.logs import OncePerMinute, get_logger

_LOOKUP_S: Final = 1.0
_log = get_logger(__name__)


class NamedAddresses:
    """Finds the addresses of the ``names``, each a host and a port. While a name is not found, its last ones apply."""

    def __init__(self, names: Sequence[tuple[str, int]]) -> None:
        self._found: dict[tuple[str, int], tuple[str, ...]] = {}
        self._lookups: dict[tuple[str, int], asyncio.Task[None]] = {}
        for host, port in names:
            self._found[host, port] = (host,) if _is_ip(host) else ()
        self._failed = OncePerMinute(_log, "Cannot look up the name of a router", asyncio.get_running_loop().time)

    async def find(self) -> Collection[tuple[str, int]]:
        """Return all addresses of all names."""
        for name in self._found:
            # A lookup may take longer than the interval between two calls; it holds a thread until its end.
            if not _is_ip(name[0]) and (name not in self._lookups or self._lookups[name].done()):
                self._lookups[name] = asyncio.create_task(self._look_up(name))
        if self._lookups:
            await asyncio.wait(self._lookups.values(), timeout=_LOOKUP_S)
        return [(host, name[1]) for name, hosts in self._found.items() for host in hosts]

    async def _look_up(self, name: tuple[str, int]) -> None:
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(*name, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._failed.warn(1, name=name[0], reason=getattr(error, "strerror", None) or str(error))
            return
        self._found[name] = tuple(str(answer[4][0]) for answer in answers)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
