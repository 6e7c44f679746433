"""Tests of Kubernetes Events: repetitions increase a count, the number of Events is bounded, and failed writes are
ignored.
"""

from datetime import UTC, datetime

from controlplane.fake_kube import Clock, Counts, FakeKube
from controlplane.operator_objects import pool_object
from dualmap_edge.kube.client import KubeError
from dualmap_operator.act.events import EventRecorder
from dualmap_operator.api import Api
from dualmap_operator.decide.plan_values import Event
from dualmap_operator.names import EventReason

EVENTS = "/apis/events.k8s.io/v1/namespaces/llm/events"
DRAINING = Event(reason=EventReason.MEMBER_DRAINING, message="qwen-1: no new requests", warning=True)


class Scene:
    def __init__(self) -> None:
        self.kube = FakeKube()
        self.clock = Clock()
        api = Api(self.kube, Counts(), lambda: True)  # type: ignore[arg-type]  # stands for it
        now = datetime(2026, 11, 20, 8, 0, 0, 500_000, tzinfo=UTC)
        self.recorder = EventRecorder(api, identity="operator-1", clock=self.clock, now=lambda: now)

    async def post(self, event: Event = DRAINING) -> None:
        await self.recorder.post(pool_object(), event)

    @property
    def methods(self) -> list[str]:
        return [request.method for request in self.kube.requests]


async def test_event_contains_pool_and_reporting_instance() -> None:
    scene = Scene()
    await scene.post()

    (request,) = scene.kube.requests
    assert (request.method, request.path) == ("POST", EVENTS)
    body = request.body
    assert body["regarding"] == {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "namespace": "llm",
        "name": "qwen",
        "uid": "pool-uid",
    }
    assert (body["type"], body["reason"], body["note"]) == ("Warning", "MemberDraining", "qwen-1: no new requests")
    assert body["eventTime"] == "2026-11-20T08:00:00.500000Z"
    assert (body["reportingController"], body["reportingInstance"]) == ("serving.dualmap.dev/operator", "operator-1")


async def test_repeated_event_increments_its_count() -> None:
    scene = Scene()
    for _ in range(3):
        await scene.post()

    created, *counted = scene.kube.requests
    assert [request.path for request in counted] == [f"{EVENTS}/{created.body['metadata']['name']}"] * 2
    assert [request.body["series"]["count"] for request in counted] == [2, 3]


async def test_event_of_previous_operator_process_is_incremented() -> None:
    scene = Scene()
    scene.kube.answer("POST", EVENTS, KubeError(409, "AlreadyExists"))
    await scene.post()

    assert scene.methods == ["POST", "PATCH"]


async def test_expired_event_is_created_again() -> None:
    scene = Scene()
    await scene.post()
    name = scene.kube.requests[0].body["metadata"]["name"]
    scene.kube.answer("PATCH", f"{EVENTS}/{name}", KubeError(404, "not found"))
    await scene.post()
    await scene.post()

    assert scene.methods == ["POST", "PATCH", "POST"]


async def test_events_are_rate_limited_per_pool() -> None:
    scene = Scene()
    for number in range(100):
        await scene.post(Event(reason=EventReason.MEMBER_LEFT, message=f"qwen-{number}"))
    assert len(scene.kube.requests) == 30

    scene.clock.now_s += 10
    for number in range(100, 103):
        await scene.post(Event(reason=EventReason.MEMBER_LEFT, message=f"qwen-{number}"))
    assert len(scene.kube.requests) == 31


async def test_event_rejected_by_the_server_is_dropped() -> None:
    scene = Scene()
    scene.kube.answer("POST", EVENTS, KubeError(403, "forbidden"))

    await scene.post()
