"""The router's settings: parsed once from the command line (``main``), frozen, handed out in parts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dualmap.errors import DualMapError
from dualmap_edge.logs import LogFormat

# What a router may be called, since its name is part of request ids, metrics and keys in Redis: as long as a host name.
REPLICA_ID_CHARACTERS: Final = 253


class TracingError(DualMapError):
    """Spans cannot be exported as they are set up; the message says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one stream may cost.

    ``body_bytes`` is the largest request body that is routed (above it: 413). More than ``headers`` headers, more than
    ``header_bytes`` of them, or more than ``subset_bytes`` about the endpoints a request may use are refused (400);
    Envoy's own limits are far below. A session named by more than ``session_characters`` is none. A log line that may
    quote a prompt quotes ``quoted_characters`` of it. ``chunk_bytes`` is the largest piece of a body streamed back in
    FULL_DUPLEX_STREAMED (PROTOCOLS section 1: Envoy takes at most 62 000 B). ``ended_requests`` is how many ended
    requests are remembered, so that usage which the access log reports later is still counted. ``silence_s`` is how
    long a body that looks whole may lack its end of stream before it is taken for one with trailers, ``pause_s`` how
    long any other body may pause before it is looked at whether more can come, ``stalled_s`` by how much a pause may
    exceed the pools' longest wait: the generated Envoy configuration waits 15 s more than that for us (``stream``).
    ``news_s`` is how often a response that passes through us is reported to be going on; the ledger forgets a request
    after ten minutes without news.
    """

    body_bytes: int = 16 * 1024 * 1024
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
    news_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Where the state shared between routers is kept.

    ``url`` is ``redis://``, ``rediss://`` (TLS) or ``unix://``; a password given apart from it is preferred, so that
    none need stand in a command line. ``ca_file`` is what a TLS server's certificate is checked against (None: the
    system's).
    """

    url: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeSettings:
    """Which InferencePools of a Kubernetes API are served: those of one namespace, or of all (None)."""

    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What ``dualmap router`` was told. Port 0 is any free port; ``tls`` is off, self-signed or a folder.

    Pools come from the files ``pools``, or from the Kubernetes API where ``kube`` says which.
    ``tls_client_ca`` is what clients' certificates are checked against (None: clients need none). ``redis`` is None for
    a router that is alone. ``log_prompts`` lets debug logs quote headers and prompts. Spans are sent to
    the OpenTelemetry collector at ``otlp_endpoint`` (None: none are made). ``dashboard`` is served on the metrics port.
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
