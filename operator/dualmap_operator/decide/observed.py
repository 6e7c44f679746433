"""The observed state of one pool: frozen values that ``pod_reading`` and ``observe.gather`` create.

All times are seconds since the epoch, as in the Kubernetes API: a plan must stay valid after a restart of the operator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dualmap.pools.claims import LostClaim
from dualmap.pools.pool import MemberState


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """One pod of the pool.

    ``serving`` is true if the pod's containers are ready and all readiness gates except the operator's own are true.
    ``serving_since_s`` is the last change of ``serving``. ``ready`` is the pod's Ready condition, which includes the
    operator's gate. ``in_ring`` is the condition of the operator's gate, None if the pod does not have the gate.
    ``incarnation`` changes with every restart of a container. ``ordinal`` is None for adopted pods. ``address`` is
    empty until the pod has an IP address. ``flaps`` counts recent losses of readiness. ``ended`` is true if the pod has
    the phase Failed or Succeeded. ``leave_at_s``, ``invalid_leave_at``, ``killed_at_s`` and ``grace_s`` are as in
    ``PodFacts``.
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
    leave_at_s: float | None = None
    invalid_leave_at: str = ""
    killed_at_s: float | None = None
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStatefulSet:
    """The pool's StatefulSet: its spec.replicas, update revision and generations."""

    replicas: int
    update_revision: str = ""
    generation: int = 0
    observed_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMember:
    """One member as published in ``status.ring.members``; ``since_s`` is the time of its last state change.

    ``leave_at_s`` is the time at which a Draining member must stop; None for a member without notice.
    """

    id: str
    address: str
    port: int
    state: MemberState
    weight: int
    since_s: float
    incarnation: str = ""
    leave_at_s: float | None = None

    @property
    def accepts(self) -> bool:
        """Whether routers may send requests to the member: members that leave get them if no other member does."""
        return self.state is not MemberState.DRAINING or self.leave_at_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One published condition; ``since_s`` is its last transition."""

    type: str
    status: bool | None
    """True, False, or None for Unknown."""
    reason: str
    message: str
    since_s: float
    observed_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficStatus:
    """``status.traffic``: SLO attainment and cache hit rate as short decimals, empty if unknown."""

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
    """One router's requests in flight and queued (``held``) at one endpoint, and the member state in that router."""

    in_flight: int = 0
    held: int = 0
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerReport:
    """What one router says about a pool's token ids.

    ``problem`` says why the router cannot use the pool's source of ids, or its newest version; it is empty otherwise.
    ``differing`` names the classes of requests whose ids differ from the engine's.
    """

    problem: str = ""
    differing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """One router's report on the pool (``GET /pools/NAMESPACE/NAME``).

    ``ready`` is true if the router receives requests. If ``answered`` is False, the other fields are unknown.
    A router that answers 404 does not serve the pool: its report has version 0 and no endpoints.
    ``kv_store_problem`` says why the router leaves the pool's KV store alone; it is empty otherwise.
    """

    router: str
    ready: bool = True
    answered: bool = True
    ring_version: int = 0
    endpoints: Mapping[str, EndpointReport] = field(default_factory=dict)
    tokenizer: TokenizerReport = TokenizerReport()
    kv_store_problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The input of ``plan`` in addition to the spec and the time.

    ``published`` is the pool's status from the watch. ``engine_requests`` is the number of running and waiting requests
    by member id, None if the engine's metrics cannot be read. ``idle_checks`` counts, by member id, the consecutive
    observations in which ``drain.idle`` was true. ``traffic`` is the ``status.traffic`` to publish.
    """

    published: PoolStatus = PoolStatus()
    statefulset: ObservedStatefulSet | None = None
    pods: tuple[ObservedPod, ...] = ()
    routers: tuple[RouterReport, ...] = ()
    engine_requests: Mapping[str, int | None] = field(default_factory=dict)
    idle_checks: Mapping[str, int] = field(default_factory=dict)
    traffic: TrafficStatus = TrafficStatus()
    deleting: bool = False
    """True if the pool is being deleted; used if the spec cannot be read."""
    version_floor: int = 0
    """The highest ring version that this operator has published or a router reports."""
    failures: tuple[str, ...] = ()
    """The errors from applying the previous plan."""
    lost_claims: tuple[LostClaim, ...] = ()
    """The model names that the pool claims but that belong to an older pool or to another namespace."""
    unreserved: tuple[str, ...] = ()
    """The model names that the pool has and that are not reserved for its namespace yet."""
    prefill_problem: str = ""
    """Why the pool's prefill pool cannot prefill for it; empty if it can, or if the pool names none."""
