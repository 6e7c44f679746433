"""The operator's requests to the API server: one method for each kind of request, over ``dualmap_edge.kube.client``.

``apply`` and ``events`` use this module for writes, and ``leader`` for its Lease. All methods raise exceptions of the
``errors`` module. No write is sent while ``may_write`` returns False, because an operator without the lease must not
race the leader.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import quote

from dualmap.objects.pool_reader import API_VERSION
from dualmap.objects.times import time_text
from dualmap_edge.kube.client import KubeClient, KubeError
from dualmap_operator.decide.plan_values import Gate, Restart
from dualmap_operator.errors import ApiError, ConflictError, GoneError, NotLeadingError
from dualmap_operator.names import FIELD_MANAGER, IN_RING_GATE, PLURAL

_MERGE: Final = "application/merge-patch+json"
_STRATEGIC: Final = "application/strategic-merge-patch+json"
_APPLY: Final = "application/apply-patch+yaml"  # The body is JSON, which is valid YAML.
_GONE_CODES: Final = (404, 410)
_CONFLICT: Final = 409
_PLURALS: Final[Mapping[str, str]] = {
    "StatefulSet": "statefulsets",
    "Service": "services",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Lease": "leases",
    "ConfigMap": "configmaps",
    "Event": "events",
    "Pod": "pods",
    "EndpointSlice": "endpointslices",
    "InferencePool": PLURAL,
    "Secret": "secrets",
}


class ApiObserver(Protocol):
    """An observer that counts requests to the API server."""

    def api_request(self, verb: str, code: int) -> None:
        """Count one request by its API verb and HTTP status; status 0 means no answer."""


def collection_path(api_version: str, kind: str, namespace: str | None) -> str:
    """Return the path of all objects of a kind in ``namespace``; None means all namespaces."""
    root = "/api" if "/" not in api_version else "/apis"
    within = "" if namespace is None else f"/namespaces/{quote(namespace)}"
    return f"{root}/{api_version}{within}/{_PLURALS[kind]}"


class Api:
    """Sends the operator's requests. Each method raises ApiError or a subclass of ApiError."""

    def __init__(self, client: KubeClient, observer: ApiObserver, may_write: Callable[[], bool]) -> None:
        self._client = client
        self._observer = observer
        self._may_write = may_write

    async def find(self, child: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the object with the kind and name of ``child``, with or without our label; None if there is none."""
        metadata = child["metadata"]
        path = collection_path(child["apiVersion"], child["kind"], metadata["namespace"])
        # The request is a list with a field selector: a get by name would need one more RBAC verb.
        answer = await self.request("GET", path, query=(("fieldSelector", f"metadata.name={metadata['name']}"),))
        found: list[dict[str, Any]] = answer.get("items") or []
        return found[0] if found else None

    async def apply_child(self, child: Mapping[str, Any]) -> dict[str, Any]:
        """Apply ``child`` by server-side apply and return the resulting object."""
        path = self._path(child["apiVersion"], child["kind"], child["metadata"])
        query = (("fieldManager", FIELD_MANAGER), ("force", "true"))
        return await self._write("PATCH", path, query=query, body=child, content_type=_APPLY)

    async def write_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> dict[str, Any]:
        """Merge ``status`` into a pool's status; raise ConflictError unless the pool is at ``resource_version``."""
        path = f"{collection_path(API_VERSION, 'InferencePool', namespace)}/{quote(name)}/status"
        body = {"metadata": {"resourceVersion": resource_version}, "status": status}
        return await self._write("PATCH", path, query=_MANAGED, body=body, content_type=_MERGE)

    async def set_gate(self, namespace: str, gate: Gate, now_s: float) -> None:
        """Set our readiness gate's condition; raise ConflictError if a new pod has the same name."""
        condition = {
            "type": IN_RING_GATE,
            "status": "True" if gate.in_ring else "False",
            "reason": gate.reason,
            "lastTransitionTime": time_text(now_s),
        }
        body = {"metadata": {"uid": gate.uid}, "status": {"conditions": [condition]}}
        path = f"{collection_path('v1', 'Pod', namespace)}/{quote(gate.pod)}/status"
        await self._write("PATCH", path, query=_MANAGED, body=body, content_type=_STRATEGIC)

    async def restart_pod(self, namespace: str, restart: Restart) -> None:
        """Delete a pod with its own grace period; raise ConflictError if a new pod has the same name."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": restart.uid}}
        await self._write("DELETE", f"{collection_path('v1', 'Pod', namespace)}/{quote(restart.pod)}", body=body)

    async def create(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object; raise ConflictError if the name exists."""
        path = collection_path(document["apiVersion"], document["kind"], document["metadata"]["namespace"])
        return await self._write("POST", path, query=_MANAGED, body=document)

    async def merge(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Merge fields into an existing object."""
        path = self._path(document["apiVersion"], document["kind"], document["metadata"])
        return await self._write("PATCH", path, query=_MANAGED, body=document, content_type=_MERGE)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content_type: str = "application/json",
        timeout_s: float = 10.0,
    ) -> dict[str, Any]:
        """Send and count any request, even if ``may_write`` returns False. Raises ApiError."""
        try:
            answer = await self._client.request(
                method, path, query=query, body=body, content_type=content_type, timeout_s=timeout_s
            )
        except KubeError as error:
            self._observer.api_request(method, error.status)
            raise _api_error(method, path, error) from error
        self._observer.api_request(method, 200)
        return answer

    async def _write(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        if not self._may_write():
            raise NotLeadingError(f"{method} {path}: request not sent, because this operator is not the leader")
        return await self.request(method, path, **request)

    def _path(self, api_version: str, kind: str, metadata: Mapping[str, Any]) -> str:
        return f"{collection_path(api_version, kind, metadata['namespace'])}/{quote(metadata['name'])}"


_MANAGED: Final = (("fieldManager", FIELD_MANAGER),)


def _api_error(method: str, path: str, error: KubeError) -> ApiError:
    words = f"{method} {path}: {error}"
    if error.status == _CONFLICT:
        return ConflictError(words, status=error.status)
    if error.status in _GONE_CODES:
        return GoneError(words, status=error.status)
    return ApiError(words, status=error.status)
