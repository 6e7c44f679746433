"""The settings of ``dualmap operator``: ``main`` parses them once, ``wiring`` constructs the operator from them."""

from dataclasses import dataclass, field
from enum import StrEnum

from dualmap_edge.logs import LogFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """The timing of leader election, in seconds.

    Another candidate may acquire a lease that was not renewed for ``duration_s``. The holder stops its writes
    ``renew_within_s`` after the last renewal. ``renew_within_s`` is shorter than ``duration_s``, so that two operators
    do not write at the same time. ``retry_s`` is the time between two attempts.
    """

    name: str = "dualmap-operator"
    duration_s: float = 12.0
    renew_within_s: float = 8.0
    retry_s: float = 3.0


class SecretKind(StrEnum):
    """What the operator generates into a Secret."""

    AUTHORITY = "authority"
    SERVER = "server"
    CLIENT = "client"
    REDIS = "redis"
    HASH = "hash"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSecret:
    """An existing Secret whose content the operator generates. ``namespace`` None is the operator's own."""

    kind: SecretKind
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The operator's command line and environment.

    ``namespace`` is the namespace of the pools to reconcile; None means all namespaces. ``pod_namespace`` is the
    operator's own namespace; it contains the Lease, the routers' Service and the ConfigMap with the reserved model
    names. ``routers`` are the addresses of the routers' metrics ports; if empty, the operator reads them from the
    Service.
    ``generated`` are the Secrets whose content the operator generates.
    """

    namespace: str | None
    pod_namespace: str
    identity: str
    leader_election: bool = False
    host: str = "0.0.0.0"
    metrics_port: int = 9091
    health_port: int = 9092
    router_service: str = "dualmap-router"
    routers: tuple[tuple[str, int], ...] = ()
    generated: tuple[GeneratedSecret, ...] = ()
    log_level: str = "info"
    log_format: LogFormat = "text"
    lease: LeaseSettings = field(default_factory=LeaseSettings)
