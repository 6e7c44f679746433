"""The children of a pool with a pod template, as complete manifests for server-side apply.

The children are a StatefulSet, a headless Service and a PodDisruptionBudget. All children have the pool's name, and the
pool is their owner. The pod template is the user's template plus the fields that a pool needs; fields set by the user
are kept. ``plan`` decides the number of replicas, ``termination`` defines how pods stop, and ``act.apply`` sends the
manifests.
"""

from typing import Any, Final

from dualmap.objects.pool_reader import API_VERSION
from dualmap_operator.decide.spec import PoolSpec, TemplateWorkload
from dualmap_operator.decide.workload.template import copied, engine_container, mapping, whole_number
from dualmap_operator.decide.workload.termination import POD_IP_VARIABLE, grace_period_s, pre_stop_script
from dualmap_operator.names import FIELD_MANAGER, IN_RING_GATE, KIND, POOL_LABEL

_TOPOLOGY_KEYS: Final = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")


def children(spec: PoolSpec, *, replicas: int) -> tuple[dict[str, Any], ...]:
    """Return the pool's StatefulSet, Service and PodDisruptionBudget; none for a pool of adopted pods.

    The manifests contain copies of the objects in ``spec``. Equal arguments return equal manifests, so a second apply
    causes no change. ``replicas`` is the StatefulSet's size, which stays above ``spec.replicas`` while pods drain.
    """
    if not isinstance(spec.workload, TemplateWorkload):
        return ()
    return (_stateful_set(spec, spec.workload, replicas), _headless_service(spec), _disruption_budget(spec))


def _stateful_set(spec: PoolSpec, workload: TemplateWorkload, replicas: int) -> dict[str, Any]:
    # With OnDelete, the operator itself replaces outdated pods, one at a time (decide.rollout).
    content = {
        "replicas": replicas,
        "serviceName": spec.name,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": _selected(spec)},
        "template": _pod_template(spec, workload),
    }
    return _child(spec, "apps/v1", "StatefulSet", content)


def _headless_service(spec: PoolSpec) -> dict[str, Any]:
    # A pod's DNS name also resolves while the pod loads its model or drains. Users, metrics scrapers and engines that
    # discover other engines use this name. LLM requests do not use this Service: routers send them to ready members
    # directly.
    content = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _selected(spec),
        "ports": [{"name": "http", "protocol": "TCP", "port": spec.engine.port, "targetPort": spec.engine.port}],
    }
    return _child(spec, "v1", "Service", content)


def _disruption_budget(spec: PoolSpec) -> dict[str, Any]:
    # An unready pod outside the ring receives no requests and must not block the drain of its node.
    content = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": _selected(spec)},
    }
    return _child(spec, "policy/v1", "PodDisruptionBudget", content)


def _child(spec: PoolSpec, api_version: str, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    labels = {
        "app.kubernetes.io/name": "inference-engine",
        "app.kubernetes.io/instance": spec.name,
        "app.kubernetes.io/part-of": "dualmap",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
        **_selected(spec),
    }
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": spec.name,
        "uid": spec.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {"name": spec.name, "namespace": spec.namespace, "labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": content}


def _selected(spec: PoolSpec) -> dict[str, str]:
    return {POOL_LABEL: spec.name}


def _pod_template(spec: PoolSpec, workload: TemplateWorkload) -> dict[str, Any]:
    """Return the user's template with the fields that a pool needs.

    Values of a wrong type stay: the API server refuses them.
    """
    template: dict[str, Any] = copied(workload.template)
    labels = _object_at(_object_at(template, "metadata"), "labels")
    if labels is not None:
        labels |= _selected(spec)
    pod = _object_at(template, "spec")
    if pod is None:
        return template
    gates = _list_at(pod, "readinessGates")
    if gates is not None and not any(mapping(gate).get("conditionType") == IN_RING_GATE for gate in gates):
        gates.append({"conditionType": IN_RING_GATE})
    if pod.get("topologySpreadConstraints") is None:
        pod["topologySpreadConstraints"] = [_spread_over(key, spec) for key in _TOPOLOGY_KEYS]
    _cover_drain(pod, spec)
    _add_pre_stop(template, spec)
    return template


def _spread_over(topology_key: str, spec: PoolSpec) -> dict[str, Any]:
    return {
        "topologyKey": topology_key,
        "maxSkew": 1,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _selected(spec)},
    }


def _cover_drain(pod: dict[str, Any], spec: PoolSpec) -> None:
    """Increase a grace period that is shorter than a drain; ``checks`` creates a warning."""
    own, needed_s = pod.get("terminationGracePeriodSeconds"), grace_period_s(spec)
    own_s = whole_number(own)
    if own is None or (own_s is not None and own_s < needed_s):
        pod["terminationGracePeriodSeconds"] = needed_s


def _add_pre_stop(template: dict[str, Any], spec: PoolSpec) -> None:
    """Add the preStop script and its pod address variable to the engine's container, unless it has a preStop."""
    engine = engine_container(template, spec.engine.port)
    if engine is None:
        return
    container: dict[str, Any] = template["spec"]["containers"][engine.position]
    if mapping(container.get("lifecycle")).get("preStop") is not None:
        return
    lifecycle, variables = _object_at(container, "lifecycle"), _list_at(container, "env")
    if lifecycle is None or variables is None:
        return
    lifecycle["preStop"] = {"exec": {"command": ["/bin/sh", "-c", pre_stop_script(spec)]}}
    if not any(mapping(variable).get("name") == POD_IP_VARIABLE for variable in variables):
        address = {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}
        variables.append({"name": POD_IP_VARIABLE, "valueFrom": address})


def _object_at(parent: dict[str, Any] | None, key: str) -> dict[str, Any] | None:
    """Return the object under ``key``, created if absent; None if the value is not an object."""
    if parent is None:
        return None
    if parent.get(key) is None:
        parent[key] = {}
    value = parent[key]
    return value if isinstance(value, dict) else None


def _list_at(parent: dict[str, Any], key: str) -> list[Any] | None:
    """Return the list under ``key``, created if absent; None if the value is not a list."""
    if parent.get(key) is None:
        parent[key] = []
    value = parent[key]
    return value if isinstance(value, list) else None
