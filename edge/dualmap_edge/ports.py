"""Listen addresses of router and operator: their format, and a check that a server can bind them.

The check runs before the servers bind, because gRPC writes the reason for a failed bind only to its C++ log.
"""

import errno
import socket
from typing import Final

IDLE_TIMEOUT_S: Final = 20.0
"""The time after which an HTTP connection without a complete request is closed.

The chart's Prometheus scrapes every 15 s; aiohttp's default is an hour.
"""


class AddressError(Exception):
    """A port cannot be bound; the message contains the address, the reason and the option to change."""

    def __init__(self, host: str, port: int, option: str, reason: object) -> None:
        super().__init__(f"cannot listen on {address(host, port)}: {reason}; give another {option}")


def address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int, option: str) -> None:
    """Raise AddressError if ``port`` (0: any) cannot be bound on ``host``; ``option`` is the option for the port."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # The same socket option as in gRPC: connections of a stopped router do not block the port, but a listener
            # does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(host, port, "--host", getattr(error, "strerror", None) or "not a host name") from error
    except OSError as error:
        wrong = "--host" if error.errno == errno.EADDRNOTAVAIL else option
        raise AddressError(host, port, wrong, error.strerror) from error
