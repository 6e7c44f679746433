"""The identity of a gRPC client: the names in its verified certificate, else its IP address."""

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Protocol
from urllib.parse import unquote


class CallContext(Protocol):
    """The methods of ``grpc.aio.ServicerContext`` that identify the client of a call."""

    def peer(self) -> str:
        """Return the client's address, such as ``ipv4:10.0.0.1:41234`` or ``ipv6:%5B::1%5D:41234``."""

    def peer_identities(self) -> Iterable[bytes] | None:
        """Return the names in the client's verified certificate, or None without such a certificate."""


def peer_of(context: CallContext) -> str:
    """Return the identity of a call's client, which is equal for all connections of one Envoy.

    With mutual TLS the identity consists of the names in the client's certificate, because these names stay the same
    behind NAT and after the certificate's renewal. Otherwise the identity is the client's IP address.
    """
    names = context.peer_identities()
    if names:
        return "certificate " + " ".join(sorted(repr(name) for name in names))
    return _host(context.peer())


# Every request is a call, and Envoy sends its calls through few connections.
@lru_cache(maxsize=1024)
def _host(peer: str) -> str:
    """Return the IP address in gRPC's notation of an address; any other notation stays unchanged."""
    host = unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]")
    try:
        address = ip_address(host)
    except ValueError:
        return peer
    # A socket for both IP versions shows the same IPv4 client with a mapped address.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
