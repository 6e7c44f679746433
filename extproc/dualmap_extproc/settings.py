"""The router's settings, parsed once from the command line (``main``)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dualmap.errors import DualMapError
from dualmap_edge.logs import LogFormat

# The longest replica id, which is part of request ids, metrics and keys in Redis: the length of a host name.
REPLICA_ID_CHARACTERS: Final = 253


class TracingError(DualMapError):
    """The settings for exporting spans are wrong; the message names the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one stream may use, and how long a stream waits for its client.

    ``body_bytes`` is the largest request body while no pool is served; otherwise the pools limit it (above: 413).
    ``buffered_bytes`` limits the bytes of all bodies that the router stores (above: 503). ``headers``,
    ``header_bytes`` and ``subset_bytes`` limit a request's headers and its list of allowed endpoints (above: 400);
    Envoy's own limits are far lower. A session name
    above ``session_characters`` is ignored. ``quoted_characters`` is the most of a prompt that a log line quotes.
    ``chunk_bytes`` is the largest piece of a body sent back in FULL_DUPLEX_STREAMED; Envoy accepts up to 62 000 B.
    ``ended_requests`` is how many ended requests are kept for usage that the access log reports later.

    ``silence_s`` is how long a body that looks complete may lack its end before the router decides (``stream``).
    ``pause_s`` is how long any other body may pause before the router checks whether it can continue. ``stalled_s`` is
    by how much a pause may exceed the pools' longest queue.maxWait; the generated Envoy configuration waits 15 s more
    than that queue.maxWait. ``alive_interval_s`` is the interval of reports that a response is still passing through
    the router; the picker forgets a request after ten minutes without a report.
    """

    body_bytes: int = 16 * 1024 * 1024
    buffered_bytes: int = 512 * 1024 * 1024
    headers: int = 1000
    header_bytes: int = 256 * 1024
    subset_bytes: int = 256 * 1024
    session_characters: int = 1024
    quoted_characters: int = 2000
    chunk_bytes: int = 62_000
    ended_requests: int = 4096
    silence_s: float = 0.1
    pause_s: float = 2.0
    stalled_s: float = 10.0
    alive_interval_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """The Redis that keeps the state shared between replicas.

    ``url`` is ``redis://``, ``rediss://`` (TLS) or ``unix://``. ``password`` overrides the one in the URL, so that the
    command line need not show it. ``ca_file`` verifies the server's certificate (None: the system's CAs).
    """

    url: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeSettings:
    """Serve the InferencePools of a Kubernetes API, in one namespace or in all (None)."""

    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of ``dualmap router``. Port 0 is any free port; ``tls`` is off, self-signed or a folder.

    The router reads pools from the files ``pools``, or from the Kubernetes API if ``kube`` is set. ``tls_client_ca``
    verifies clients' certificates (None: clients need none). ``redis`` is None for a single router. ``log_prompts``
    lets debug logs quote headers and prompts. The router sends spans to the OpenTelemetry collector at
    ``otlp_endpoint`` (None: it makes none), and serves the ``dashboard`` on the metrics port.
    """

    pools: tuple[Path, ...] = ()
    kube: KubeSettings | None = None
    host: str = "0.0.0.0"
    grpc_port: int = 9002
    health_port: int = 9003
    metrics_port: int = 9090
    als_port: int = 9004
    tls: str = "off"
    tls_client_ca: Path | None = None
    redis: RedisSettings | None = None
    replica_id: str
    log_level: str = "info"
    log_format: LogFormat = "text"
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    dashboard: bool = True
    drain_timeout_s: float = 25.0
    limits: Limits = field(default_factory=Limits)
