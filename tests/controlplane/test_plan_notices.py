"""Tests of pods with notice: their members are Draining with the time at which they must stop."""

from dataclasses import replace

import pytest

from dualmap.objects.times import time_text
from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import RingMember
from dualmap_operator.decide.plan import plan
from dualmap_operator.decide.plan_values import Plan
from dualmap_operator.names import ConditionType, EventReason
from scenario import NOW_S, member, pod, seen, starting, states, template_spec

PODS = (pod(0), pod(1), pod(2))
ACTIVE = tuple(member(each) for each in PODS)
SOON_S = NOW_S + 120


def of_qwen_2(made: Plan) -> RingMember:
    (found,) = (each for each in made.status.members if each.id == "qwen-2")
    return found


def condition(made: Plan, type_: str) -> tuple[bool | None, str, str]:
    (found,) = (each for each in made.status.conditions if each.type == type_)
    return found.status, found.reason, found.message


def test_pod_with_notice_drains_at_once_until_its_time() -> None:
    noticed = replace(PODS[2], leave_at_s=SOON_S)
    made = plan(template_spec(), seen((*PODS[:2], noticed), ACTIVE), NOW_S)
    assert states(made) == {"qwen-0": "Active", "qwen-1": "Active", "qwen-2": "Draining"}
    assert (of_qwen_2(made).leave_at_s, of_qwen_2(made).weight) == (SOON_S, 100)
    assert made.status.ring_version == 6
    assert condition(made, ConditionType.DRAINING) == (
        True,
        "NoticeGiven",
        f"These pods must stop: qwen-2 at {time_text(SOON_S)}.",
    )
    (event,) = (each for each in made.events if each.reason == EventReason.MEMBER_DRAINING)
    assert time_text(SOON_S) in event.message


def test_pod_with_unchanged_notice_causes_no_write() -> None:
    noticed = replace(PODS[2], leave_at_s=SOON_S + 0.5)
    first = plan(template_spec(), seen((*PODS[:2], noticed), ACTIVE), NOW_S)
    again = plan(template_spec(), seen((*PODS[:2], noticed), first.status.members, version=6), NOW_S + 60)
    assert again.status.members == first.status.members
    assert again.status.ring_version == 6
    assert not [each for each in again.events if each.reason == EventReason.MEMBER_DRAINING]


def test_changed_notice_raises_the_ring_version() -> None:
    draining = replace(member(PODS[2], MemberState.DRAINING), leave_at_s=SOON_S)
    noticed = replace(PODS[2], leave_at_s=SOON_S - 60)
    made = plan(template_spec(), seen((*PODS[:2], noticed), (*ACTIVE[:2], draining)), NOW_S)
    assert of_qwen_2(made).leave_at_s == SOON_S - 60
    assert of_qwen_2(made).since_s == draining.since_s
    assert made.status.ring_version == 6


def test_withdrawn_notice_takes_the_member_back() -> None:
    draining = replace(member(PODS[2], MemberState.DRAINING), leave_at_s=SOON_S)
    made = plan(template_spec(), seen(PODS, (*ACTIVE[:2], draining)), NOW_S)
    assert (of_qwen_2(made).state, of_qwen_2(made).leave_at_s) == (MemberState.ACTIVE, None)


@pytest.mark.parametrize(
    ("grace_s", "leave_at_s", "weight"),
    [(30, NOW_S + 30, 0), (599, NOW_S + 599, 0), (600, None, 100), (640, None, 100)],
)
def test_only_a_short_grace_period_is_a_notice(grace_s: float, leave_at_s: float | None, weight: int) -> None:
    ending = replace(PODS[2], terminating=True, killed_at_s=NOW_S + grace_s, grace_s=grace_s)
    made = plan(template_spec(), seen((*PODS[:2], ending), ACTIVE), NOW_S)
    assert of_qwen_2(made).state is MemberState.DRAINING
    assert (of_qwen_2(made).leave_at_s, of_qwen_2(made).weight) == (leave_at_s, weight)


def test_earliest_of_several_notices_counts() -> None:
    ending = replace(PODS[2], terminating=True, killed_at_s=NOW_S + 30, grace_s=30, leave_at_s=NOW_S + 20)
    made = plan(template_spec(), seen((*PODS[:2], ending), ACTIVE), NOW_S)
    assert of_qwen_2(made).leave_at_s == NOW_S + 20


@pytest.mark.parametrize("leave_at_s", [0.0, NOW_S - 3600, NOW_S + 10, 2.5e11])
def test_notice_for_all_pods_keeps_the_pool_available(leave_at_s: float) -> None:
    pods = tuple(replace(each, leave_at_s=leave_at_s) for each in PODS)
    made = plan(template_spec(), seen(pods, ACTIVE), NOW_S)
    assert set(states(made).values()) == {"Draining"}
    assert condition(made, ConditionType.AVAILABLE)[0] is True
    assert condition(made, ConditionType.DEGRADED)[0] is False


def test_new_pod_with_notice_joins_as_draining() -> None:
    fresh = tuple(pod(n, ready=False, in_ring=False, leave_at_s=SOON_S) for n in range(2))
    made = plan(template_spec(2), seen(fresh, version=0, size=2), NOW_S)
    assert states(made) == {"qwen-0": "Draining", "qwen-1": "Draining"}
    assert condition(made, ConditionType.AVAILABLE)[0] is True


def test_pod_with_notice_that_stops_serving_leaves() -> None:
    draining = replace(member(PODS[2], MemberState.DRAINING), leave_at_s=SOON_S)
    stopped = starting(2, leave_at_s=SOON_S)
    made = plan(template_spec(), seen((*PODS[:2], stopped), (*ACTIVE[:2], draining)), NOW_S)
    assert "qwen-2" not in states(made)


def test_unreadable_notice_is_ignored_with_a_warning() -> None:
    odd = replace(PODS[2], invalid_leave_at="soon")
    made = plan(template_spec(), seen((*PODS[:2], odd), ACTIVE), NOW_S)
    assert of_qwen_2(made).state is MemberState.ACTIVE
    status, reason, message = condition(made, ConditionType.ACCEPTED)
    assert (status, reason) == (True, "AcceptedWithWarnings")
    assert "Pod qwen-2: annotation serving.dualmap.dev/leave-at is 'soon'" in message
