"""The observed state of one pool: frozen values, made by ``pod_reading`` and ``observe.gather``.

Times are seconds since the epoch, as the API's: a plan must be valid after a restart of the operator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dualmap.pools.claims import LostClaim
from dualmap.pools.pool import MemberState


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """One pod of the pool.

    ``serving``: its containers are ready and every readiness gate but ours is true; ``serving_since_s`` is when that
    began. ``ready`` is the pod's Ready condition, our gate included. ``in_ring`` is our gate's condition, None if the
    pod does not have the gate. ``incarnation`` changes with every restart of a container. ``ordinal`` is None for
    adopted pods. ``address`` is empty until the pod has one. ``flaps`` counts recent losses of readiness.
    ``ended``: the pod has Failed or Succeeded.
    """

    name: str
    uid: str
    address: str = ""
    serving: bool = False
    serving_since_s: float = 0.0
    ready: bool = False
    in_ring: bool | None = None
    terminating: bool = False
    ended: bool = False
    incarnation: str = ""
    ordinal: int | None = None
    revision: str = ""
    flaps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStatefulSet:
    """The pool's StatefulSet: spec.replicas, the revision that its pods should have, and its generations."""

    replicas: int
    update_revision: str = ""
    generation: int = 0
    observed_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMember:
    """One member as published in ``status.ring.members``; ``since_s`` is when it entered its state."""

    id: str
    address: str
    port: int
    state: MemberState
    weight: int
    since_s: float
    incarnation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition as published; ``since_s`` is its last transition."""

    type: str
    status: bool | None
    """True, False, or None for Unknown."""
    reason: str
    message: str
    since_s: float
    observed_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficStatus:
    """``status.traffic``: shares as short decimals, empty while unknown."""

    slo_attainment: str = ""
    cache_hit_rate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """An InferencePool's whole status, as published or as planned."""

    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    in_ring: int = 0
    selector: str = ""
    ring_version: int = 0
    members: tuple[RingMember, ...] = ()
    traffic: TrafficStatus = TrafficStatus()
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """One router's requests in flight and queued (``held``) at one endpoint, and the member state that it uses."""

    in_flight: int = 0
    held: int = 0
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """One router's report on the pool (``GET /pools/NAMESPACE/NAME``).

    ``ready``: the router receives requests. ``heard`` is False if it did not answer; the other fields are then unknown.
    A router that answers 404 does not serve the pool: version 0, nothing in flight.
    """

    router: str
    ready: bool = True
    heard: bool = True
    ring_version: int = 0
    endpoints: Mapping[str, EndpointReport] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All input of ``plan`` beside the spec.

    ``published`` is the pool's status in the watch. ``engine_requests`` is the number of running and waiting requests
    by member id, None if the engine's metrics cannot be read. ``idle_checks`` counts, by member id, the observations in
    a row for which ``drain.idle`` was true. ``traffic`` is the traffic to publish.
    """

    published: PoolStatus = PoolStatus()
    statefulset: ObservedStatefulSet | None = None
    pods: tuple[ObservedPod, ...] = ()
    routers: tuple[RouterReport, ...] = ()
    engine_requests: Mapping[str, int | None] = field(default_factory=dict)
    idle_checks: Mapping[str, int] = field(default_factory=dict)
    traffic: TrafficStatus = TrafficStatus()
    deleting: bool = False
    """Whether the pool is being deleted, for a spec that cannot be read."""
    version_floor: int = 0
    """The highest ring version that this operator has published or a router reports."""
    failures: tuple[str, ...] = ()
    """The errors of the last reconcile's plan."""
    lost_claims: tuple[LostClaim, ...] = ()
    """The model names that the pool claims and an older one has."""
