"""What ``dualmap operator`` was told: ``main`` makes these values once, ``wiring`` runs what they describe."""

from dataclasses import dataclass, field

from dualmap_edge.logs import LogFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """How leadership is timed, in seconds.

    A lease that was not renewed for ``duration_s`` may be taken by another; its holder stops writing ``renew_within_s``
    after the last renewal it knows of, so that there is time to stop in; each attempt comes ``retry_s`` after the last.
    """

    name: str = "dualmap-operator"
    duration_s: float = 12.0
    renew_within_s: float = 8.0
    retry_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The operator's command line and environment.

    ``namespace`` is the one namespace to look after, None for all of them; ``pod_namespace`` the one it runs in, where
    its Lease and the routers' Service are. ``routers`` are the routers' metrics ports, when they are not to be looked
    up.
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
    log_level: str = "info"
    log_format: LogFormat = "text"
    lease: LeaseSettings = field(default_factory=LeaseSettings)
