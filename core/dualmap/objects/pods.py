"""Converts Kubernetes pods into facts for the router and the operator, such as ``serving`` and ``terminating``.

The operator uses these facts to add pods to the rings (``dualmap_operator.decide.pod_reading``). The router uses them
to stop picking a pod before the operator updates the ring. Any user may have created a pod, so its object may have any
content. No function raises: an invalid field counts as absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

from dualmap.objects.pool_reader import GROUP, is_pod_address
from dualmap.objects.times import read_time

LEAVE_AT: Final = f"{GROUP}/leave-at"
"""The annotation with the RFC 3339 time at which a pod must stop."""
IN_RING_GATE: Final = f"{GROUP}/in-ring"
"""The readiness gate that keeps a pod unready in Kubernetes until the operator adds the pod to the rings."""
_ENDED: Final = ("Failed", "Succeeded")
_UID_SHOWN: Final = 8
_MAX_RESTARTS: Final = 2**31
_GRACE_S: Final = 30
_MAX_GRACE_S: Final = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """The facts about one pod for routing and draining.

    ``serving`` is true if the engine can receive requests. The containers are then ready, all readiness gates except
    the in-ring gate are true, and the node is not lost. ``serving`` may be true for a terminating pod, because that pod
    still finishes its requests. ``serving_since`` is the latest transition of the conditions for ``serving``, as an RFC
    3339 text from the API; empty if there is no transition. ``ready`` is the pod's Ready condition, which includes the
    in-ring gate. ``in_ring`` is the condition of the in-ring gate, None for a pod without this gate. ``incarnation``
    differs between pods and after each restart of a container; empty if unknown. ``address`` is empty until the pod has
    an IP address, and for an address that no pod may have. ``leave_at_s`` is the time at which the pod must stop by its
    annotation, or at the latest by its condition DisruptionTarget, in seconds since the epoch; None without both.
    ``invalid_leave_at`` is an annotation that is no time. A terminating pod is killed at ``killed_at_s``, after a grace
    period of ``grace_s``.
    """

    name: str
    namespace: str
    uid: str
    address: str
    serving: bool
    serving_since: str
    ready: bool
    in_ring: bool | None
    terminating: bool
    ended: bool
    incarnation: str
    leave_at_s: float | None = None
    invalid_leave_at: str = ""
    killed_at_s: float | None = None
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Condition:
    """One condition of the pod's status; ``since`` is its lastTransitionTime as text."""

    holds: bool = False
    since: str = ""
    reason: str = ""


def pod_facts(body: Mapping[str, Any]) -> PodFacts:
    """Return the facts of a pod; never raises."""
    metadata, spec, status = (mapping_in(body, key) for key in ("metadata", "spec", "status"))
    conditions = _conditions(status)
    gates = [text_in(gate, "conditionType") for gate in mappings_in(spec, "readinessGates")]
    deciding = ["ContainersReady", *(gate for gate in gates if gate and gate != IN_RING_GATE)]
    ended = text_in(status, "phase") in _ENDED
    absent = _Condition()
    uid = text_in(metadata, "uid")
    leave_at = text_in(mapping_in(metadata, "annotations"), LEAVE_AT)
    annotated_s = read_time(leave_at)
    disrupted_s = _disrupted_s(conditions.get("DisruptionTarget", absent), spec)
    restarts = sum(_count(container.get("restartCount")) for container in mappings_in(status, "containerStatuses"))
    return PodFacts(
        name=text_in(metadata, "name"),
        namespace=text_in(metadata, "namespace"),
        uid=uid,
        address=_address(status),
        serving=(
            not ended and all(conditions.get(each, absent).holds for each in deciding) and not _node_lost(conditions)
        ),
        serving_since=max(conditions.get(each, absent).since for each in deciding),
        ready=not ended and conditions.get("Ready", absent).holds,
        in_ring=conditions.get(IN_RING_GATE, absent).holds if IN_RING_GATE in gates else None,
        terminating=metadata.get("deletionTimestamp") is not None,
        ended=ended,
        incarnation=f"{uid[:_UID_SHOWN]}-{restarts}" if uid else "",
        leave_at_s=min((each for each in (annotated_s, disrupted_s) if each is not None), default=None),
        invalid_leave_at=leave_at if annotated_s is None else "",
        killed_at_s=read_time(text_in(metadata, "deletionTimestamp")),
        grace_s=_seconds(metadata.get("deletionGracePeriodSeconds")) if "deletionTimestamp" in metadata else 0.0,
    )


def mapping_in(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping at ``key``, or an empty mapping for any other value."""
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


def mappings_in(mapping: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list at ``key``, or an empty list for any other value."""
    value = mapping.get(key)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def text_in(mapping: Mapping[str, Any], key: str) -> str:
    """Return the text at ``key``, or an empty text for any other value."""
    value = mapping.get(key)
    return value if isinstance(value, str) else ""


def _conditions(status: Mapping[str, Any]) -> dict[str, _Condition]:
    return {
        text_in(each, "type"): _Condition(
            holds=each.get("status") == "True",
            since=text_in(each, "lastTransitionTime"),
            reason=text_in(each, "reason"),
        )
        for each in mappings_in(status, "conditions")
    }


def _disrupted_s(condition: _Condition, spec: Mapping[str, Any]) -> float | None:
    """Return the time at which a pod that is to be disrupted ends if it is deleted at once; None for other pods."""
    if not condition.holds:
        return None
    return (read_time(condition.since) or 0.0) + _seconds(spec.get("terminationGracePeriodSeconds"))


def _node_lost(conditions: Mapping[str, _Condition]) -> bool:
    """Return whether the node lifecycle controller set Ready to false because the pod's node stopped reporting.

    The node lifecycle controller sets Ready to false without a reason and does not change ContainersReady. Most
    kubelets write a reason when they set Ready to false. A kubelet that writes no reason has two causes for Ready
    false. Either the containers were not ready yet, or the in-ring gate became false first. If the gate became false
    after Ready, the operator closed the gate because of the lost node.
    """
    containers, ready = (conditions.get(each, _Condition()) for each in ("ContainersReady", "Ready"))
    gate = conditions.get(IN_RING_GATE)
    # The API writes every time in UTC with whole seconds, so the order of the texts is the order of the times. A
    # kubelet updates Ready within a second after a change of the gate.
    gate_explains = gate is not None and not gate.holds and gate.since <= ready.since
    return not ready.holds and not ready.reason and ready.since > containers.since and not gate_explains


def _address(status: Mapping[str, Any]) -> str:
    try:
        address = str(ip_address(text_in(status, "podIP")))
    except ValueError:
        return ""
    return address if is_pod_address(address) else ""


def _seconds(value: object) -> float:
    """Return a grace period, or Kubernetes' default for an invalid one."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_GRACE_S:
        return _GRACE_S
    return value


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < _MAX_RESTARTS else 0
