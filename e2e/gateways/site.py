"""A model server pool of the Gateway API Inference Extension with DualMap as its picker, for the gateways' tests.

The engines are scripted: each engine is a pod without a process, and the test itself listens at the pod's address.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from dualmap.objects.gaie import ROLE
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.pods import FAKE_ANNOTATION
from harness import fail_open
from harness.upstream import Upstream
from harness.waiting import until

POOL = "engines"
MODEL = "scripted"
PICKER = "picker"
PICKER_IMAGE = "registry.example/dualmap:e2e"
PICKER_PORT = 9002
METRICS_PORT = 9090
ENGINE_PORT = 8000
WITHIN_S = 120.0
ROLES = ("prefill", "decode", "decode")
"""The roles of engines in a site whose first engine prefills for the others."""
PREFILLS = "--config-text=" + json.dumps(
    {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"type": "prefill-filter"},
            {"type": "decode-filter"},
            {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 64}},
            {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "prefix-based-pd-decider"}}},
        ],
        "schedulingProfiles": [
            {"name": "prefill", "plugins": [{"pluginRef": "prefill-filter"}]},
            {"name": "decode", "plugins": [{"pluginRef": "decode-filter"}]},
        ],
    }
)
"""The picker's argument with llm-d's plugins for prefill and decode on different pods."""
_HEALTH_PORT = 9003
_ENGINE_LABELS = {"app": POOL}
_PICKER_LABELS = {"app": PICKER}


class Site:
    """A namespace with engines and a pool. The context deletes the namespace.

    ``roles`` are the values of llm-d's label for the roles of the first engines.
    """

    def __init__(
        self, cluster: Cluster, *, engines: int = 3, failure_mode: str = "FailClose", roles: Sequence[str] = ()
    ) -> None:
        self.cluster = cluster
        self.namespace = cluster.namespace()
        self._names = tuple(f"engine-{number}" for number in range(engines))
        self._labels = dict(zip(self._names, ({ROLE: each} for each in roles), strict=False))
        self._failure_mode = failure_mode
        self.engines: dict[str, Upstream] = {}
        # The processes of pickers whose failures count, by the pod's uid.
        self._pickers: dict[str, fail_open.Elsewhere] = {}

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Apply objects in the namespace."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.cluster.kubectl("apply", "-n", self.namespace, "-f", "-", input=document)

    def objects(self, kind: str, *selector: str) -> list[dict[str, Any]]:
        """Return the namespace's objects of a kind."""
        said = self.cluster.kubectl("get", kind, "-n", self.namespace, "-o", "json", *selector)
        items: list[dict[str, Any]] = json.loads(said)["items"]
        return items

    def deploy_picker(self, *arguments: str, replicas: int = 1) -> None:
        """Apply a Deployment of DualMap's picker, with its permissions."""
        self.apply(*_permissions(self.namespace), _deployment(self.namespace, arguments, replicas))

    def publish_picker(self, at: tuple[str, int] | None = None) -> None:
        """Apply the Service that the pool refers to, for the picker's pods or another address."""
        self.apply(_service(None if at else _PICKER_LABELS), *([_endpoints(*at)] if at else ()))

    async def picker_pods(self, count: int) -> list[dict[str, Any]]:
        """Wait until ``count`` pods of the picker are ready and no other pod of the picker exists; return them."""
        found: list[dict[str, Any]] = []

        async def ready() -> bool:
            found[:] = await asyncio.to_thread(self.objects, "pods", "-l", f"app={PICKER}")
            return len(found) == count and all(_is_ready(each) for each in found)

        await until(ready, f"{count} pickers are ready", timeout_s=WITHIN_S)
        for pod in found:
            process = self._pickers.setdefault(pod["metadata"]["uid"], fail_open.Elsewhere())
            fail_open.watch_router(process, f"http://{pod['status']['podIP']}:{METRICS_PORT}")
        return found

    async def picker_restarted(self) -> None:
        """Wait until the only picker's container has been restarted and is ready."""

        async def restarted() -> bool:
            (pod,) = await asyncio.to_thread(self.objects, "pods", "-l", f"app={PICKER}")
            return bool(pod["status"]["containerStatuses"][0]["restartCount"]) and _is_ready(pod)

        await until(restarted, "the picker runs again", timeout_s=WITHIN_S)

    async def __aenter__(self) -> Self:
        self.apply(_pool(self._failure_mode), *(_engine(name, self._labels.get(name, {})) for name in self._names))

        async def addressed() -> bool:
            pods = await asyncio.to_thread(self.objects, "pods", "-l", f"app={POOL}")
            return len(pods) == len(self._names) and all(_is_ready(each) for each in pods)

        await until(addressed, "the engines' pods have addresses", timeout_s=WITHIN_S)
        for pod in self.objects("pods", "-l", f"app={POOL}"):
            name = pod["metadata"]["name"]
            self.engines[name] = Upstream(name=name, host=pod["status"]["podIP"], port=ENGINE_PORT)
            await self.engines[name].start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._pickers.values():
            fail_open.end(process)
        for engine in self.engines.values():
            await engine.stop()
        self.cluster.remove_namespace(self.namespace)


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions") or ()}
    return conditions.get("Ready") == "True" and bool(pod["status"].get("podIP"))


def _engine(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    container = {"name": "engine", "image": "scripted", "ports": [{"containerPort": ENGINE_PORT}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {**_ENGINE_LABELS, **labels}, "annotations": {FAKE_ANNOTATION: "true"}},
        "spec": {"containers": [container]},
    }


def _pool(failure_mode: str) -> dict[str, Any]:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": POOL},
        "spec": {
            "selector": {"matchLabels": _ENGINE_LABELS},
            "targetPorts": [{"number": ENGINE_PORT}],
            "endpointPickerRef": {"name": PICKER, "port": {"number": PICKER_PORT}, "failureMode": failure_mode},
        },
    }


def _permissions(namespace: str) -> Sequence[dict[str, Any]]:
    """Return the permissions that GAIE's own manifests give to a picker."""
    verbs = ["get", "list", "watch"]
    return (
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": PICKER},
            "rules": [
                {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": verbs},
                {"apiGroups": [""], "resources": ["pods"], "verbs": verbs},
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": PICKER},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
            "roleRef": {"kind": "Role", "name": PICKER, "apiGroup": "rbac.authorization.k8s.io"},
        },
    )


def _service(selector: Mapping[str, str] | None) -> dict[str, Any]:
    port = {"name": "grpc", "port": PICKER_PORT, "targetPort": PICKER_PORT, "appProtocol": "http2"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": PICKER},
        "spec": {"ports": [port], **({"selector": selector} if selector else {})},
    }


def _endpoints(host: str, port: int) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": PICKER, "labels": {"kubernetes.io/service-name": PICKER}},
        "addressType": "IPv4",
        "ports": [{"name": "grpc", "port": port, "appProtocol": "http2"}],
        "endpoints": [{"addresses": [host], "conditions": {"ready": True}}],
    }


def _deployment(namespace: str, arguments: Sequence[str], replicas: int) -> dict[str, Any]:
    # The emulated kubelet runs the probe as a process; on a busy machine the process starts slowly.
    probe = {"grpc": {"port": _HEALTH_PORT, "service": "inference-extension"}, "periodSeconds": 1, "timeoutSeconds": 10}
    container = {
        "name": "epp",
        "image": PICKER_IMAGE,
        "args": [
            "--pool-name", POOL, "--pool-namespace", namespace, "--grpc-port", str(PICKER_PORT),
            "--grpc-health-port", str(_HEALTH_PORT), "--zap-encoder", "json", *arguments,
        ],
        "ports": [{"containerPort": PICKER_PORT}, {"containerPort": _HEALTH_PORT}, {"containerPort": METRICS_PORT}],
        "readinessProbe": probe,
    }  # fmt: skip
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": PICKER},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": _PICKER_LABELS},
            "template": {"metadata": {"labels": _PICKER_LABELS}, "spec": {"containers": [container]}},
        },
    }
