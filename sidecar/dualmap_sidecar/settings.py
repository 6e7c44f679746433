"""The sidecar's settings, parsed once from the command line (``main``)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from dualmap_edge.logs import LogFormat


class KvConnector(StrEnum):
    """How the decode engine gets the KV of a prefiller.

    With ``NIXL``, the prefiller's answer says where the KV is. With ``SHARED_STORAGE``, the prefiller writes the KV to
    a store, and the decode engine finds it there by the tokens of the prompt.
    """

    NIXL = "nixl"
    SHARED_STORAGE = "shared-storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of requests and connections (docs/limits.md).

    ``body_bytes`` is the largest body that the proxy reads whole, and ``buffered_bytes`` the size of all these bodies.
    ``header_bytes`` is the longest line of a request's or answer's head. ``answer_bytes`` is the largest answer of a
    prefiller. A client sends a body within ``body_s``. A connection to an engine is made within ``connect_s``, and kept
    idle for less than ``engine_idle_s``, because vLLM closes it after 5 s. A prefiller that did not answer in time is
    not asked for ``pause_s``. A stopped proxy waits ``drain_s`` for requests in flight.
    """

    body_bytes: int = 64 * 1024 * 1024
    buffered_bytes: int = 512 * 1024 * 1024
    header_bytes: int = 64 * 1024
    headers: int = 256
    answer_bytes: int = 16 * 1024 * 1024
    connections: int = 4096
    body_s: float = 60.0
    connect_s: float = 2.0
    engine_idle_s: float = 2.0
    pause_s: float = 10.0
    drain_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of ``dualmap pd-proxy``. Port 0 means any free port.

    ``engine`` is the base URL of the engine, without a path. The engines move KV by ``kv_connector``. A prefiller has
    ``prefill_timeout_s`` to answer. The proxy asks the members of the ``pools`` in files, of the pools in ``namespace``
    of the Kubernetes API (None: none), and the networks and addresses ``allow``. It continues streams of up to
    ``continue_tokens`` tokens (None: none).
    """

    host: str
    port: int
    engine: str
    metrics_port: int = 9093
    pools: tuple[Path, ...] = ()
    namespace: str | None = None
    allow: Sequence[str] = ()
    kv_connector: KvConnector = KvConnector.NIXL
    prefill_timeout_s: float = 60.0
    continue_tokens: int | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"
    limits: Limits = field(default_factory=Limits)
