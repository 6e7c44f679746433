"""Listen addresses of router and operator: their format, and a check that they can be bound.

The check runs before the servers bind: gRPC reports why it cannot bind only in its own C++ log.
"""

import errno
import socket
from typing import Final

IDLE_TIMEOUT_S: Final = 20.0
"""An HTTP connection without a complete request for so long is closed. The chart's Prometheus scrapes every 15 s;
aiohttp's default is an hour."""


class AddressError(Exception):
    """A port cannot be bound; the message names the address, the option to change, and the reason."""

    def __init__(self, host: str, port: int, option: str, reason: object) -> None:
        super().__init__(f"cannot listen on {address(host, port)}: {reason}; give another {option}")


def address(host: str, port: int) -> str:
    """Write ``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int, option: str) -> None:
    """Raise AddressError when ``port`` (0: any) cannot be bound on ``host``; ``option`` is what sets the port."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections of a stopped router do not block the port, but a listener does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(host, port, "--host", getattr(error, "strerror", None) or "not a host name") from error
    except OSError as error:
        wrong = "--host" if error.errno == errno.EADDRNOTAVAIL else option
        raise AddressError(host, port, wrong, error.strerror) from error
