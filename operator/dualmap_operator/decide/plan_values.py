"""What a pass decides: values that ``apply`` carries out and tests compare."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualmap_operator.decide.observed import PoolStatus
from dualmap_operator.names import EventReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Set the readiness gate's condition of a pod."""

    pod: str
    uid: str
    in_ring: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Delete a pod (and no other of the same name), so that its StatefulSet makes it anew."""

    pod: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A Kubernetes Event on the pool."""

    reason: EventReason
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one pass does, in this order: children, status (with the ring), gates, restarts, events.

    ``children`` are whole objects for server-side apply. ``again_s`` is in how many seconds to look again without
    having been woken. ``finished`` says of a pool that is being deleted that nothing is left to wait for.
    """

    status: PoolStatus
    children: tuple[Mapping[str, Any], ...] = ()
    gates: tuple[Gate, ...] = ()
    restarts: tuple[Restart, ...] = ()
    events: tuple[Event, ...] = ()
    again_s: float = 30.0
    finished: bool = False
