"""Tests of the operator's requests to the API server, and of its error handling."""

import pytest

from controlplane.fake_kube import Counts, FakeKube
from dualmap_edge.kube.client import KubeError
from dualmap_operator.api import Api, collection_path
from dualmap_operator.decide.plan_values import Gate, Restart
from dualmap_operator.errors import ApiError, ConflictError, GoneError

POD = "/api/v1/namespaces/llm/pods/qwen-0"
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "llm", "name": "qwen"}, "spec": {}}


class Scene:
    def __init__(self) -> None:
        self.kube = FakeKube()
        self.counts = Counts()
        self.leads = True
        self.api = Api(self.kube, self.counts, lambda: self.leads)  # type: ignore[arg-type]  # stands for it


async def test_api_child_apply_forces_the_operators_field_manager() -> None:
    scene = Scene()
    await scene.api.apply_child(SERVICE)

    (request,) = scene.kube.requests
    assert (request.method, request.path) == ("PATCH", "/api/v1/namespaces/llm/services/qwen")
    assert request.query == {"fieldManager": "dualmap-operator", "force": "true"}
    assert request.content_type == "application/apply-patch+yaml"
    assert request.body == SERVICE


async def test_api_status_write_sends_resource_version() -> None:
    scene = Scene()
    await scene.api.write_status("llm", "qwen", {"inRing": 1}, resource_version="41")

    (request,) = scene.kube.requests
    assert request.path == "/apis/serving.dualmap.dev/v1alpha1/namespaces/llm/inferencepools/qwen/status"
    assert request.content_type == "application/merge-patch+json"
    assert request.body == {"metadata": {"resourceVersion": "41"}, "status": {"inRing": 1}}


async def test_api_readiness_gate_write_sends_pod_uid() -> None:
    scene = Scene()
    await scene.api.set_gate("llm", Gate(pod="qwen-0", uid="u1", in_ring=True, reason="Active"), 0.0)

    (request,) = scene.kube.requests
    assert (request.method, request.path) == ("PATCH", f"{POD}/status")
    assert request.content_type == "application/strategic-merge-patch+json"
    assert request.body == {
        "metadata": {"uid": "u1"},
        "status": {
            "conditions": [
                {
                    "type": "serving.dualmap.dev/in-ring",
                    "status": "True",
                    "reason": "Active",
                    "lastTransitionTime": "1970-01-01T00:00:00Z",
                }
            ]
        },
    }


async def test_api_restart_deletes_pod_by_uid() -> None:
    scene = Scene()
    await scene.api.restart_pod("llm", Restart(pod="qwen-0", uid="u1"))

    (request,) = scene.kube.requests
    assert (request.method, request.path) == ("DELETE", POD)
    assert request.body["preconditions"] == {"uid": "u1"}


@pytest.mark.parametrize(
    ("status", "error"), [(409, ConflictError), (404, GoneError), (410, GoneError), (422, ApiError), (0, ApiError)]
)
async def test_api_error_message_contains_request_and_reason(status: int, error: type[ApiError]) -> None:
    scene = Scene()
    scene.kube.answer("DELETE", POD, KubeError(status, "because"))

    with pytest.raises(error, match=f"DELETE {POD}: .*because") as caught:
        await scene.api.restart_pod("llm", Restart(pod="qwen-0", uid="u1"))

    assert type(caught.value) is error
    assert caught.value.status == status
    assert scene.counts.requests == [("DELETE", status)]


async def test_api_without_lease_writes_nothing() -> None:
    scene = Scene()
    scene.leads = False

    with pytest.raises(ApiError, match="is not the leader"):
        await scene.api.apply_child(SERVICE)

    assert scene.kube.requests == []


def test_api_collection_path_depends_on_group_and_namespace() -> None:
    assert collection_path("v1", "Pod", None) == "/api/v1/pods"
    assert collection_path("apps/v1", "StatefulSet", "llm") == "/apis/apps/v1/namespaces/llm/statefulsets"
