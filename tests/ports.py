"""Ports for servers that a test stops and starts again, or whose port must be known before the start.

A port that the kernel chooses can go to another program while the server is stopped: to a server on port 0, or to the
client's end of a connection.
"""

import itertools
import os
import random
import socket
from collections.abc import Iterator
from typing import Final

# The kernel chooses ports from 32,768. The port 10,000 above is reserved as well, because a node of a Redis Cluster
# also uses that port.
_PORTS: Final = range(12_000, 22_000)
_SECOND: Final = 10_000


def reserved_port(host: str = "127.0.0.1") -> int:
    """Return a free port that neither the kernel nor another pytest worker of this run gives to another server."""
    return next(port for port in _reserved if _is_free(host, port) and _is_free(host, port + _SECOND))


def _worker_ports() -> Iterator[int]:
    """Yield the ports of this pytest worker, from a random one, because another run may use the same ports."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = _PORTS[worker::workers]
    # Hypothesis seeds the module's own generator.
    first = random.SystemRandom().randrange(len(ports))
    return itertools.cycle((*ports[first:], *ports[:first]))


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


_reserved: Final = _worker_ports()
