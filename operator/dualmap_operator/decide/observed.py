"""What the control plane sees of one pool at one moment: frozen values, made by ``reading`` and ``gather``.

Times are seconds since the epoch (the API's own times are, and a plan must survive a restart of the operator).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dualmap.pools.claims import LostClaim
from dualmap.pools.pool import MemberState


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """One pod of the pool.

    ``serving`` is whether its containers are ready and every readiness gate but ours is true (``since`` when, where the
    API says); ``ready`` is Kubernetes' own word, gate included. ``in_ring`` is the present value of our gate's
    condition, None where the pod does not have the gate. ``incarnation`` changes with every restart of a container.
    ``ordinal`` is None for adopted pods. ``address`` is empty until the pod has one. ``flaps`` counts how often it has
    lost readiness lately, as far as this operator has seen. ``ended`` pods (Failed, Succeeded) run no more and wait to
    be swept up.
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
    """The pool's StatefulSet: the size asked of it, the pods it counts, and the revision its pods should have."""

    replicas: int
    update_revision: str = ""
    generation: int = 0
    observed_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMember:
    """One member as published in ``status.ring.members``; ``since_s`` is when it came into its state."""

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
class Shown:
    """``status.traffic``: shares as the short decimals shown, empty while nothing is known."""

    slo_attainment: str = ""
    cache_hit_rate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """An InferencePool's whole status, as published or as it should be."""

    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    in_ring: int = 0
    selector: str = ""
    ring_version: int = 0
    members: tuple[RingMember, ...] = ()
    traffic: Shown = Shown()
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """What one router has in flight and held at one endpoint, and the member state by which it goes."""

    in_flight: int = 0
    held: int = 0
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """What one router says of the pool (``GET /pools/NAMESPACE/NAME``).

    ``ready`` is whether requests are sent to it. ``heard`` is False when it did not answer; then nothing else is known.
    A router that answers 404 has heard of no such pool: version 0, nothing in flight.
    """

    router: str
    ready: bool = True
    heard: bool = True
    ring_version: int = 0
    endpoints: Mapping[str, EndpointReport] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything ``plan`` may look at beside the spec.

    ``published`` is the pool's status as the watch last showed it. ``engine_requests`` is what each asked engine is
    running and has waiting (by member id), None where its metrics cannot be read. ``idle_looks`` counts, by member id,
    the looks in a row in which ``drain.idle`` held of it. ``traffic`` is what should be shown now.
    """

    published: PoolStatus = PoolStatus()
    statefulset: ObservedStatefulSet | None = None
    pods: tuple[ObservedPod, ...] = ()
    routers: tuple[RouterReport, ...] = ()
    engine_requests: Mapping[str, int | None] = field(default_factory=dict)
    idle_looks: Mapping[str, int] = field(default_factory=dict)
    traffic: Shown = Shown()
    deleting: bool = False
    """Whether the pool is being deleted; of a spec that can be read, it says so itself."""
    version_floor: int = 0
    """The highest ring version that this operator has published or a router reports of the pool."""
    failures: tuple[str, ...] = ()
    """What could not be applied in the last pass, in words."""
    lost_claims: tuple[LostClaim, ...] = ()
    """The model names that the pool claims and an older one has."""
