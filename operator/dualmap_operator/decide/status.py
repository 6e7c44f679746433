"""Converts an InferencePool's status to JSON, the inverse of ``pod_reading.read_status``. ``act.apply`` sends it.

The CRD defines the field names (crds/, docs/crd.md). Conditions have the Kubernetes type metav1.Condition. Times are in
whole seconds.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from dualmap.objects.times import time_text
from dualmap_operator.decide.observed import Condition, PoolStatus, RingMember, TrafficStatus

_CONDITION_STATUS: Final[Mapping[bool | None, str]] = {True: "True", False: "False", None: "Unknown"}
_DIGITS: Final = re.compile(r"([0-9]+)")


def status_document(status: PoolStatus) -> dict[str, Any]:
    """Return the complete ``status``. Members are in natural order of their ids; unknown traffic values are omitted."""
    document: dict[str, Any] = {
        "observedGeneration": status.observed_generation,
        "replicas": status.replicas,
        "readyReplicas": status.ready_replicas,
        "inRing": status.in_ring,
        "selector": status.selector,
        "ring": {
            "version": status.ring_version,
            "members": [_member(member) for member in sorted(status.members, key=_natural)],
        },
        "conditions": [_condition(condition) for condition in status.conditions],
    }
    traffic = _traffic(status.traffic)
    if traffic:
        document["traffic"] = traffic
    return document


def _member(member: RingMember) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": member.id,
        "address": member.address,
        "port": member.port,
        "state": member.state.value,
        "weight": member.weight,
        "since": time_text(member.since_s),
    }
    if member.incarnation:
        document["incarnation"] = member.incarnation
    if member.leave_at_s is not None:
        document["leaveAt"] = time_text(member.leave_at_s)
    return document


def _condition(condition: Condition) -> dict[str, Any]:
    return {
        "type": condition.type,
        "status": _CONDITION_STATUS[condition.status],
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": time_text(condition.since_s),
        "observedGeneration": condition.observed_generation,
    }


def _traffic(shown: TrafficStatus) -> dict[str, str]:
    fields = {"sloAttainment": shown.slo_attainment, "cacheHitRate": shown.cache_hit_rate}
    return {name: value for name, value in fields.items() if value}


def _natural(member: RingMember) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that orders qwen-2 before qwen-10."""
    parts = _DIGITS.split(member.id)
    return [(int(part), "") if position % 2 else (0, part) for position, part in enumerate(parts)], member.id
