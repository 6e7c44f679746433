"""Converts Kubernetes objects into the operator's values: pods, StatefulSets and the published status.

``observe.watches`` calls these functions. ``read_status`` reads the document that the module ``status`` writes; the
module ``spec`` reads the user's spec. The input may have any content: users create pods, may edit a status by hand, and
may run several operator versions. No function raises; an unreadable field counts as absent.
"""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Final

from dualmap.objects.pods import mapping_in, mappings_in, pod_facts, text_in
from dualmap.objects.times import read_time
from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import (
    Condition,
    ObservedPod,
    ObservedStatefulSet,
    PoolStatus,
    RingMember,
    TrafficStatus,
)
from dualmap_operator.names import ORDINAL_LABEL, REVISION_LABEL

_CONDITION_STATUS: Final[Mapping[str, bool | None]] = {"True": True, "False": False, "Unknown": None}
_MAX_INTEGER: Final = 2**53
_MAX_ORDINAL_DIGITS: Final = 9
_FULL_WEIGHT: Final = 100
_MAX_WEIGHT: Final = 1000


def read_pod(body: Mapping[str, Any]) -> ObservedPod:
    """Read a pod; the caller sets ``flaps``."""
    facts = pod_facts(body)
    metadata = mapping_in(body, "metadata")
    labels = mapping_in(metadata, "labels")
    return ObservedPod(
        name=facts.name,
        uid=facts.uid,
        address=facts.address,
        serving=facts.serving,
        # A pod without conditions has not become ready since its creation.
        serving_since_s=read_time(facts.serving_since) or read_time(text_in(metadata, "creationTimestamp")) or 0.0,
        ready=facts.ready,
        in_ring=facts.in_ring,
        terminating=facts.terminating,
        ended=facts.ended,
        incarnation=facts.incarnation,
        leave_at_s=facts.leave_at_s,
        invalid_leave_at=facts.invalid_leave_at,
        killed_at_s=facts.killed_at_s,
        grace_s=facts.grace_s,
        ordinal=_ordinal(body),
        revision=text_in(labels, REVISION_LABEL),
    )


def read_statefulset(body: Mapping[str, Any]) -> ObservedStatefulSet:
    """Read a StatefulSet."""
    metadata, spec, status = (mapping_in(body, key) for key in ("metadata", "spec", "status"))
    return ObservedStatefulSet(
        replicas=_integer(spec, "replicas", 1),
        update_revision=text_in(status, "updateRevision"),
        generation=_integer(metadata, "generation", 0),
        observed_generation=_integer(status, "observedGeneration", 0),
    )


def read_status(status: object) -> PoolStatus:
    """Read an InferencePool's ``status``, the inverse of ``status.status_document``."""
    if not isinstance(status, Mapping):
        return PoolStatus()
    ring, traffic = mapping_in(status, "ring"), mapping_in(status, "traffic")
    members: dict[str, RingMember] = {}
    for fields in mappings_in(ring, "members"):
        member = _member(fields)
        if member is not None:
            members.setdefault(member.id, member)
    conditions = (_condition(fields) for fields in mappings_in(status, "conditions"))
    return PoolStatus(
        observed_generation=_integer(status, "observedGeneration", 0),
        replicas=_integer(status, "replicas", 0),
        ready_replicas=_integer(status, "readyReplicas", 0),
        in_ring=_integer(status, "inRing", 0),
        selector=text_in(status, "selector"),
        ring_version=_integer(ring, "version", 0),
        members=tuple(members.values()),
        traffic=TrafficStatus(
            slo_attainment=text_in(traffic, "sloAttainment"),
            cache_hit_rate=text_in(traffic, "cacheHitRate"),
        ),
        conditions=tuple(condition for condition in conditions if condition is not None),
    )


def matches(selector: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    """Return whether a label selector matches: every entry of matchLabels and matchExpressions must match.

    As in Kubernetes, NotIn and DoesNotExist also match objects without the label, and an empty selector matches all
    objects. An invalid expression matches no object: the operator adopts too few pods rather than too many.
    """
    wanted = mapping_in(selector, "matchLabels")
    expressions = selector.get("matchExpressions") or []
    if not isinstance(expressions, list):
        return False
    return all(key in labels and labels[key] == value for key, value in wanted.items()) and all(
        isinstance(each, Mapping) and _expression_matches(each, labels) for each in expressions
    )


def _expression_matches(expression: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    key, values = text_in(expression, "key"), expression.get("values") or []
    if not key or not isinstance(values, list):
        return False
    match expression.get("operator"):
        case "In":
            return key in labels and labels[key] in values
        case "NotIn":
            return key not in labels or labels[key] not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case _:
            return False


def _ordinal(body: Mapping[str, Any]) -> int | None:
    """Return the pod's ordinal in its StatefulSet; before Kubernetes 1.28, only the pod's name contains the ordinal."""
    metadata = mapping_in(body, "metadata")
    text = text_in(mapping_in(metadata, "labels"), ORDINAL_LABEL)
    if not text and any(text_in(owner, "kind") == "StatefulSet" for owner in mappings_in(metadata, "ownerReferences")):
        text = text_in(metadata, "name").rpartition("-")[2]
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_ORDINAL_DIGITS else None


def _member(fields: Mapping[str, Any]) -> RingMember | None:
    """Return a ring member; None if id, address, port or state is missing or invalid."""
    try:
        state = MemberState(text_in(fields, "state"))
        address = str(ip_address(text_in(fields, "address")))
    except ValueError:
        return None
    member_id, port = text_in(fields, "id"), _integer(fields, "port", 0, high=65_535)
    if not member_id or not port:
        return None
    return RingMember(
        id=member_id,
        address=address,
        port=port,
        state=state,
        weight=_integer(fields, "weight", _FULL_WEIGHT, high=_MAX_WEIGHT),
        since_s=read_time(text_in(fields, "since")) or 0.0,
        incarnation=text_in(fields, "incarnation"),
        leave_at_s=read_time(text_in(fields, "leaveAt")),
    )


def _condition(fields: Mapping[str, Any]) -> Condition | None:
    kind, status = text_in(fields, "type"), text_in(fields, "status")
    if not kind or status not in _CONDITION_STATUS:
        return None
    return Condition(
        type=kind,
        status=_CONDITION_STATUS[status],
        reason=text_in(fields, "reason"),
        message=text_in(fields, "message"),
        since_s=read_time(text_in(fields, "lastTransitionTime")) or 0.0,
        observed_generation=_integer(fields, "observedGeneration", 0),
    )


def _integer(fields: Mapping[str, Any], name: str, default: int, *, high: int = _MAX_INTEGER) -> int:
    value = fields.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= high:
        return value
    return default
