"""The inputs of the generated Envoy configuration; ``app.envoy_config`` reads them from the command line."""

import ipaddress
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from dualmap.errors import DualMapError
from dualmap.pools.pool import BODY_BYTES, Pool

PORT_MAX = 65535
ANY_PATH: Final = "*"
"""The member of ``EnvoySettings.allow_paths`` that allows every path."""
MEMORY_BYTES: Final = 1 << 30
"""The memory limit of Envoy if no other limit is configured: the chart's default."""
_MEMORY_MIN: Final = 64 << 20
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}i": 1 << 10 * power for power, letter in enumerate("KMGT", start=1)
}
_QUANTITY: Final = re.compile(rf"(?P<number>\d{{1,15}}(\.\d{{1,9}})?(e\+?\d{{1,2}})?)(?P<unit>{'|'.join(_UNITS)})")
_PATH: Final = re.compile(r"/[^?#\s]*")


class EnvoySettingsError(DualMapError):
    """A setting that Envoy cannot use; the message names the field, the value and the accepted values."""

    def __init__(self, field: str, value: str, accepted: str) -> None:
        self.field = field
        super().__init__(f"{field}: {value!r} is not accepted; give {accepted}")


def read_memory(text: str, *, field: str) -> int:
    """Read an amount of memory, spelled as in a container's limits. Raises EnvoySettingsError."""
    found = _QUANTITY.fullmatch(text)
    size = int(float(found["number"]) * _UNITS[found["unit"]]) if found is not None else 0
    if size < _MEMORY_MIN:
        raise EnvoySettingsError(field, text, "an amount of at least 64Mi, such as 1Gi or 1073741824")
    return size


class Mode(StrEnum):
    """How Envoy sends a request's body to the router (ProcessingMode in Envoy's ext_proc reference).

    STREAMED sends headers and body together and waits for one answer, which has the lowest latency. FULL_DUPLEX is the
    mode of Gateway API gateways: the router sends the body back. BUFFERED waits for an answer to the headers, and then
    for an answer to the body.
    """

    STREAMED = "streamed"
    FULL_DUPLEX = "full-duplex"
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A TCP address; ``host`` is an IP address without brackets or a DNS name."""

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
        """Read the ``IP:PORT`` to listen on (port 0: any free port). Raises EnvoySettingsError."""
        address = cls._split(text)
        if address is None or not address.is_ip or not 0 <= address.port <= PORT_MAX:
            raise EnvoySettingsError(field, text, "IP:PORT, such as 127.0.0.1:8080 or [::]:8080")
        return address

    @classmethod
    def to_connect(cls, text: str, *, field: str) -> Self:
        """Read the ``HOST:PORT`` to connect to. Raises EnvoySettingsError."""
        address = cls._split(text)
        if address is None or not address.host or not 1 <= address.port <= PORT_MAX:
            raise EnvoySettingsError(field, text, "HOST:PORT, such as 127.0.0.1:9002 or [::1]:9002")
        return address

    @classmethod
    def _split(cls, text: str) -> Self | None:
        """Split at the last colon and remove brackets; return None without a port, or for IPv6 without brackets.

        The method replaces "localhost" by 127.0.0.1, because Envoy cannot listen on a name, and the router does not
        listen on ::1.
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
    """TLS from Envoy to routers and access log sinks. Paths are those in Envoy's file system; all files are PEM.

    ``certificate`` and ``key`` are the files of Envoy's client certificate and its key (None: no certificate). ``ca``
    verifies the server's certificate (None: Envoy accepts any). ``sds`` is the folder of the discovery files (SDS),
    which let Envoy reload changed files. If ``sds`` is None, Envoy reads the files only at its start. Raises
    EnvoySettingsError for an incomplete combination.
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
    """The settings for an Envoy that requests the pools from the routers.

    No pool may queue a request for more than ``longest_wait_s``.

    The bootstrap contains Envoy's timeout for a router's answer, so the timeout cannot depend on the pools.
    """

    longest_wait_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoySettings:
    """The inputs of ``bootstrap``.

    Envoy's configuration contains the pools in ``pools``. With ``discover``, Envoy requests the pools from the routers.
    The routers serve ext_proc and discovery. Envoy sends every access log entry to each of ``access_logs``, and to one
    of the addresses of a DNS name. ``tls`` applies to connections to routers and sinks (None: plain text). ``status``
    is the address that serves readiness and statistics to other hosts (None: nowhere). With ``static_endpoints``, the
    bootstrap contains a fixed list of members. Envoy sends the inference paths and ``allow_paths`` to engines
    (``http.paths``). ``memory_bytes`` is the memory limit of Envoy's container. Raises EnvoySettingsError for a value
    or a combination that Envoy cannot use.
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
    allow_paths: tuple[str, ...] = ()
    memory_bytes: int = MEMORY_BYTES

    def __post_init__(self) -> None:
        for path in self.allow_paths:
            if path != ANY_PATH and not _PATH.fullmatch(path):
                raise EnvoySettingsError("--allow-path", path, "a path such as /v1/detokenize, without a query, or '*'")
        if not self.pools and self.discover is None:
            raise EnvoySettingsError("pools", "none", "at least one pool")
        if self.pools and self.discover is not None:
            raise EnvoySettingsError("pools", f"{len(self.pools)} pools", "none if Envoy asks the routers for them")
        if self.static_endpoints and self.discover is not None:
            raise EnvoySettingsError("static_endpoints", "true", "false if Envoy asks the routers for pools")
        if not self.routers:
            raise EnvoySettingsError("routers", "none", "at least one router")
        if self.listen == self.admin and self.listen.port:
            raise EnvoySettingsError("admin", f"port {self.admin.port}", "another address than listen's")
        if self.status is not None and self.status.port and self.status in (self.listen, self.admin):
            raise EnvoySettingsError("status", f"port {self.status.port}", "another address than listen's and admin's")
        if self.status is not None and not self.admin.port:
            raise EnvoySettingsError("admin", "port 0", "a fixed port, since the status listener connects to it")

    @property
    def shares_access_log(self) -> bool:
        """Whether one of several routers may get each access log entry: there is one sink, and several routers.

        A DNS name may stand for several routers.
        """
        return len(self.access_logs) == 1 and (len(self.routers) > 1 or not self.access_logs[0].is_ip)

    @property
    def body_bytes(self) -> int:
        """The longest request body that Envoy buffers until a router has picked a member, and for a retry.

        Envoy answers 413 to a longer body. A discovered pool can only lower this limit.
        """
        return max([BODY_BYTES, *(pool.routing.max_body_bytes for pool in self.pools)])

    @property
    def longest_wait_s(self) -> float:
        """The longest time that a router may queue a request before it answers."""
        if self.discover is not None:
            return self.discover.longest_wait_s
        return max(pool.routing.queue.max_wait_s for pool in self.pools)
