"""The router's settings, parsed once from the command line (``main``)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from dualmap.errors import DualMapError
from dualmap.pools.pool import BODY_BYTES
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap_edge.logs import LogFormat

Transport: TypeAlias = Literal["h2", "grpc"]
"""What serves the gRPC port: the router's own HTTP/2 server, or grpc.aio."""
# The greatest length of a replica id, which is the greatest length of a host name. Request ids, metrics and Redis keys
# contain the replica id.
REPLICA_ID_CHARACTERS: Final = 253


class TracingError(DualMapError):
    """The settings for the export of spans are invalid; the message names the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one stream: sizes, and times without messages from the client.

    ``body_bytes`` is the largest request body while the router serves no pool; otherwise the pools limit bodies. The
    router answers 413 to a larger body. ``buffered_bytes`` limits the bytes of all bodies that the router stores; the
    router answers 503 above it. ``headers``, ``header_bytes`` and ``subset_bytes`` limit a request's headers and its
    list of allowed endpoints; the router answers 400 above these limits. Envoy's own limits are far lower. The router
    ignores a session name with more than ``session_characters``. A log line quotes at most ``quoted_characters`` of a
    prompt. ``chunk_bytes`` is the size of the largest piece of a body sent back in FULL_DUPLEX_STREAMED; Envoy accepts
    up to 62 000 bytes. ``ended_requests`` is the number of ended requests that the router keeps, because the access log
    may report their usage later.

    ``silence_s`` is the pause after which the router decides by a body that looks complete but has no end (``stream``).
    ``pause_s`` is the pause after which the router checks whether any other body can continue. No pause may last longer
    than ``stalled_s``. Envoy's timeout for an answer in the generated configuration is at least 45 s, and restarts with
    each message. ``alive_interval_s`` is the interval of reports that a response still passes through the router. The
    picker removes a request after ten minutes without a report.
    """

    body_bytes: int = BODY_BYTES
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
    stalled_s: float = 40.0
    alive_interval_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """What the gateway in front of the router supports, if it is not the project's own Envoy.

    With ``single_destination``, a pick names one endpoint, because the gateway cannot read a list. With
    ``conformance_hooks``, requests and responses carry the headers of the conformance tests of the Gateway API
    Inference Extension: a client chooses the endpoints, and learns which one served the request.
    """

    single_destination: bool = False
    conformance_hooks: bool = False


OWN_GATEWAY: Final = Gateway()
"""The project's own Envoy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """The settings of the Redis that stores the state shared between replicas.

    ``url`` is ``redis://``, ``rediss://`` (TLS) or ``unix://``. ``password`` replaces the password in the URL, so that
    the command line need not contain a password. ``ca_file`` verifies the server's certificate (None: the system's
    CAs).
    """

    url: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeSettings:
    """The setting to serve the InferencePools of a Kubernetes API: of one namespace, or of all namespaces (None).

    ``pod_namespace`` is the router's own namespace. With all namespaces, it contains the reserved model names.
    """

    namespace: str | None
    pod_namespace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """The folder of the recording, the share of sessions that it has, and the most bytes of its files."""

    folder: Path
    sample: float = 1.0
    max_bytes: int = 10 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of ``dualmap router``. Port 0 means any free port; ``tls`` is off, self-signed or a folder.

    The router reads pools from the files ``pools``, or from the Kubernetes API if ``kube`` is set. ``tls_client_ca``
    verifies clients' certificates (None: clients need no certificate). ``transport`` serves the gRPC port. ``redis`` is
    None without shared state.
    ``peers`` are the hosts and gRPC ports of the other routers; a DNS name stands for all its addresses. Without
    ``peers``, routers with ``redis`` find each other there.
    ``hash_key`` is the key of the hashes of prompts and sessions. With ``log_prompts``, debug logs quote headers and
    prompts. The router sends spans to the OpenTelemetry collector at ``otlp_endpoint`` (None: no spans), and serves the
    ``dashboard`` on the metrics port. ``recording`` is None if requests are not recorded.
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
    transport: Transport = "h2"
    redis: RedisSettings | None = None
    peers: tuple[tuple[str, int], ...] = ()
    hash_key: bytes = field(default=PUBLIC_KEY, repr=False)
    replica_id: str
    log_level: str = "info"
    log_format: LogFormat = "text"
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    dashboard: bool = True
    drain_timeout_s: float = 25.0
    gateway: Gateway = OWN_GATEWAY
    recording: RecordingSettings | None = None
    limits: Limits = field(default_factory=Limits)
