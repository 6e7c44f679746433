"""Reading the objects of the Gateway API Inference Extension: pools of both versions, pods as members, objectives."""

from typing import Any

import pytest

from dualmap.errors import PoolError
from dualmap.objects.gaie import (
    ACTIVE_PORTS,
    DECODE_ROLES,
    PORTS_MAX,
    PREFILL_ROLES,
    ROLE,
    GaiePod,
    GaiePool,
    gaie_members,
    gaie_pod,
    read_gaie_pool,
    read_objectives,
)
from dualmap.objects.pods import LEAVE_AT
from dualmap.objects.pool_reader import PoolSettings, read_settings
from dualmap.objects.times import read_time
from dualmap.pools.pool import Engine, Member, MemberState
from kube_api import pod_body

ONE_PORT = GaiePool(selector="app=vllm", ports=(8000,))
TWO_PORTS = GaiePool(selector="app=vllm", ports=(8000, 8001))


def pool_v1(**spec: Any) -> dict[str, Any]:
    given = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}], **spec}
    return {"spec": {key: value for key, value in given.items() if value is not None}}


def pod(name: str, *, ports: str = "", role: str = "", **fields: Any) -> GaiePod:
    body = pod_body(name, **fields)
    if role:
        body["metadata"]["labels"][ROLE] = role
    if ports:
        body["metadata"]["annotations"] = {"inference.networking.k8s.io/active-ports": ports}
    return gaie_pod(body)


def objective(name: str, pool: str = "qwen", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"poolRef": {"name": pool}, **spec}}


class TestPool:
    def test_pool_v1_has_labels_and_all_ports(self) -> None:
        labels = {"matchLabels": {"b/c.d": "", "a": "x"}}
        body = pool_v1(selector=labels, targetPorts=[{"number": 8000}, {"number": 8001}])
        assert read_gaie_pool(body) == GaiePool(selector="a=x,b/c.d=", ports=(8000, 8001))

    def test_pool_v1alpha2_has_labels_and_one_port(self) -> None:
        body = {"spec": {"selector": {"app": "vllm"}, "targetPortNumber": 9000}}
        assert read_gaie_pool(body) == GaiePool(selector="app=vllm", ports=(9000,))

    @pytest.mark.parametrize(
        ("spec", "field"),
        [
            ({"selector": None}, "spec.selector.matchLabels"),
            ({"selector": {"matchLabels": {}}}, "spec.selector.matchLabels"),
            ({"selector": {"matchLabels": {"app": "a,b"}}}, "spec.selector.matchLabels.app"),
            ({"selector": {"matchLabels": {"a=b": "c"}}}, "spec.selector.matchLabels"),
            ({"targetPorts": []}, "spec.targetPorts"),
            ({"targetPorts": [{"number": n} for n in range(1, 10)]}, "spec.targetPorts"),
            ({"targetPorts": [{"number": "http"}]}, "spec.targetPorts[0].number"),
            ({"targetPorts": [{"number": 0}]}, "spec.targetPorts[0].number"),
        ],
    )
    def test_pool_with_an_invalid_field_is_refused(self, spec: dict[str, Any], field: str) -> None:
        with pytest.raises(PoolError) as refused:
            read_gaie_pool(pool_v1(**spec))
        assert refused.value.field == field

    def test_pool_with_more_ports_than_the_limit_is_refused(self) -> None:
        ports = [{"number": 8000 + rank} for rank in range(PORTS_MAX + 1)]
        assert len(read_gaie_pool(pool_v1(targetPorts=ports[:PORTS_MAX])).ports) == PORTS_MAX
        with pytest.raises(PoolError, match="1 to 8 ports"):
            read_gaie_pool(pool_v1(targetPorts=ports))


class TestMembers:
    def members(self, pool: GaiePool, *pods: GaiePod, before: tuple[Member, ...] = ()) -> dict[str, tuple[str, str]]:
        return {each.id: (each.endpoint, each.state.value) for each in gaie_members(pool, pods, before)}

    def test_ready_pods_are_members(self) -> None:
        pods = pod("m-1"), pod("m-0"), pod("m-2", ready=False), pod("m-3", terminating=True), pod("m-4", address="")
        assert self.members(ONE_PORT, *pods) == {
            "m-0": ("10.244.0.1:8000", "Active"),
            "m-1": ("10.244.0.2:8000", "Active"),
        }

    def test_each_target_port_is_a_member(self) -> None:
        assert self.members(TWO_PORTS, pod("m-0")) == {
            "m-0:8000": ("10.244.0.1:8000", "Active"),
            "m-0:8001": ("10.244.0.1:8001", "Active"),
        }

    def test_active_ports_of_a_pod_limit_its_members(self) -> None:
        assert list(self.members(TWO_PORTS, pod("m-0", ports="8001, 9999"))) == ["m-0:8001"]

    def test_llm_ds_annotation_of_active_ports_has_precedence(self) -> None:
        body = pod_body("m-0")
        body["metadata"]["annotations"] = {ACTIVE_PORTS[1]: "8000", ACTIVE_PORTS[0]: "8001"}
        assert list(self.members(TWO_PORTS, gaie_pod(body))) == ["m-0:8001"]

    def test_role_of_a_pod_says_of_which_members_it_is_one(self) -> None:
        roles = ("", "decode", "prefill", "both", "prefill-decode", "encode-prefill-decode", "encode-prefill", "encode")
        pods = [pod(f"m-{number}", role=role) for number, role in enumerate(roles)]
        decoding = [each.id for each in gaie_members(ONE_PORT, pods, (), DECODE_ROLES)]
        assert decoding == ["m-0", "m-1", "m-3", "m-4", "m-5"]
        assert [each.id for each in gaie_members(ONE_PORT, pods, (), PREFILL_ROLES)] == ["m-2", "m-6"]
        assert len(gaie_members(ONE_PORT, pods, ())) == len(roles)

    def test_member_that_gets_another_role_drains(self) -> None:
        before = gaie_members(ONE_PORT, [pod("m-0", role="decode")], (), DECODE_ROLES)
        (member,) = gaie_members(ONE_PORT, [pod("m-0", role="prefill")], before, DECODE_ROLES)
        assert member.state is MemberState.DRAINING

    @pytest.mark.parametrize("ports", ["8001,", "eight", "0", "8001,70000", "8001;8000"])
    def test_invalid_active_ports_are_named(self, ports: str) -> None:
        (fault,) = pod("m-0", ports=ports).faults
        assert fault.startswith(f"metadata.annotations[{ACTIVE_PORTS[1]}]: {ports!r} is not accepted; give numbers of")

    @pytest.mark.parametrize("address", ["10.244.0.300", "127.0.0.1"])
    def test_address_that_no_pod_may_have_is_named(self, address: str) -> None:
        (fault,) = pod("m-0", address=address).faults
        assert fault == f"status.podIP: {address!r} is not accepted; give an IP address that a pod may have"

    def test_pod_without_address_or_annotation_has_no_fault(self) -> None:
        assert pod("m-0", address="").faults == pod("m-1").faults == pod("m-2", ports="8000, 8001").faults == ()

    def test_member_that_becomes_unready_drains_with_its_address(self) -> None:
        before = gaie_members(ONE_PORT, [pod("m-0"), pod("m-1")], ())
        after = self.members(ONE_PORT, pod("m-0", ready=False), pod("m-1", terminating=True), before=before)
        assert after == {"m-0": ("10.244.0.1:8000", "Draining"), "m-1": ("10.244.0.2:8000", "Draining")}

    @pytest.mark.parametrize(
        ("leave_at", "state", "leave_at_s", "faults"),
        [("2026-11-27T21:00:00Z", "Draining", read_time("2026-11-27T21:00:00Z"), 0), ("soon", "Active", None, 1)],
    )
    def test_pod_with_notice_is_a_draining_member(
        self, leave_at: str, state: str, leave_at_s: float | None, faults: int
    ) -> None:
        body = pod_body("vllm-0")
        body["metadata"]["annotations"] = {LEAVE_AT: leave_at}
        noticed = gaie_pod(body)
        (member,) = gaie_members(ONE_PORT, [noticed], ())
        assert (member.state.value, member.leave_at_s, len(noticed.faults)) == (state, leave_at_s, faults)

    def test_member_that_has_ended_leaves(self) -> None:
        before = gaie_members(ONE_PORT, [pod("m-0")], ())
        assert self.members(ONE_PORT, before=before) == {}

    def test_address_of_two_pods_belongs_to_the_ready_one(self) -> None:
        before = gaie_members(ONE_PORT, [pod("a-0")], ())
        pods = pod("a-0", terminating=True), pod("b-0")
        assert self.members(ONE_PORT, *pods, before=before) == {"b-0": ("10.244.0.1:8000", "Active")}

    def test_restart_of_a_pod_changes_the_incarnation(self) -> None:
        (first,) = gaie_members(ONE_PORT, [pod("m-0")], ())
        (second,) = gaie_members(ONE_PORT, [pod("m-0", restarts=1)], (first,))
        assert first.incarnation != second.incarnation
        assert second.state is MemberState.ACTIVE


class TestObjectives:
    def test_objectives_of_the_pool_have_their_priorities(self) -> None:
        found = read_objectives(
            [
                objective("b", priority=5),
                objective("a", priority=-5),
                objective("c"),
                objective("d", "other", priority=9),
            ],
            "qwen",
        )
        assert found.priorities == (("a", -5), ("b", 5), ("c", 0))
        assert (found.priority_of("a"), found.priority_of("d")) == (-5, 0)

    @pytest.mark.parametrize("body", [{}, {"metadata": {"name": "a"}}, objective("a", priority="high")])
    def test_objective_with_an_invalid_field_is_left_out(self, body: dict[str, Any]) -> None:
        assert read_objectives([body], "qwen").priorities == ()


class TestSettings:
    def test_settings_are_read_from_a_pool_or_its_spec(self) -> None:
        spec = {"engine": {"type": "SGLang"}, "routing": {"policy": "round_robin"}, "slo": {"ttft": "2s"}}
        alone = read_settings({"spec": spec})
        assert (alone.engine.type, alone.routing.policy, alone.slo.ttft_s) == ("SGLang", "round_robin", 2.0)
        whole = {"apiVersion": "serving.dualmap.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "a"}}
        assert read_settings({**whole, "spec": {"model": {"name": "m"}, "replicas": 3, **spec}}) == alone

    def test_settings_left_out_have_their_defaults(self) -> None:
        assert read_settings({"spec": {}}) == PoolSettings(engine=Engine())

    @pytest.mark.parametrize(
        ("document", "field"),
        [
            ([], "document"),
            ({"routing": {}}, "spec"),
            ({"spec": {"rooting": {}}}, "spec.rooting"),
            ({"spec": {"routing": {"policy": "best"}}}, "spec.routing.policy"),
            ({"apiVersion": "inference.networking.k8s.io/v1", "spec": {}}, "apiVersion"),
        ],
    )
    def test_settings_that_are_invalid_are_refused(self, document: object, field: str) -> None:
        with pytest.raises(PoolError) as refused:
            read_settings(document)
        assert refused.value.field == field
