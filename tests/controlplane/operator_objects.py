"""Helpers that build API objects for the operator's tests."""

from collections.abc import Mapping
from typing import Any

from dualmap_operator.observe.watches import PoolObject, read_pool

KEY = ("llm", "qwen")


def pool_body(
    *, status: Mapping[str, Any] | None = None, version: str = "1", uid: str = "pool-uid", **spec: Any
) -> dict[str, Any]:
    """Return an InferencePool with a template; ``spec`` replaces fields."""
    return {
        "metadata": {
            "namespace": "llm",
            "name": "qwen",
            "uid": uid,
            "generation": 1,
            "resourceVersion": version,
            "managedFields": [{"manager": "kubectl"}],
        },
        "spec": {
            "model": {"name": "qwen"},
            "engine": {"type": "vLLM", "port": 8000},
            "replicas": 2,
            "workload": {"template": {"spec": {"containers": [{"name": "vllm", "image": "vllm"}]}}},
            **spec,
        },
        "status": status or {},
    }


def pool_object(**fields: Any) -> PoolObject:
    return read_pool(pool_body(**fields))


def pod_body(name: str, *, serving: bool = True, owner: str = "", uid: str = "", **labels: str) -> dict[str, Any]:
    """Return a pod; with ``owner``, the StatefulSet of the pool of this name controls the pod."""
    labels = {"serving.dualmap.dev/pool": owner, **labels} if owner else labels
    owners = [{"kind": "StatefulSet", "name": owner, "controller": True}] if owner else []
    return {
        "metadata": {
            "namespace": "llm",
            "name": name,
            "uid": uid or f"uid-of-{name}",
            "resourceVersion": "1",
            "labels": labels,
            "ownerReferences": owners,
        },
        "spec": {"readinessGates": [{"conditionType": "serving.dualmap.dev/in-ring"}]},
        "status": {
            "podIP": "10.0.0.1",
            "conditions": [{"type": "ContainersReady", "status": "True" if serving else "False"}],
        },
    }


def member(name: str, state: str = "Active", since: str = "2026-11-20T08:00:00Z") -> dict[str, Any]:
    return {"id": name, "address": "10.0.0.1", "port": 8000, "state": state, "weight": 100, "since": since}
