"""What the generated Envoy configuration depends on, as values; ``command`` reads them from the command line."""

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from dualmap.errors import DualMapError
from dualmap.pools.pool import Pool

PORT_MAX = 65535


class EnvoySettingsError(DualMapError):
    """A setting Envoy could not run with; ``str()`` names the field, the value and what is accepted."""

    def __init__(self, field: str, value: str, accepted: str) -> None:
        self.field = field
        super().__init__(f"{field}: {value!r} is not accepted; give {accepted}")


class Mode(StrEnum):
    """How Envoy hands a request's body to the router (PROTOCOLS section 1).

    STREAMED sends headers and body at once and waits for one answer: the lowest latency. FULL_DUPLEX is what Gateway
    API gateways use: the body comes back from the router. BUFFERED asks twice: after the headers, after the body.
    """

    STREAMED = "streamed"
    FULL_DUPLEX = "full-duplex"
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A TCP address; ``host`` is an IP without brackets, or a DNS name where one is accepted."""

    host: str
    port: int

    @property
    def is_ip(self) -> bool:
        """Whether the host is an IP address rather than a DNS name."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    @classmethod
    def to_bind(cls, text: str, *, field: str) -> Self:
        """Read ``IP:PORT`` to listen on, port 0 being any free one; raises EnvoySettingsError."""
        address = cls._split(text)
        if address is None or not address.is_ip or not 0 <= address.port <= PORT_MAX:
            raise EnvoySettingsError(field, text, "IP:PORT, such as 127.0.0.1:8080 or [::]:8080")
        return address

    @classmethod
    def to_connect(cls, text: str, *, field: str) -> Self:
        """Read ``HOST:PORT`` to connect to; raises EnvoySettingsError."""
        address = cls._split(text)
        if address is None or not address.host or not 1 <= address.port <= PORT_MAX:
            raise EnvoySettingsError(field, text, "HOST:PORT, such as 127.0.0.1:9002 or [::1]:9002")
        return address

    @classmethod
    def _split(cls, text: str) -> Self | None:
        """Split at the last colon, take off brackets; None when there is no port or an IPv6 host lacks them.

        "localhost" is read as 127.0.0.1: Envoy neither listens on a name nor knows that the router has no ::1.
        """
        host, colon, port = text.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        if not colon or not (port.isascii() and port.isdigit()) or (":" in host) != bracketed:
            return None
        if any(not (c.isalnum() or c in "-._:%") for c in host):
            return None
        return cls(host="127.0.0.1" if host == "localhost" else host, port=int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How Envoy speaks TLS to routers and access log sinks; every path is as Envoy sees it, every file PEM.

    ``certificate`` and ``key`` are what Envoy shows (None: nothing), ``ca`` what must have signed the other side's
    certificate (None: nothing is checked). ``sds`` is the folder of the discovery files that make Envoy read those
    files again when they change (None: it reads them once). Raises EnvoySettingsError for halves of this.
    """

    certificate: str | None = None
    key: str | None = None
    ca: str | None = None
    sds: Path | None = None

    def __post_init__(self) -> None:
        if self.certificate is not None and self.key is None:
            raise EnvoySettingsError("--tls-cert", self.certificate, "--tls-key too, the key of this certificate")
        if self.key is not None and self.certificate is None:
            raise EnvoySettingsError("--tls-key", self.key, "--tls-cert too, the certificate of this key")
        if self.sds is not None and self.certificate is None and self.ca is None:
            raise EnvoySettingsError("--tls-sds", str(self.sds), "--tls-cert and --tls-key, or --tls-ca, or both too")


@dataclass(frozen=True, slots=True, kw_only=True)
class Discover:
    """Pools are those that the routers have, now and later; none may hold a request for more than ``longest_wait_s``.

    How long Envoy waits for a router's answer stands in the bootstrap, before any pool is known.
    """

    longest_wait_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoySettings:
    """Everything ``bootstrap`` needs to know.

    The pools are given, or with ``discover`` asked of the routers, which answer ext_proc and discovery. Each of
    ``access_logs`` is sent every access log entry. ``tls`` is about the way from Envoy to both (None: plain text).
    ``status`` is where readiness and statistics are shown to others than the administration's own host (None: nowhere).
    With ``static_endpoints`` the members are written into the file and never change. Raises EnvoySettingsError for a
    combination that Envoy would refuse.
    """

    pools: tuple[Pool, ...] = ()
    discover: Discover | None = None
    routers: tuple[Address, ...]
    access_logs: tuple[Address, ...]
    listen: Address
    admin: Address
    status: Address | None = None
    mode: Mode = Mode.STREAMED
    tls: Tls | None = None
    static_endpoints: bool = False

    def __post_init__(self) -> None:
        if not self.pools and self.discover is None:
            raise EnvoySettingsError("pools", "none", "at least one pool")
        if self.pools and self.discover is not None:
            raise EnvoySettingsError("pools", f"{len(self.pools)} pools", "none where they are asked of the routers")
        if self.static_endpoints and self.discover is not None:
            raise EnvoySettingsError("static_endpoints", "true", "false where pools are asked of the routers")
        if not self.routers:
            raise EnvoySettingsError("routers", "none", "at least one router")
        if self.listen == self.admin and self.listen.port:
            raise EnvoySettingsError("admin", f"port {self.admin.port}", "another address than listen's")
        if self.status is not None and self.status.port and self.status in (self.listen, self.admin):
            raise EnvoySettingsError("status", f"port {self.status.port}", "another address than listen's and admin's")
        if self.status is not None and not self.admin.port:
            raise EnvoySettingsError("admin", "port 0", "a port, which status asks for what it shows")

    @property
    def longest_wait_s(self) -> float:
        """How long a router may hold a request before it answers."""
        if self.discover is not None:
            return self.discover.longest_wait_s
        return max(pool.routing.queue.max_wait_s for pool in self.pools)
