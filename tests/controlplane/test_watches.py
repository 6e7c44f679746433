"""Tests of a pool's objects from the watches, and of the pool that an event triggers."""

from typing import Any

import pytest

from controlplane.fake_kube import Clock, Counts, FakeKube
from controlplane.operator_objects import KEY, pod_body, pool_body
from dualmap_operator.decide.spec import read_spec
from dualmap_operator.observe.mirror import Key
from dualmap_operator.observe.watches import FLAP_WINDOW_S, Watches, fingerprint, read_child, read_pod_object, read_pool

POD = ("llm", "qwen-0")
SELECTOR = {"workload": {"selector": {"matchLabels": {"app": "vllm"}}}}


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.woken: list[Key] = []
        self.watches = Watches(
            FakeKube(),  # type: ignore[arg-type]  # stands for it
            Counts(),
            namespace=None,
            wake=self.woken.append,
            clock=self.clock,
        )

    def pool(self, **spec: object) -> None:
        self.watches.pools.put((KEY, read_pool(pool_body(**spec))))
        self.woken.clear()

    def pod(self, body: dict[str, object] | None, key: Key = POD) -> None:
        if body is None:
            self.watches.pods.remove((key, read_pod_object({})))
        else:
            self.watches.pods.put((key, read_pod_object(body)))

    def names(self, **spec: object) -> list[str]:
        return [pod.name for pod in self.watches.pods_of(read_spec(read_pool(pool_body(**spec)).document))]

    def flaps(self) -> int:
        (pod,) = self.watches.pods_of(read_spec(read_pool(pool_body()).document))
        return pod.flaps


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_template_pool_has_the_pods_of_its_statefulset(scene: Scene) -> None:
    scene.pool()
    scene.pod(pod_body("qwen-0", owner="qwen"))
    scene.pod(pod_body("other-0", owner="other"), ("llm", "other-0"))
    # A pod is a member only with both the pool's label and a controller of the pool's name.
    scene.pod(pod_body("qwen-7", owner="qwen", **{"serving.dualmap.dev/pool": ""}), ("llm", "qwen-7"))
    scene.pod(pod_body("qwen-8", owner="qwen", **{"serving.dualmap.dev/pool": "other"}), ("llm", "qwen-8"))
    scene.pod(pod_body("stray", **{"serving.dualmap.dev/pool": "qwen"}), ("llm", "stray"))

    assert scene.names() == ["qwen-0"]
    assert scene.woken == [KEY, ("llm", "other")]


def test_orphaned_pods_stay_in_their_pool(scene: Scene) -> None:
    labels = {"serving.dualmap.dev/pool": "qwen", "apps.kubernetes.io/pod-index": "0"}
    scene.pod(pod_body("qwen-0", owner="qwen"))
    scene.pod(pod_body("qwen-0", **labels))

    assert scene.names() == ["qwen-0"]


def test_selector_pool_has_the_selected_pods_of_its_namespace(scene: Scene) -> None:
    scene.pool(**SELECTOR)
    scene.pod(pod_body("a", app="vllm"), ("llm", "a"))
    scene.pod(pod_body("b", app="web"), ("llm", "b"))
    scene.pod(pod_body("c", app="vllm"), ("elsewhere", "c"))

    assert scene.names(**SELECTOR) == ["a"]
    assert scene.woken == [KEY]


def test_pod_no_longer_selected_triggers_reconcile_of_old_pool(scene: Scene) -> None:
    scene.pool(**SELECTOR)
    scene.pod(pod_body("a", app="vllm"), ("llm", "a"))
    scene.woken.clear()

    scene.pod(pod_body("a", app="quarantined"), ("llm", "a"))

    assert scene.woken == [KEY]
    assert scene.names(**SELECTOR) == []


def test_deleted_pod_is_removed_and_triggers_reconcile(scene: Scene) -> None:
    scene.pool()
    scene.pod(pod_body("qwen-0", owner="qwen"))
    scene.woken.clear()

    scene.pod(None)

    assert scene.woken == [KEY]
    assert scene.names() == []


def test_pod_flaps_are_counted_per_pod_for_five_minutes(scene: Scene) -> None:
    for serving in (True, False, True, False):
        scene.pod(pod_body("qwen-0", owner="qwen", serving=serving))
        scene.clock.now_s += 10
    assert scene.flaps() == 2

    scene.clock.now_s += FLAP_WINDOW_S - 25
    assert scene.flaps() == 1

    scene.pod(pod_body("qwen-0", owner="qwen", uid="its successor"))
    assert scene.flaps() == 0


def test_terminating_pod_is_not_counted_as_flapping(scene: Scene) -> None:
    scene.pod(pod_body("qwen-0", owner="qwen"))
    stopping = pod_body("qwen-0", owner="qwen", serving=False)
    stopping["metadata"]["deletionTimestamp"] = "2026-11-20T08:00:00Z"
    scene.pod(stopping)

    assert scene.flaps() == 0


def test_child_fingerprint_covers_all_fields_set_by_clients() -> None:
    child = {"metadata": {"name": "qwen", "labels": {"serving.dualmap.dev/pool": "qwen"}}, "spec": {"replicas": 2}}
    counted = {
        **child,
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {**child["metadata"], "resourceVersion": "7", "generation": 3, "managedFields": [{}]},
        "status": {"replicas": 1},
    }

    assert fingerprint(counted) == fingerprint(child)
    assert fingerprint({**child, "spec": {"replicas": 3}}) != fingerprint(child)
    assert read_child(counted).pool == "qwen"
    assert read_child(counted).statefulset is None, "a Service"


def test_edited_child_object_triggers_reconcile_of_its_pool(scene: Scene) -> None:
    child = {"metadata": {"labels": {"serving.dualmap.dev/pool": "qwen"}}, "spec": {"podManagementPolicy": "Parallel"}}
    scene.watches._children["StatefulSet"].put((KEY, read_child(child)))

    assert scene.woken == [KEY]


@pytest.mark.parametrize(
    ("controller", "manager", "belongs"),
    [
        ("pool-uid", "dualmap-operator", True),
        ("pool-uid", "kubectl", True),
        ("", "dualmap-operator", True),
        ("", "kubectl", False),
        ("another", "dualmap-operator", False),
    ],
)
def test_statefulset_pool_is_found_by_controller_or_field_manager(
    scene: Scene, controller: str, manager: str, belongs: bool
) -> None:
    child = {
        "metadata": {
            "labels": {"serving.dualmap.dev/pool": "qwen"},
            "ownerReferences": [{"uid": "x"}, *([{"uid": controller, "controller": True}] if controller else [])],
            "managedFields": [{"manager": "kube-controller-manager"}, {"manager": manager}],
        },
        "spec": {"podManagementPolicy": "Parallel"},
    }
    scene.watches._children["StatefulSet"].put((KEY, read_child(child)))

    assert (scene.watches.statefulset(KEY, "pool-uid") is not None) is belongs


def test_spec_change_triggers_reconcile_of_pools_with_same_model(scene: Scene) -> None:
    def show(name: str, second: int, **fields: Any) -> list[Key]:
        body = pool_body(uid=f"uid-of-{name}", **fields)
        body["metadata"] |= {"name": name, "creationTimestamp": f"2026-11-20T08:00:{second:02}Z"}
        scene.woken.clear()
        scene.watches.pools.put((("llm", name), read_pool(body)))
        return scene.woken

    old, young = ("llm", "old"), ("llm", "young")
    assert show("young", 2) == [young]
    assert show("old", 1) == [young, old]
    assert [each.owner for each in scene.watches.lost_claims(young)] == ["llm/old"]
    # A status write must not trigger the other pool, or both pools would reconcile endlessly.
    assert show("old", 1, version="2", status={"inRing": 3}) == [old]
    assert show("young", 2, version="3", status={"inRing": 3}) == [young]
    assert show("old", 1, version="4", model={"name": "another"}) == [young, old]
    assert scene.watches.lost_claims(young) == ()

    show("old", 1, version="5")
    scene.woken.clear()
    scene.watches.pools.remove((old, read_pool({})))
    assert scene.woken == [young, old]
    assert scene.watches.lost_claims(young) == ()


def test_watches_without_reservations_reserve_no_name(scene: Scene) -> None:
    scene.pool()
    assert scene.watches.unreserved(KEY) == ()


def test_change_of_reservations_triggers_reconcile(scene: Scene) -> None:
    scene.watches = Watches(
        FakeKube(),  # type: ignore[arg-type]  # stands for it
        Counts(),
        namespace=None,
        reservations_in="dualmap-system",
        wake=scene.woken.append,
        clock=scene.clock,
    )
    scene.pool()
    assert scene.watches.unreserved(KEY) == ("qwen",)
    reservations = scene.watches.mirrors[-1]
    where = ("dualmap-system", "dualmap-models")
    reservations.put((where, {"qwen": "prod"}))
    assert scene.woken == [KEY]
    assert [each.owner for each in scene.watches.lost_claims(KEY)] == ["prod"]
    reservations.remove((where, {}))
    assert scene.woken == [KEY, KEY]
    assert scene.watches.lost_claims(KEY) == ()
