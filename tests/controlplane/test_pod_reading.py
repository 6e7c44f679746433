import copy
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.objects.times import read_time
from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import ObservedPod, ObservedStatefulSet, PoolStatus, TrafficStatus
from dualmap_operator.decide.pod_reading import matches, read_pod, read_statefulset, read_status
from dualmap_operator.names import IN_RING_GATE

POD: dict[str, Any] = {
    "metadata": {
        "name": "qwen-3",
        "namespace": "llm",
        "uid": "6d1a57ee-6b0e-4dc4-9c9d-0a8d34a1f5c2",
        "labels": {
            "serving.dualmap.dev/pool": "qwen",
            "apps.kubernetes.io/pod-index": "3",
            "controller-revision-hash": "qwen-7f9",
        },
        "ownerReferences": [{"kind": "StatefulSet", "name": "qwen", "controller": True}],
    },
    "spec": {"readinessGates": [{"conditionType": IN_RING_GATE}]},
    "status": {
        "phase": "Running",
        "podIP": "10.244.0.7",
        "containerStatuses": [{"name": "engine", "restartCount": 1}],
        "conditions": [
            {"type": "ContainersReady", "status": "True", "lastTransitionTime": "2026-11-22T02:00:03Z"},
            {"type": IN_RING_GATE, "status": "True", "lastTransitionTime": "2026-11-22T02:00:05Z"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-22T02:00:05Z"},
        ],
    },
}
STATUS: dict[str, Any] = {
    "observedGeneration": 3,
    "replicas": 4,
    "readyReplicas": 3,
    "inRing": 2,
    "selector": "serving.dualmap.dev/pool=qwen",
    "traffic": {"sloAttainment": "0.97", "cacheHitRate": "0.63"},
    "ring": {
        "version": 7,
        "members": [
            {
                "id": "qwen-0",
                "address": "10.0.0.12",
                "port": 8000,
                "state": "Active",
                "weight": 100,
                "since": "2026-11-20T08:00:00Z",
                "incarnation": "6d1a57ee-0",
            },
            {"id": "qwen-1", "address": "10.0.0.13", "port": 8000, "state": "Joining", "weight": 25},
        ],
    },
    "conditions": [
        {
            "type": "Draining",
            "status": "False",
            "reason": "NoVictims",
            "message": "nobody leaves",
            "lastTransitionTime": "2026-11-20T08:00:00Z",
            "observedGeneration": 3,
        }
    ],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def changed(body: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    inner = body = copy.deepcopy(body)
    for key in path[:-1]:
        inner = inner[key]  # type: ignore[index]  # lists within are indexed by numbers
    inner[path[-1]] = value  # type: ignore[index]  # see above
    return body


def every_path(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in every_path(each, (*path, key)))]


def recorded(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text())
    return body


class TestRecorded:
    """The objects are recordings from a real API server; recorded/README.md describes the procedure."""

    @pytest.mark.parametrize(
        ("name", "serving", "ready", "in_ring", "terminating"),
        [
            ("gate_closed", True, False, False, False),
            ("in_ring", True, True, True, False),
            ("terminating", True, True, True, True),
            ("crashed", False, False, None, False),
            ("failed", False, False, None, False),
            ("pending", False, False, None, False),
            ("node_lost", False, False, True, False),
        ],
    )
    def test_recorded_pods_have_expected_states(
        self, name: str, serving: bool, ready: bool, in_ring: bool | None, terminating: bool
    ) -> None:
        pod = read_pod(recorded(f"pod_{name}"))
        assert (pod.serving, pod.ready, pod.in_ring, pod.terminating) == (serving, ready, in_ring, terminating)

    def test_recorded_lost_node_stays_lost_after_the_gate_is_false(self) -> None:
        body = recorded("pod_node_lost")
        (gate,) = (each for each in body["status"]["conditions"] if each["type"] == IN_RING_GATE)
        gate |= {"status": "False", "lastTransitionTime": "2030-01-01T00:00:00Z"}
        pod = read_pod(body)
        assert (pod.serving, pod.in_ring) == (False, False)

    def test_recorded_statefulset_pod_is_parsed(self) -> None:
        body, statefulset = recorded("pod_gate_closed"), read_statefulset(recorded("statefulset"))
        pod = read_pod(body)
        assert (pod.name, pod.ordinal, pod.address) == ("qwen-1", 1, body["status"]["podIP"])
        assert pod.incarnation == f"{pod.uid[:8]}-0"
        (ready,) = (each for each in body["status"]["conditions"] if each["type"] == "ContainersReady")
        assert pod.serving_since_s == seconds(ready["lastTransitionTime"])
        assert (statefulset.replicas, statefulset.update_revision) == (3, pod.revision)
        assert statefulset.generation == statefulset.observed_generation == 1

    def test_recorded_pod_is_terminating_only_after_deletion(self) -> None:
        before, ending = read_pod(recorded("pod_in_ring")), read_pod(recorded("pod_terminating"))
        killed_at_s = seconds("2026-11-22T03:00:21Z")
        assert ending == replace(before, terminating=True, killed_at_s=killed_at_s, grace_s=640)

    def test_recorded_restart_changes_the_incarnation(self) -> None:
        pod = read_pod(recorded("pod_crashed"))
        assert pod.incarnation == f"{pod.uid[:8]}-1"

    def test_recorded_unscheduled_pod_has_no_address(self) -> None:
        assert read_pod(recorded("pod_pending")).address == ""

    def test_recorded_pods_match_selectors(self) -> None:
        labels = recorded("pod_in_ring")["metadata"]["labels"]
        assert matches(recorded("statefulset")["spec"]["selector"], labels)
        assert not matches({"matchLabels": {"app": "vllm"}}, labels)


class TestPod:
    def test_parsed_object_has_every_field(self) -> None:
        assert read_pod(POD) == ObservedPod(
            name="qwen-3",
            uid="6d1a57ee-6b0e-4dc4-9c9d-0a8d34a1f5c2",
            address="10.244.0.7",
            serving=True,
            serving_since_s=seconds("2026-11-22T02:00:03Z"),
            ready=True,
            in_ring=True,
            incarnation="6d1a57ee-1",
            ordinal=3,
            revision="qwen-7f9",
        )

    def test_pod_notice_is_parsed(self) -> None:
        path = ("metadata", "annotations")
        noticed = read_pod(changed(POD, path, {"serving.dualmap.dev/leave-at": "2026-11-22T02:10:00+01:00"}))
        assert (noticed.leave_at_s, noticed.invalid_leave_at) == (seconds("2026-11-22T01:10:00Z"), "")
        odd = read_pod(changed(POD, path, {"serving.dualmap.dev/leave-at": "in 2 minutes"}))
        assert (odd.leave_at_s, odd.invalid_leave_at) == (None, "in 2 minutes")

    def test_pod_with_deletion_timestamp_is_terminating(self) -> None:
        assert read_pod(changed(POD, ("metadata", "deletionTimestamp"), "2026-11-22T02:10:00Z")).terminating

    def test_pod_without_known_fields_has_defaults(self) -> None:
        assert read_pod({}) == ObservedPod(name="", uid="")

    @pytest.mark.parametrize(
        ("labels", "owner", "ordinal"),
        [
            ({"apps.kubernetes.io/pod-index": "12"}, "StatefulSet", 12),
            ({"apps.kubernetes.io/pod-index": "12"}, None, 12),
            ({}, "StatefulSet", 3),
            ({}, "ReplicaSet", None),
            ({}, None, None),
            ({"apps.kubernetes.io/pod-index": "first"}, "StatefulSet", None),
            ({"apps.kubernetes.io/pod-index": "-1"}, "StatefulSet", None),
            ({"apps.kubernetes.io/pod-index": "\u0663"}, "StatefulSet", None),
            ({"apps.kubernetes.io/pod-index": "9" * 5000}, "StatefulSet", None),
        ],
    )
    def test_pod_ordinal_is_parsed_from_owner_and_labels(
        self, labels: dict[str, str], owner: str | None, ordinal: int | None
    ) -> None:
        body = changed(POD, ("metadata", "labels"), labels)
        body["metadata"]["ownerReferences"] = [] if owner is None else [{"kind": owner, "controller": True}]
        assert read_pod(body).ordinal == ordinal

    @given(path=st.sampled_from(every_path(POD)[1:]), value=JSON)
    def test_object_of_any_form_is_parsed_without_error(self, path: tuple[str | int, ...], value: object) -> None:
        read_pod(changed(POD, path, value))


class TestStatefulSet:
    def test_parsed_object_has_every_field(self) -> None:
        body = {
            "metadata": {"generation": 5},
            "spec": {"replicas": 4},
            "status": {"observedGeneration": 4, "updateRevision": "qwen-7f9", "currentRevision": "qwen-111"},
        }
        assert read_statefulset(body) == ObservedStatefulSet(
            replicas=4, update_revision="qwen-7f9", generation=5, observed_generation=4
        )

    def test_statefulset_size_0_is_kept_and_missing_size_is_1(self) -> None:
        assert read_statefulset({"spec": {"replicas": 0}}).replicas == 0
        assert read_statefulset({}).replicas == 1


class TestStatus:
    def test_parsed_object_has_every_field(self) -> None:
        status = read_status(STATUS)
        assert (status.observed_generation, status.replicas, status.ready_replicas, status.in_ring) == (3, 4, 3, 2)
        assert (status.selector, status.ring_version) == ("serving.dualmap.dev/pool=qwen", 7)
        assert status.traffic == TrafficStatus(slo_attainment="0.97", cache_hit_rate="0.63")
        first, second = status.members
        assert (first.id, first.address, first.port, first.state) == ("qwen-0", "10.0.0.12", 8000, MemberState.ACTIVE)
        assert (first.weight, first.incarnation) == (100, "6d1a57ee-0")
        assert first.since_s == seconds("2026-11-20T08:00:00Z")
        assert (second.state, second.weight, second.since_s, second.incarnation) == (MemberState.JOINING, 25, 0.0, "")
        (condition,) = status.conditions
        assert (condition.type, condition.status, condition.reason) == ("Draining", False, "NoVictims")
        assert (condition.message, condition.observed_generation) == ("nobody leaves", 3)
        assert condition.since_s == seconds("2026-11-20T08:00:00Z")

    @pytest.mark.parametrize("nothing", [None, {}, [], "yes", 7])
    def test_missing_status_is_empty(self, nothing: object) -> None:
        assert read_status(nothing) == PoolStatus()

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("id", ""),
            ("id", 7),
            ("address", "qwen-0.llm"),
            ("port", 0),
            ("port", 65_536),
            ("port", True),
            ("state", "Up"),
        ],
    )
    def test_status_drops_only_members_without_identity(self, field: str, value: object) -> None:
        status = read_status(changed(STATUS, ("ring", "members", 0, field), value))
        assert [member.id for member in status.members] == ["qwen-1"]
        assert status.ring_version == 7

    def test_status_keeps_first_of_duplicate_member_names(self) -> None:
        status = read_status(changed(STATUS, ("ring", "members", 1, "id"), "qwen-0"))
        assert [member.address for member in status.members] == ["10.0.0.12"]

    @pytest.mark.parametrize(("text", "value"), [("True", True), ("False", False), ("Unknown", None)])
    def test_status_conditions_are_parsed(self, text: str, value: bool | None) -> None:
        (condition,) = read_status(changed(STATUS, ("conditions", 0, "status"), text)).conditions
        assert condition.status is value

    @pytest.mark.parametrize(("field", "value"), [("status", "true"), ("status", None), ("type", "")])
    def test_status_condition_without_content_is_dropped(self, field: str, value: object) -> None:
        assert read_status(changed(STATUS, ("conditions", 0, field), value)).conditions == ()

    @given(path=st.sampled_from(every_path(STATUS)[1:]), value=JSON)
    def test_object_of_any_form_is_parsed_without_error(self, path: tuple[str | int, ...], value: object) -> None:
        read_status(changed(STATUS, path, value))


class TestTimes:
    @pytest.mark.parametrize(
        ("text", "time_s"),
        [
            ("1970-01-01T00:00:00Z", 0.0),
            ("2026-11-22T02:00:00Z", 1_795_312_800.0),
            ("2026-11-22T02:00:00.25Z", 1_795_312_800.25),
            ("2026-11-22T02:00:00.123456789Z", 1_795_312_800.123456),
            ("2026-11-22T04:00:00+02:00", 1_795_312_800.0),
            ("2026-11-22t02:00:00z", 1_795_312_800.0),
        ],
    )
    def test_kubernetes_time_is_parsed(self, text: str, time_s: float) -> None:
        assert read_time(text) == time_s

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "yesterday",
            "2026-11-22T02:00:00",
            "2026-13-01T00:00:00Z",
            "1795312800",
            "2026-11-22T02:00:00+0100",
            "2026-11-22T02:00:00+01",
            "2026-11-22T02:00Z",
            "2026-11-22 02:00:00Z",
            "20261122T020000Z",
            "2016-12-31T23:59:60Z",
            "0000-01-01T00:00:00Z",
            "2026-11-22T24:00:00Z",
            "٢٠٢٦-11-22T02:00:00Z",
        ],
    )
    def test_invalid_kubernetes_time_is_none(self, text: str) -> None:
        assert read_time(text) is None

    @pytest.mark.parametrize("text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
    def test_kubernetes_time_at_calendar_bounds_is_parsed(self, text: str) -> None:
        assert read_time(text) is not None


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, **({"values": list(values)} if values else {})}


LABELS = {"app": "vllm", "tier": "gold", "empty": ""}


class TestMatches:
    @pytest.mark.parametrize(
        ("selector", "selected"),
        [
            ({"matchLabels": {"app": "vllm"}}, True),
            ({"matchLabels": {"app": "vllm", "tier": "gold"}}, True),
            ({"matchLabels": {"app": "vllm", "tier": "lead"}}, False),
            ({"matchLabels": {"zone": "a"}}, False),
            ({"matchLabels": {"empty": ""}}, True),
            ({"matchLabels": {"zone": ""}}, False),
            ({"matchExpressions": [expression("app", "In", "sglang", "vllm")]}, True),
            ({"matchExpressions": [expression("app", "In", "sglang")]}, False),
            ({"matchExpressions": [expression("zone", "In", "a")]}, False),
            ({"matchExpressions": [expression("app", "NotIn", "sglang")]}, True),
            ({"matchExpressions": [expression("app", "NotIn", "vllm")]}, False),
            ({"matchExpressions": [expression("zone", "NotIn", "a")]}, True),
            ({"matchExpressions": [expression("empty", "Exists")]}, True),
            ({"matchExpressions": [expression("zone", "Exists")]}, False),
            ({"matchExpressions": [expression("zone", "DoesNotExist")]}, True),
            ({"matchExpressions": [expression("app", "DoesNotExist")]}, False),
            ({"matchLabels": {"app": "vllm"}, "matchExpressions": [expression("tier", "NotIn", "gold")]}, False),
            ({"matchLabels": {"app": "sglang"}, "matchExpressions": [expression("tier", "Exists")]}, False),
            ({"matchExpressions": [expression("tier", "Exists"), expression("app", "DoesNotExist")]}, False),
            ({}, True),
        ],
    )
    def test_selector_matches_as_in_kubernetes(self, selector: dict[str, Any], selected: bool) -> None:
        assert matches(selector, LABELS) is selected

    @pytest.mark.parametrize(
        "unreadable",
        [
            [expression("app", "Near", "vllm")],
            [expression("zone", "notin", "a")],
            [{"operator": "DoesNotExist"}],
            [{"key": "zone", "operator": "NotIn", "values": "a"}],
            ["app"],
            {"app": "vllm"},
            7,
        ],
    )
    def test_invalid_selector_matches_no_pod(self, unreadable: object) -> None:
        assert not matches({"matchLabels": {"app": "vllm"}, "matchExpressions": unreadable}, LABELS)
