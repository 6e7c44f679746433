"""Tests of scale-down, cancelled scale-down and deletion: members drain before the StatefulSet shrinks."""

from dataclasses import replace

import pytest

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import Observed
from dualmap_operator.decide.plan import DRAIN_INTERVAL_S, plan
from dualmap_operator.names import EventReason
from scenario import (
    NOW_S,
    InconsistentScenarioError,
    adopted,
    member,
    pod,
    router,
    seen,
    selector_spec,
    size_asked,
    states,
    template_spec,
)

PODS = (pod(0), pod(1), pod(2))
ACTIVE = tuple(member(each) for each in PODS)
DRAINING = (*ACTIVE[:2], member(PODS[2], MemberState.DRAINING, age_s=20))


def draining(**changes: object) -> Observed:
    """Return observations of three pods with the last pod draining, and the routers' reports."""
    return seen(PODS, DRAINING, **changes)  # type: ignore[arg-type]  # as seen() takes them


class TestScaleDown:
    def test_scale_down_publishes_draining_pods_before_the_shrink(self) -> None:
        made = plan(template_spec(1), seen(PODS, ACTIVE, routers=[router()]), NOW_S)
        assert states(made) == {"qwen-0": "Active", "qwen-1": "Draining", "qwen-2": "Draining"}
        assert made.status.ring_version == 6
        assert size_asked(made) == 3
        assert {gate.pod: gate.in_ring for gate in made.gates} == {"qwen-1": False, "qwen-2": False}
        assert made.requeue_after_s <= DRAIN_INTERVAL_S

    def test_draining_pod_with_requests_in_flight_is_kept(self) -> None:
        looks = {"qwen-2": 0}
        made = plan(template_spec(2), draining(routers=[router(busy={"qwen-2": 1})], idle_checks=looks), NOW_S)
        assert size_asked(made) == 3

    def test_draining_pod_after_a_single_idle_check_is_kept(self) -> None:
        made = plan(template_spec(2), draining(routers=[router()], idle_checks={"qwen-2": 1}), NOW_S)
        assert size_asked(made) == 3

    def test_draining_pod_after_two_idle_checks_is_removed(self) -> None:
        made = plan(template_spec(2), draining(routers=[router()], idle_checks={"qwen-2": 2}), NOW_S)
        assert size_asked(made) == 2
        assert [event.reason for event in made.events if event.reason is EventReason.SCALED_DOWN]

    def test_draining_pods_are_all_kept_while_a_draining_pod_is_busy(self) -> None:
        members = (ACTIVE[0], *(member(each, MemberState.DRAINING, age_s=20) for each in PODS[1:]))
        looks = {"qwen-1": 0, "qwen-2": 9}
        made = plan(
            template_spec(1), seen(PODS, members, routers=[router(busy={"qwen-1": 1})], idle_checks=looks), NOW_S
        )
        assert size_asked(made) == 3

    def test_draining_pod_at_drain_timeout_is_removed_with_an_event(self) -> None:
        late = draining(routers=[router(busy={"qwen-2": 1})], idle_checks={"qwen-2": 0})
        made = plan(template_spec(2, drain_timeout_s=20), late, NOW_S)
        assert size_asked(made) == 2
        assert any(event.reason is EventReason.DRAIN_TIMED_OUT and event.warning for event in made.events)

    def test_draining_pods_become_active_if_desired_replicas_grow(self) -> None:
        made = plan(template_spec(3), draining(routers=[router(busy={"qwen-2": 1})]), NOW_S)
        assert states(made)["qwen-2"] == "Active"
        assert made.status.ring_version == 6
        assert size_asked(made) == 3
        assert EventReason.DRAIN_CANCELLED in {event.reason for event in made.events}

    def test_scaled_down_pod_that_never_served_is_removed_at_once(self) -> None:
        pods = (*PODS[:2], pod(2, serving=False, ready=False, in_ring=False, address=""))
        made = plan(template_spec(2), seen(pods, ACTIVE[:2], routers=[router()]), NOW_S)
        assert size_asked(made) == 2
        assert "qwen-2" not in states(made)

    def test_draining_pod_that_becomes_unready_finishes_its_streams(self) -> None:
        pods = (*PODS[:2], pod(2, serving=False, ready=False, in_ring=False))
        busy = seen(pods, DRAINING, routers=[router(busy={"qwen-2": 1})])
        made = plan(template_spec(2), busy, NOW_S)
        assert states(made)["qwen-2"] == "Draining"
        assert size_asked(made) == 3

    def test_draining_pod_with_a_restarted_sidecar_is_kept(self) -> None:
        pods = (*PODS[:2], pod(2, incarnation="uid-2-1"))
        made = plan(template_spec(2), seen(pods, DRAINING, routers=[router(busy={"qwen-2": 1})]), NOW_S)
        assert states(made)["qwen-2"] == "Draining"
        assert size_asked(made) == 3

    def test_pod_unready_at_scale_down_is_kept_until_idle(self) -> None:
        pods = (*PODS[:2], pod(2, serving=False, ready=False, in_ring=False))
        made = plan(template_spec(2), seen(pods, ACTIVE, routers=[router(busy={"qwen-2": 1})]), NOW_S)
        assert states(made)["qwen-2"] == "Draining"
        assert size_asked(made) == 3

    def test_scale_down_waits_until_a_remaining_pod_serves(self) -> None:
        pods = (pod(0, serving=False, ready=False, in_ring=False), *PODS[1:])
        observed = seen(pods, ACTIVE[1:], routers=[router()])
        made = plan(template_spec(1), observed, NOW_S)
        assert states(made) == {"qwen-1": "Active", "qwen-2": "Active"}
        assert size_asked(made) == 3
        limited = next(each for each in made.status.conditions if each.type == "ScalingLimited")
        assert (limited.status, limited.reason) == (True, "SurvivorsNotReady")
        back = seen((PODS[0], *pods[1:]), (ACTIVE[0], *ACTIVE[1:]), routers=[router()])
        assert states(plan(template_spec(1), back, NOW_S)) == {
            "qwen-0": "Active", "qwen-1": "Draining", "qwen-2": "Draining",
        }  # fmt: skip

    def test_scale_to_zero_drains_all_pods(self) -> None:
        made = plan(template_spec(0), seen(PODS, ACTIVE, routers=[router()]), NOW_S)
        assert set(states(made).values()) == {"Draining"}

    def test_deleted_statefulset_keeps_its_size_during_drain(self) -> None:
        made = plan(template_spec(2), draining(routers=[router(busy={"qwen-2": 1})], size=None), NOW_S)
        assert size_asked(made) == 3


class TestIdle:
    """Tests of the reports in one observation that count as idle."""

    @pytest.mark.parametrize(
        ("routers", "engine", "expected"),
        [
            ([router()], None, True),
            ([router()], 0, True),
            ([router()], 2, False),
            ([router(version=4)], 0, False),
            ([router(version=4, ready=False)], 0, False),
            ([router(state="Active")], 0, False),
            ([router(state="Draining")], 0, True),
            ([router(), router("b", busy={"qwen-2": 1})], 0, False),
            ([router(), router("b", busy={"qwen-2": 1}, ready=False)], 0, False),
            ([router(), router("b", answered=False)], None, False),
            ([router(), router("b", answered=False)], 0, True),
            ([router(), router("b", answered=False, ready=False)], None, True),
            ([router(version=0)], None, True),
            ([], 0, True),
            ([], None, False),
            ([], 1, False),
        ],
        ids=[
            "routers agree", "both agree", "engine busy", "ready router behind", "leaving router behind",
            "a router that would still send some", "a router that would not",
            "another busy", "a leaving router busy", "silent router, unknown engine", "silent router, idle engine",
            "silent, not ready", "router that serves no such pool", "engine alone", "nobody says anything",
            "engine alone, busy",
        ],
    )  # fmt: skip
    def test_idle_check_requires_evidence_of_routers_and_engine(
        self, routers: list, engine: int | None, expected: bool
    ) -> None:  # type: ignore[type-arg]
        from dualmap_operator.decide.drain import idle

        observed = seen(PODS, DRAINING, routers=routers, engines={"qwen-2": engine})
        assert idle(DRAINING[2], observed) is expected


class TestDeletion:
    def test_pool_deletion_drains_every_member_and_keeps_child_objects(self) -> None:
        made = plan(template_spec(3, deleting=True), seen(PODS, ACTIVE, routers=[router()]), NOW_S)
        assert set(states(made).values()) == {"Draining"}
        assert made.children == ()
        assert not made.finished

    def test_pool_deletion_finishes_after_all_members_drained(self) -> None:
        members = tuple(member(each, MemberState.DRAINING, age_s=5) for each in PODS)
        looks = {each.name: 2 for each in PODS}
        made = plan(template_spec(3, deleting=True), seen(PODS, members, routers=[router()], idle_checks=looks), NOW_S)
        assert made.finished
        busy = seen(PODS, members, routers=[router(busy={"qwen-0": 1})], idle_checks={**looks, "qwen-0": 0})
        assert not plan(template_spec(3, deleting=True), busy, NOW_S).finished

    def test_pool_deletion_finishes_at_the_drain_timeout_at_latest(self) -> None:
        members = tuple(member(each, MemberState.DRAINING, age_s=700) for each in PODS)
        busy = seen(PODS, members, routers=[router(busy={"qwen-0": 1})])
        assert plan(template_spec(3, deleting=True), busy, NOW_S).finished

    def test_deletion_of_empty_pool_finishes_at_once(self) -> None:
        assert plan(template_spec(3, deleting=True), seen((), size=None), NOW_S).finished


class TestAdoptedPods:
    def test_terminating_adopted_pods_drain_until_removed(self) -> None:
        pods = (adopted("a"), adopted("b", 1, terminating=True))
        members = tuple(member(replace(each, terminating=False)) for each in pods)
        made = plan(selector_spec(), seen(pods, members, size=None), NOW_S)
        assert states(made) == {"a": "Active", "b": "Draining"}
        assert made.children == ()
        gone = plan(selector_spec(), seen(pods[:1], made.status.members, size=None, version=6), NOW_S)
        assert states(gone) == {"a": "Active"}
        assert gone.status.ring_version == 7

    def test_adopted_pods_are_not_scaled(self) -> None:
        pods = tuple(adopted(name, number) for number, name in enumerate("abc"))
        made = plan(selector_spec(), seen(pods, [member(each) for each in pods], size=None), NOW_S)
        assert set(states(made).values()) == {"Active"}


def test_impossible_test_scenario_is_rejected() -> None:
    with pytest.raises(InconsistentScenarioError, match="readiness gate"):
        seen([pod(0, in_ring=False)])
    with pytest.raises(InconsistentScenarioError, match="ahead of the published ring"):
        seen([pod(0)], routers=[router(version=6)])
