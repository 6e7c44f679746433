import copy
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.objects.pods import IN_RING_GATE, LEAVE_AT, pod_facts

NO_POD_ADDRESSES = (
    *("127.0.0.1", "127.8.9.10", "::1", "169.254.169.254", "fe80::1", "224.0.0.1", "ff02::1", "0.0.0.0", "::"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254"),
    *("255.255.255.255", "240.0.0.1", "0.0.0.1", "fe80::1%eth0", "fd00::1%eth0"),
    *("::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::1"),
    *("::ffff:0:127.0.0.1", "64:ff9b::6464:64c8"),
    # The metadata services of clouds.
    *("fd00:ec2::254", "fd00:ec2::254%eth0", "fd00:ec2::23", "fd20:ce::254"),
    *("100.100.100.200", "::ffff:100.100.100.200", "192.0.0.192", "168.63.129.16"),
)
POD_ADDRESSES = (
    *("10.244.0.7", "172.16.0.1", "192.168.1.1", "100.64.0.1", "100.100.100.201", "8.8.8.8", "168.63.129.17"),
    *("fd00:ec2::255", "fd12:3456::1", "2600:1f14::1", "::ffff:10.244.0.7", "64:ff9b::a00:1"),
)
UID = "6d1a57ee-6b0e-4dc4-9c9d-0a8d34a1f5c2"


def condition(kind: str, status: str = "True", second: int = 0, **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, "lastTransitionTime": f"2026-11-22T02:00:{second:02}Z", **more}


def pod(*conditions: dict[str, str], gates: tuple[str, ...] = (IN_RING_GATE,), **status: object) -> dict[str, Any]:
    return {
        "metadata": {"name": "qwen-0", "namespace": "llm", "uid": UID},
        "spec": {"readinessGates": [{"conditionType": gate} for gate in gates]},
        "status": {"phase": "Running", "podIP": "10.244.0.7", "conditions": list(conditions), **status},
    }


def running(*, gate: str = "True", ready: str = "True") -> dict[str, Any]:
    return pod(condition("ContainersReady", second=3), condition(IN_RING_GATE, gate, 5), condition("Ready", ready, 3))


class TestServing:
    def test_serving_depends_on_containers_not_on_dualmap_gate(self) -> None:
        facts = pod_facts(running(gate="False", ready="False"))
        assert (facts.serving, facts.ready, facts.in_ring) == (True, False, False)
        assert facts.serving_since == "2026-11-22T02:00:03Z"

    def test_pod_in_the_ring_is_serving_and_ready(self) -> None:
        facts = pod_facts(running())
        assert (facts.serving, facts.ready, facts.in_ring) == (True, True, True)

    @pytest.mark.parametrize("status", ["False", "Unknown", None])
    def test_pod_with_unready_containers_is_not_serving(self, status: str | None) -> None:
        conditions = [] if status is None else [condition("ContainersReady", status)]
        assert not pod_facts(pod(*conditions)).serving

    @pytest.mark.parametrize(("status", "serves"), [("True", True), ("False", False), (None, False)])
    def test_pod_is_serving_only_if_other_readiness_gates_are_true(self, status: str | None, serves: bool) -> None:
        others = [] if status is None else [condition("example.com/warm", status, 9)]
        facts = pod_facts(
            pod(condition("ContainersReady", second=3), *others, gates=(IN_RING_GATE, "example.com/warm"))
        )
        assert facts.serving is serves
        if serves:
            assert facts.serving_since == "2026-11-22T02:00:09Z"

    @pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
    def test_ended_pod_is_not_serving(self, phase: str) -> None:
        body = running()
        body["status"]["phase"] = phase
        facts = pod_facts(body)
        assert (facts.serving, facts.ready) == (False, False)

    def test_terminating_pod_is_still_serving(self) -> None:
        body = running()
        body["metadata"]["deletionTimestamp"] = "2026-11-22T03:00:00Z"
        facts = pod_facts(body)
        assert (facts.serving, facts.terminating) == (True, True)
        assert not pod_facts(running()).terminating

    def test_pod_without_dualmap_gate_has_unknown_ring_membership(self) -> None:
        facts = pod_facts(pod(condition("ContainersReady"), condition("Ready"), gates=()))
        assert (facts.serving, facts.ready, facts.in_ring) == (True, True, None)

    def test_pod_with_unset_dualmap_gate_is_not_in_the_ring(self) -> None:
        assert pod_facts(pod(condition("ContainersReady"))).in_ring is False


class TestNodeLost:
    def unready(self, ready_s: int, *, gate: str = "True", **more: str) -> dict[str, Any]:
        """The pod is not ready in Kubernetes, but its containers are ready since second 3."""
        return pod(
            condition("ContainersReady", second=3),
            condition(IN_RING_GATE, gate, 50),
            condition("Ready", "False", ready_s, **more),
        )

    @pytest.mark.parametrize("gate", ["True", "False"])
    def test_pod_is_not_serving_if_node_controller_clears_ready(self, gate: str) -> None:
        """The closed readiness gate of a lost pod must not make the pod count as serving."""
        assert not pod_facts(self.unready(45, gate=gate)).serving

    @pytest.mark.parametrize("gate", ["True", "False"])
    def test_pod_unready_only_for_the_dualmap_gate_is_serving(self, gate: str) -> None:
        assert pod_facts(self.unready(45, gate=gate, reason="ReadinessGatesNotReady")).serving

    @pytest.mark.parametrize("ready_s", [1, 3])
    def test_pod_unready_without_reason_is_serving(self, ready_s: int) -> None:
        assert pod_facts(self.unready(ready_s)).serving

    @pytest.mark.parametrize("ready_s", [50, 51])
    def test_pod_unready_after_gate_became_false_is_serving(self, ready_s: int) -> None:
        """The closed readiness gate explains Ready false without a reason from the kubelet, so a draining member can
        become Active again.
        """
        assert pod_facts(self.unready(ready_s, gate="False")).serving

    def test_pod_unready_without_dualmap_gate_is_not_serving(self) -> None:
        body = pod(condition("ContainersReady", second=3), condition("Ready", "False", 45), gates=())
        assert not pod_facts(body).serving


class TestIdentity:
    def test_pod_name_namespace_and_uid_are_parsed(self) -> None:
        facts = pod_facts(running())
        assert (facts.name, facts.namespace, facts.uid) == ("qwen-0", "llm", UID)

    def test_incarnation_changes_with_each_container_restart(self) -> None:
        containers = [{"name": "engine", "restartCount": 2}, {"name": "sidecar", "restartCount": 1}]
        assert pod_facts(pod(containerStatuses=containers)).incarnation == "6d1a57ee-3"
        assert pod_facts(pod()).incarnation == "6d1a57ee-0"

    @pytest.mark.parametrize("count", [-1, "2", 1.5, None, 2**31])
    def test_incarnation_ignores_invalid_restart_counts(self, count: object) -> None:
        assert pod_facts(pod(containerStatuses=[{"restartCount": count}])).incarnation == "6d1a57ee-0"

    def test_incarnation_without_uid_is_none(self) -> None:
        assert pod_facts({}).incarnation == ""

    @pytest.mark.parametrize(
        ("written", "read"),
        [("10.244.0.7", "10.244.0.7"), ("FD00::1", "fd00::1"), ("", ""), ("engine.llm", ""), (None, ""), (7, "")],
    )
    def test_pod_ip_is_parsed(self, written: object, read: str) -> None:
        assert pod_facts(pod(podIP=written)).address == read

    @pytest.mark.parametrize("address", NO_POD_ADDRESSES)
    def test_pod_address_that_no_pod_may_have_is_absent(self, address: str) -> None:
        assert pod_facts(pod(podIP=address)).address == ""

    @pytest.mark.parametrize("address", POD_ADDRESSES)
    def test_pod_address_near_a_refused_one_is_read(self, address: str) -> None:
        assert pod_facts(pod(podIP=address)).address == str(ip_address(address))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def every_path(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in every_path(each, (*path, key)))]


FULL = running()
FULL["status"]["containerStatuses"] = [{"name": "engine", "restartCount": 2}]
FULL["metadata"]["deletionTimestamp"] = "2026-11-22T03:00:00Z"


@given(path=st.sampled_from(every_path(FULL)[1:]), value=JSON)
def test_pod_of_any_form_is_parsed(path: tuple[str | int, ...], value: object) -> None:
    body: Any = copy.deepcopy(FULL)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    pod_facts(body)


class TestNotice:
    def test_pod_without_notice_has_no_leaving_time(self) -> None:
        facts = pod_facts(running())
        assert (facts.leave_at_s, facts.killed_at_s, facts.grace_s) == (None, None, 0.0)

    @pytest.mark.parametrize(
        ("grace", "grace_s"), [(45, 45), (0, 0), (None, 30), (-1, 30), ("45", 30), (2**40, 30), (True, 30)]
    )
    def test_disruption_target_leaves_after_the_grace_period(self, grace: object, grace_s: float) -> None:
        body = pod(condition("ContainersReady"), condition("DisruptionTarget", second=10))
        body["spec"]["terminationGracePeriodSeconds"] = grace
        began_s = datetime(2026, 11, 22, 2, 0, 10, tzinfo=UTC).timestamp()
        assert pod_facts(body).leave_at_s == began_s + grace_s

    def test_disruption_target_without_a_time_has_passed(self) -> None:
        body = pod({"type": "DisruptionTarget", "status": "True"})
        assert pod_facts(body).leave_at_s == 30

    @pytest.mark.parametrize("status", ["False", "Unknown"])
    def test_withdrawn_disruption_target_is_no_notice(self, status: str) -> None:
        assert pod_facts(pod(condition("DisruptionTarget", status))).leave_at_s is None

    def test_earlier_of_annotation_and_condition_counts(self) -> None:
        body = pod(condition("DisruptionTarget"))
        body["metadata"]["annotations"] = {LEAVE_AT: "2026-11-22T02:00:05Z"}
        assert pod_facts(body).leave_at_s == datetime(2026, 11, 22, 2, 0, 5, tzinfo=UTC).timestamp()
