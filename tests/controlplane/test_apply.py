"""Tests of applying a plan: in order, with the resource version that the plan is based on, and without unchanged
objects.
"""

from dataclasses import replace
from typing import Any

import pytest

from controlplane.fake_kube import Clock, Counts, FakeKube, Request
from controlplane.operator_objects import member, pool_object
from dualmap_edge.kube.client import KubeError
from dualmap_operator.act.apply import Applied, Applier, merge_patch
from dualmap_operator.act.events import EventRecorder
from dualmap_operator.act.reservations import ReservationWriter
from dualmap_operator.api import Api
from dualmap_operator.decide.observed import PoolStatus
from dualmap_operator.decide.plan_values import Event, Gate, Plan, Restart
from dualmap_operator.errors import ConflictError, NotLeadingError
from dualmap_operator.names import EventReason
from dualmap_operator.observe.mirror import Key
from dualmap_operator.observe.watches import ChildObject, read_child

STATUS = "/apis/serving.dualmap.dev/v1alpha1/namespaces/llm/inferencepools/qwen/status"
SERVICE_PATH = "/api/v1/namespaces/llm/services/qwen"
STATEFULSET_PATH = "/apis/apps/v1/namespaces/llm/statefulsets/qwen"
POD = "/api/v1/namespaces/llm/pods/qwen-1"
EVENTS = "/apis/events.k8s.io/v1/namespaces/llm/events"
SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {
        "namespace": "llm",
        "name": "qwen",
        "labels": {"serving.dualmap.dev/pool": "qwen"},
        "ownerReferences": [{"uid": "pool-uid", "controller": True}],
    },
    "spec": {"clusterIP": "None"},
}
PLAN = Plan(
    status=PoolStatus(observed_generation=1, selector="pool=qwen"),
    children=(SERVICE,),
    gates=(Gate(pod="qwen-1", uid="u", in_ring=False, reason="Draining"),),
    restarts=(Restart(pod="qwen-1", uid="u"),),
    events=(Event(reason=EventReason.MEMBER_DRAINING, message="qwen-1"),),
)


class Scene:
    """An applier with a server that stores the applied objects; ``show`` delivers the stored object to the watch."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.kube.answer("PATCH", SERVICE_PATH, self._apply)
        self.server: dict[str, Any] = {}
        self.shown: ChildObject | None = None
        self.clock = Clock()
        self.leads = True
        api = Api(self.kube, Counts(), lambda: self.leads)  # type: ignore[arg-type]  # stands for it
        recorder = EventRecorder(api, identity="operator-1", clock=self.clock)
        self.applier = Applier(
            api,
            recorder,
            reservations=ReservationWriter(api, namespace="dualmap-system"),
            live=self._live,
            now=lambda: 0.0,
        )

    def _apply(self, request: Request) -> dict[str, Any]:
        self.server = {**request.body, "spec": {**request.body["spec"], "type": "ClusterIP"}}
        return self.server

    def _live(self, kind: str, key: Key) -> ChildObject | None:
        assert key == ("llm", "qwen")
        return self.shown if kind == "Service" else None

    def show(self) -> None:
        # Objects from a list or watch have no kind, but a resource version.
        body = {key: value for key, value in self.server.items() if key not in ("kind", "apiVersion")}
        body["metadata"] = {**body["metadata"], "resourceVersion": "8", "managedFields": [{}]}
        self.shown = read_child(body)

    async def apply(self, plan: Plan, **pool: Any) -> Applied:
        return await self.applier.apply(pool_object(**pool), plan)

    @property
    def sent(self) -> list[str]:
        """The written objects."""
        return [f"{request.method} {request.path}" for request in self.kube.requests if request.method != "GET"]


async def test_apply_order_is_children_status_gates_restarts_events() -> None:
    scene = Scene()
    applied = await scene.apply(PLAN, version="41")

    assert scene.sent == [
        f"PATCH {SERVICE_PATH}",
        f"PATCH {STATUS}",
        f"PATCH {POD}/status",
        f"DELETE {POD}",
        f"POST {EVENTS}",
    ]
    assert scene.kube.requests[2].body["metadata"] == {"resourceVersion": "41"}
    assert applied == Applied(wrote_status=True)


async def test_apply_of_unchanged_plan_sends_no_request() -> None:
    scene = Scene()
    plan = Plan(status=pool_object().status, children=(SERVICE,))
    await scene.apply(plan)
    scene.show()
    scene.kube.requests.clear()

    assert await scene.apply(plan) == Applied()
    assert scene.kube.requests == []


@pytest.mark.parametrize("lost", [True, False])
async def test_apply_restores_deleted_or_edited_child(lost: bool) -> None:
    scene = Scene()
    plan = Plan(status=pool_object().status, children=(SERVICE,))
    await scene.apply(plan)
    scene.server["spec"]["clusterIP"] = "10.0.0.7"
    scene.show()
    if lost:
        scene.shown = None
    scene.kube.requests.clear()

    await scene.apply(plan)
    assert scene.sent == [f"PATCH {SERVICE_PATH}"]


async def test_apply_sends_changed_child() -> None:
    scene = Scene()
    await scene.apply(Plan(status=pool_object().status, children=(SERVICE,)))
    scene.show()
    scene.kube.requests.clear()

    await scene.apply(Plan(status=pool_object().status, children=({**SERVICE, "spec": {"clusterIP": ""}},)))
    assert scene.sent == [f"PATCH {SERVICE_PATH}"]


async def test_apply_status_conflict_stops_the_plan() -> None:
    scene = Scene()
    scene.kube.answer("PATCH", STATUS, KubeError(409, "changed"))

    with pytest.raises(ConflictError):
        await scene.apply(PLAN)

    assert scene.sent == [f"PATCH {SERVICE_PATH}", f"PATCH {STATUS}"]


async def test_apply_with_rejected_child_still_publishes_ring() -> None:
    scene = Scene()
    scene.kube.answer_instead("PATCH", SERVICE_PATH, KubeError(422, "spec.clusterIP: Invalid value"))

    applied = await scene.apply(PLAN)

    (refusal,) = applied.refused
    assert "spec.clusterIP: Invalid value" in refusal
    assert f"PATCH {STATUS}" in scene.sent


@pytest.mark.parametrize("status", [0, 403, 404, 409, 429, 500, 503])
async def test_apply_reports_failed_child_and_applies_the_rest(status: int) -> None:
    scene = Scene()
    scene.kube.answer_instead("PATCH", SERVICE_PATH, KubeError(status, "not now"))

    applied = await scene.apply(PLAN)

    (refusal,) = applied.refused
    assert "not now" in refusal
    assert scene.sent[-4:] == [f"PATCH {STATUS}", f"PATCH {POD}/status", f"DELETE {POD}", f"POST {EVENTS}"]


async def test_apply_without_lease_stops_at_first_write() -> None:
    scene = Scene()
    scene.leads = False

    with pytest.raises(NotLeadingError):
        await scene.apply(PLAN)

    assert scene.sent == []


@pytest.mark.parametrize("fails", [True, False])
async def test_apply_with_failed_size_change_records_no_scaling_event(fails: bool) -> None:
    scene = Scene()
    statefulset = {**SERVICE, "apiVersion": "apps/v1", "kind": "StatefulSet"}
    if fails:
        scene.kube.answer("PATCH", STATEFULSET_PATH, KubeError(500, "a webhook is away"))
    reasons = (EventReason.SCALED_DOWN, EventReason.SCALED_UP, EventReason.DRAIN_TIMED_OUT, EventReason.MEMBER_LEFT)
    events = tuple(Event(reason=reason, message="qwen-1") for reason in reasons)

    applied = await scene.apply(Plan(status=pool_object().status, children=(statefulset, SERVICE), events=events))

    posted = [request.body["reason"] for request in scene.kube.requests if request.path == EVENTS]
    assert posted == (["MemberLeft"] if fails else [reason.value for reason in reasons])
    assert len(applied.refused) == fails


@pytest.mark.parametrize("status", [404, 409])
async def test_apply_ignores_replaced_pod(status: int) -> None:
    scene = Scene()
    scene.kube.answer("PATCH", f"{POD}/status", KubeError(status, "not this one"))
    scene.kube.answer("DELETE", POD, KubeError(status, "not this one"))

    assert (await scene.apply(PLAN)).refused == ()


@pytest.mark.parametrize("labelled", [True, False])
async def test_apply_reports_and_keeps_objects_of_another_owner(labelled: bool) -> None:
    scene = Scene()
    theirs = {**SERVICE, "metadata": {**SERVICE["metadata"], "ownerReferences": [{"uid": "x", "controller": True}]}}
    if labelled:
        scene.server = theirs
        scene.show()
    else:
        theirs["metadata"]["labels"] = {}
        scene.kube.answer("GET", SERVICE_PATH.removesuffix("/qwen"), {"items": [theirs]})

    applied = await scene.apply(PLAN)

    (refusal,) = applied.refused
    assert "Service llm/qwen exists and is not controlled by this pool" in refusal
    assert f"PATCH {SERVICE_PATH}" not in scene.sent
    assert f"PATCH {STATUS}" in scene.sent


async def test_apply_recognizes_its_child_without_label() -> None:
    scene = Scene()
    bare = {**SERVICE, "metadata": {**SERVICE["metadata"], "labels": {}}}
    scene.kube.answer("GET", SERVICE_PATH.removesuffix("/qwen"), {"items": [bare]})

    assert (await scene.apply(PLAN)).refused == ()
    (looked, *_) = scene.kube.requests
    assert looked.query == {"fieldSelector": "metadata.name=qwen"}
    assert f"PATCH {SERVICE_PATH}" in scene.sent


async def test_apply_sends_removed_status_fields_as_null() -> None:
    scene = Scene()
    await scene.apply(PLAN, status={"traffic": {"sloAttainment": "0.9"}, "ring": {"members": [member("qwen-0")]}})

    (write,) = [request for request in scene.kube.requests if request.path == STATUS]
    assert write.body["status"]["traffic"] is None
    assert write.body["status"]["ring"]["members"] == []


def test_merge_patch_sets_removed_fields_to_null_at_any_depth() -> None:
    before = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1, 2]}

    assert merge_patch(before, {"b": {"c": 2}, "e": [2]}) == {"a": None, "b": {"c": 2, "d": None}, "e": [2]}


async def test_apply_sets_each_of_a_thousand_gates_once() -> None:
    scene = Scene()
    gates = tuple(Gate(pod=f"qwen-{number}", uid="u", in_ring=True, reason="Active") for number in range(1000))
    await scene.apply(Plan(status=pool_object().status, gates=gates))

    assert sorted(scene.sent) == sorted(f"PATCH /api/v1/namespaces/llm/pods/{gate.pod}/status" for gate in gates)


async def test_apply_reports_failed_gate_and_sets_the_rest() -> None:
    scene = Scene()
    gates = tuple(Gate(pod=f"qwen-{number}", uid="u", in_ring=True, reason="Active") for number in range(20))
    scene.kube.answer("PATCH", f"{POD}/status", KubeError(503, "away"))

    applied = await scene.apply(Plan(status=pool_object().status, gates=gates, restarts=PLAN.restarts))

    (refusal,) = applied.refused
    assert "away" in refusal
    assert len(scene.sent) == 21


async def test_apply_with_many_failed_gates_reports_only_a_few_names() -> None:
    scene = Scene()
    gates = tuple(Gate(pod=f"qwen-{number}", uid="u", in_ring=True, reason="Active") for number in range(1000))
    for gate in gates:
        scene.kube.answer("PATCH", f"/api/v1/namespaces/llm/pods/{gate.pod}/status", KubeError(503, "away"))

    *named, rest = (await scene.apply(Plan(status=pool_object().status, gates=gates))).refused

    assert len(named) == 3
    assert rest == "and 997 more errors"


CONFIG_MAPS = "/api/v1/namespaces/dualmap-system/configmaps"


async def test_apply_reserves_model_names_before_it_publishes_the_ring() -> None:
    scene = Scene()
    scene.kube.answer("GET", CONFIG_MAPS, {"items": [{"metadata": {"resourceVersion": "3"}}]})
    await scene.apply(replace(PLAN, reserve=("qwen",)))
    assert scene.sent[1:3] == [f"PATCH {CONFIG_MAPS}/dualmap-models", f"PATCH {STATUS}"]


async def test_apply_without_reservation_still_publishes_the_ring() -> None:
    scene = Scene()
    applied = await scene.apply(replace(PLAN, reserve=("qwen",)))
    (refusal,) = applied.refused
    assert "dualmap-models does not exist" in refusal
    assert f"PATCH {STATUS}" in scene.sent


async def test_apply_with_conflicting_reservation_stops_before_the_ring() -> None:
    scene = Scene()
    scene.kube.answer("GET", CONFIG_MAPS, {"items": [{"metadata": {"resourceVersion": "3"}}]})
    scene.kube.answer("PATCH", f"{CONFIG_MAPS}/dualmap-models", KubeError(409, "changed"))
    with pytest.raises(ConflictError):
        await scene.apply(replace(PLAN, reserve=("qwen",)))
    assert f"PATCH {STATUS}" not in scene.sent
