"""Converts the objects of the Gateway API Inference Extension: its InferencePool, InferenceObjectives and their pods.

Both versions of the pool are read: ``v1`` of the group ``inference.networking.k8s.io``, and ``v1alpha2`` of the group
``inference.networking.x-k8s.io``. A member of such a pool is one target port of one ready pod, so that each rank of an
engine with data parallelism is a member. llm-d's label for the roles of pods says which of them decode or prefill.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dualmap.errors import PoolError
from dualmap.objects.pods import LEAVE_AT, PodFacts, mapping_in, mappings_in, pod_facts, text_in
from dualmap.objects.times import TIME_ACCEPTED
from dualmap.pools.pool import Member, MemberState, Objectives

GROUP_VERSIONS: Final = {"inference.networking.k8s.io": "v1", "inference.networking.x-k8s.io": "v1alpha2"}
"""The groups of the InferencePool, each with the version that is read."""
OBJECTIVES_GROUP_VERSIONS: Final = {"inference.networking.x-k8s.io": "v1alpha2", "llm-d.ai": "v1alpha2"}
"""The groups of the InferenceObjective, each with the version that is read; llm-d installs the second one."""
PORTS_MAX: Final = 8
"""The most target ports of a pool."""
ACTIVE_PORTS: Final = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""The annotations with those target ports, separated by commas, on which a pod serves; the first one present counts.

Without an annotation, a pod serves on all target ports.
"""
ROLE: Final = "llm-d.ai/role"
"""The label with a pod's role in llm-d."""
DECODE_ROLES: Final = frozenset(("", "decode", "prefill-decode", "both", "encode-prefill-decode"))
"""The roles of pods that generate answers; "" is the role of a pod without the label.

Some of these pods may also prefill for others in llm-d. Here they compute only the prompts that they answer.
"""
PREFILL_ROLES: Final = frozenset(("prefill", "encode-prefill"))
"""The roles of pods that compute prompts for other pods, and generate no answers."""
_PRIORITY_MAX: Final = 2**31
_PORT_MAX: Final = 65_535
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_LABEL: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY: Final = re.compile(rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL}", re.ASCII)
_LABEL_VALUE: Final = re.compile(rf"({_LABEL})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GaiePool:
    """The members of a pool: the pods that the label ``selector`` matches, each at each of the ``ports``."""

    selector: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GaiePod:
    """A pod, its role, the ports on which it serves (None: all), and a message for each value that is ignored."""

    facts: PodFacts
    role: str = ""
    active_ports: frozenset[int] | None = None
    faults: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether the pod may get requests."""
        return self.facts.ready and not self.facts.terminating and bool(self.facts.address)


def read_gaie_pool(body: Mapping[str, Any]) -> GaiePool:
    """Return what an InferencePool of either version says. Raises PoolError."""
    spec = mapping_in(body, "spec")
    selector = mapping_in(spec, "selector")
    if "targetPortNumber" in spec:
        labels, path, ports = selector, "spec.selector", [("spec.targetPortNumber", spec["targetPortNumber"])]
    else:
        labels, path = mapping_in(selector, "matchLabels"), "spec.selector.matchLabels"
        ports = [
            (f"spec.targetPorts[{position}].number", each.get("number"))
            for position, each in enumerate(mappings_in(spec, "targetPorts"))
        ]
    if not ports or len(ports) > PORTS_MAX:
        raise PoolError("spec.targetPorts", len(ports), f"1 to {PORTS_MAX} ports")
    numbers = tuple(dict.fromkeys(_read_port(each, field) for field, each in ports))
    return GaiePool(selector=selector_of(labels, path), ports=numbers)


def gaie_pod(body: Mapping[str, Any]) -> GaiePod:
    """Return the facts of a pod; never raises."""
    facts = pod_facts(body)
    faults: list[PoolError] = []
    address = text_in(mapping_in(body, "status"), "podIP")
    if address and not facts.address:
        faults.append(PoolError("status.podIP", address, "an IP address that a pod may have"))
    if facts.invalid_leave_at:
        faults.append(PoolError(f"metadata.annotations[{LEAVE_AT}]", facts.invalid_leave_at, TIME_ACCEPTED))
    metadata = mapping_in(body, "metadata")
    annotations, role = mapping_in(metadata, "annotations"), text_in(mapping_in(metadata, "labels"), ROLE)
    name = next((each for each in ACTIVE_PORTS if text_in(annotations, each)), "")
    listed = text_in(annotations, name)
    entries = listed.replace(" ", "").split(",") if listed else []
    ports = frozenset(int(each) for each in entries if _PORT.fullmatch(each) and int(each) <= _PORT_MAX)
    if len(ports) < len(set(entries)):
        accepted = "numbers of ports separated by commas, such as 8000,8001"
        faults.append(PoolError(f"metadata.annotations[{name}]", listed, accepted))
    return GaiePod(facts=facts, role=role, active_ports=ports or None, faults=tuple(str(each) for each in faults))


def gaie_members(
    pool: GaiePool, pods: Iterable[GaiePod], before: Iterable[Member], roles: Collection[str] | None = None
) -> tuple[Member, ...]:
    """Return the members of a pool, sorted by id: pods of the given ``roles``, or of any role.

    A pod that is ready is a member at each port. A pod that was one ``before``, and is not ready or terminates, stays a
    Draining member: it gets no new requests, and the router keeps the member's cache index and requests in flight. A
    pod with notice is a Draining member with the time at which it must stop.
    """
    was = {member.id: member for member in before}
    members: dict[str, Member] = {}
    endpoints: set[str] = set()
    # Ready pods come first: the address of a pod that has ended may already be another pod's.
    for pod in sorted(pods, key=lambda pod: (not pod.ready, pod.facts.name)):
        facts = pod.facts
        for port in pool.ports:
            id = facts.name if len(pool.ports) == 1 else f"{facts.name}:{port}"
            active = (pod.active_ports is None or port in pod.active_ports) and (roles is None or pod.role in roles)
            known = was.get(id)
            leave_at_s = None
            if pod.ready and active:
                leave_at_s, address = facts.leave_at_s, facts.address
                state = MemberState.ACTIVE if leave_at_s is None else MemberState.DRAINING
            elif known is not None and not facts.ended:
                state, address = MemberState.DRAINING, known.address
            else:
                continue
            member = Member(
                id=id,
                address=address,
                port=port,
                state=state,
                incarnation=facts.incarnation,
                leave_at_s=leave_at_s,
            )
            if member.endpoint not in endpoints:
                endpoints.add(member.endpoint)
                members[id] = member
    return tuple(sorted(members.values(), key=lambda member: member.id))


def read_objectives(bodies: Iterable[Mapping[str, Any]], pool: str) -> Objectives:
    """Return the priorities of the InferenceObjectives for ``pool``; an objective without a priority has priority 0.

    Of objectives with equal names, the last one counts.
    """
    priorities: dict[str, int] = {}
    for body in bodies:
        spec, name = mapping_in(body, "spec"), text_in(mapping_in(body, "metadata"), "name")
        priority = spec.get("priority", 0)
        if name and text_in(mapping_in(spec, "poolRef"), "name") == pool and _is_priority(priority):
            priorities[name] = priority
    return Objectives(tuple(sorted(priorities.items())))


def _is_priority(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_PRIORITY_MAX <= value < _PRIORITY_MAX


def selector_of(labels: Mapping[str, Any], path: str) -> str:
    """Return labels as a selector of the Kubernetes API. Raises PoolError for the field at ``path``."""
    if not labels:
        raise PoolError(path, None, "one or more labels")
    for key, value in labels.items():
        if not isinstance(key, str) or not _LABEL_KEY.fullmatch(key):
            raise PoolError(path, key, "keys of labels")
        if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
            raise PoolError(f"{path}.{key}", value, "the value of a label")
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _read_port(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _PORT_MAX:
        raise PoolError(path, value, "a whole number from 1 to 65535")
    return value
