"""The values of a plan; ``act.apply`` carries out the plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualmap_operator.decide.observed import PoolStatus
from dualmap_operator.names import EventReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Set the condition of a pod's readiness gate."""

    pod: str
    uid: str
    in_ring: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Delete a pod by name and uid, so that its StatefulSet recreates it."""

    pod: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Record a Kubernetes Event on the pool."""

    reason: EventReason
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The writes of one reconcile: children, reservations, status (with the ring), gates, restarts, Events.

    ``children`` are complete objects for server-side apply. ``requeue_after_s`` is the time to the next reconcile if no
    change triggers a reconcile earlier. ``reserve`` are the model names to reserve for the pool's namespace.
    ``finished`` is true if the pool is being deleted and its finalizer may be removed.
    """

    status: PoolStatus
    children: tuple[Mapping[str, Any], ...] = ()
    gates: tuple[Gate, ...] = ()
    restarts: tuple[Restart, ...] = ()
    events: tuple[Event, ...] = ()
    reserve: tuple[str, ...] = ()
    requeue_after_s: float = 30.0
    finished: bool = False
