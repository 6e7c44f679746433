"""A pod's status as a kubelet reports it, computed from the states of its containers.

The module reads no clock: callers pass the time.

``pods.py`` publishes the status. Conditions, phases and reasons are those of core/v1 PodStatus.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

Object = Mapping[str, Any]

_TRUE: Final = "True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Waiting for its first start or a restart."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Running since ``started_s`` (seconds since 1970)."""

    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """Terminated: ``exit_code`` is 128 + N after signal N."""

    exit_code: int
    started_s: float
    finished_s: float


State = Waiting | Running | Terminated


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerView:
    """One container at one moment.

    ``last`` is the end of the previous run; ``over`` means that the container does not run again.
    """

    name: str
    image: str
    container_id: str
    state: State
    last: Terminated | None
    restarts: int
    started: bool
    ready: bool
    over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The addresses of a pod and its host, and the pod's start time (seconds since 1970)."""

    address: str
    host_address: str
    start_s: float


def pod_status(
    pod: Object,
    containers: Sequence[ContainerView],
    where: Placement,
    *,
    now_s: float,
    init_containers: Sequence[ContainerView] = (),
) -> dict[str, Any]:
    """Return the pod's new status. Unchanged conditions of ``pod`` keep their transition times."""
    phase = _phase(pod, init_containers, containers)
    unfinished = [each.name for each in init_containers if not _succeeded(each)]
    return {
        "observedGeneration": pod["metadata"].get("generation", 0),
        "phase": phase,
        "hostIP": where.host_address,
        "hostIPs": [{"ip": where.host_address}],
        "podIP": where.address,
        "podIPs": [{"ip": where.address}],
        "startTime": timestamp(where.start_s),
        "conditions": _conditions(pod, unfinished, containers, phase, now_s),
        "initContainerStatuses": [_container_status(each) | {"ready": _succeeded(each)} for each in init_containers],
        "containerStatuses": [_container_status(each) for each in containers],
    }


def timestamp(seconds: float) -> str:
    """Return a time in Kubernetes' format, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _phase(pod: Object, init_containers: Sequence[ContainerView], containers: Sequence[ContainerView]) -> str:
    terminating = "deletionTimestamp" in pod["metadata"]
    if any(each.over and isinstance(each.state, Terminated) and not _succeeded(each) for each in init_containers):
        return "Failed"
    if not all(_succeeded(each) for each in init_containers):
        return "Pending"
    if all(isinstance(each.state, Terminated) and (each.over or terminating) for each in containers):
        return "Succeeded" if all(_succeeded(each) for each in containers) else "Failed"
    never_started = any(isinstance(each.state, Waiting) and each.last is None for each in containers)
    return "Pending" if never_started else "Running"


def _succeeded(container: ContainerView) -> bool:
    return isinstance(container.state, Terminated) and container.state.exit_code == 0


def _conditions(
    pod: Object, unfinished: Sequence[str], containers: Sequence[ContainerView], phase: str, now_s: float
) -> list[dict[str, Any]]:
    before = {each["type"]: each for each in pod.get("status", {}).get("conditions") or ()}
    not_ready = _why_containers_are_not_ready(containers, phase)
    conditions = [
        _condition("PodScheduled", None),
        _condition("Initialized", _why_not_initialized(unfinished)),
        _condition("ContainersReady", not_ready),
        _condition("Ready", not_ready or _why_gates_are_closed(pod, before)),
    ]
    generation = pod["metadata"].get("generation", 0)
    for each in conditions:
        earlier = before.get(each["type"], {})
        unchanged = earlier.get("status") == each["status"] and "lastTransitionTime" in earlier
        each["lastTransitionTime"] = earlier["lastTransitionTime"] if unchanged else timestamp(now_s)
        each["observedGeneration"] = generation
    return conditions


def _condition(kind: str, failing: tuple[str, str] | None) -> dict[str, Any]:
    """Return a condition that is True, or False with a reason and message.

    A null removes a field that an earlier patch set.
    """
    reason, message = failing or (None, None)
    return {"type": kind, "status": _TRUE if failing is None else "False", "reason": reason, "message": message}


def _why_not_initialized(unfinished: Sequence[str]) -> tuple[str, str] | None:
    if not unfinished:
        return None
    return "ContainersNotInitialized", f"containers with incomplete status: {list(unfinished)}"


def _why_containers_are_not_ready(containers: Sequence[ContainerView], phase: str) -> tuple[str, str] | None:
    if phase in {"Succeeded", "Failed"}:
        return f"Pod{'Completed' if phase == 'Succeeded' else 'Failed'}", ""
    unready = [each.name for each in containers if not each.ready]
    return ("ContainersNotReady", f"containers with unready status: {unready}") if unready else None


def _why_gates_are_closed(pod: Object, conditions: Mapping[str, Object]) -> tuple[str, str] | None:
    closed = []
    for gate in pod["spec"].get("readinessGates") or ():
        kind = gate["conditionType"]
        status = conditions.get(kind, {}).get("status")
        if status != _TRUE:
            closed.append(f"condition {kind} {'does not exist' if status is None else f'is {status}'}")
    return ("ReadinessGatesNotReady", "; ".join(closed)) if closed else None


def _container_status(container: ContainerView) -> dict[str, Any]:
    return {
        "name": container.name,
        "image": container.image,
        "imageID": "",
        "containerID": container.container_id,
        "ready": container.ready,
        "started": container.started,
        "restartCount": container.restarts,
        "state": _state(container.state, container.container_id),
        "lastState": {} if container.last is None else _state(container.last, ""),
    }


def _state(state: State, container_id: str) -> dict[str, Any]:
    match state:
        case Waiting():
            return {"waiting": {"reason": state.reason, "message": state.message}}
        case Running():
            return {"running": {"startedAt": timestamp(state.started_s)}}
        case Terminated():
            ended = {
                "exitCode": state.exit_code,
                "reason": "Completed" if state.exit_code == 0 else "Error",
                "startedAt": timestamp(state.started_s),
                "finishedAt": timestamp(state.finished_s),
            }
            return {"terminated": ended | ({"containerID": container_id} if container_id else {})}
