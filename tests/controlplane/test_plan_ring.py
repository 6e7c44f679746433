"""Tests of ring membership: gradual joins, immediate removal, returns with an empty cache, and damping of flaps."""

from dataclasses import replace

import pytest

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.plan import plan
from dualmap_operator.decide.ring import RAMP_S
from dualmap_operator.names import EventReason
from scenario import NOW_S, member, pod, router, seen, starting, states, template_spec

PODS = (pod(0), pod(1), pod(2))
ACTIVE = tuple(member(each) for each in PODS)


def test_ring_with_unchanged_members_keeps_its_version() -> None:
    made = plan(template_spec(), seen(PODS, ACTIVE, routers=[router()]), NOW_S)
    assert made.status.ring_version == 5
    assert made.status.members == ACTIVE
    assert (made.gates, made.restarts) == ((), ())


def test_first_ring_members_are_active_at_once() -> None:
    fresh = tuple(pod(n, ready=False, in_ring=False, serving_since_s=NOW_S) for n in range(2))
    made = plan(template_spec(2), seen(fresh, version=0, size=2), NOW_S)
    assert states(made) == {"qwen-0": "Active", "qwen-1": "Active"}
    assert {gate.pod: gate.in_ring for gate in made.gates} == {"qwen-0": True, "qwen-1": True}


@pytest.mark.parametrize(
    ("age_s", "state", "weight"),
    [(0, "Joining", 25), (9, "Joining", 25), (10, "Joining", 50), (20, "Joining", 75), (RAMP_S, "Active", 100)],
)
def test_ring_weight_of_a_cold_member_grows_gradually(age_s: float, state: str, weight: int) -> None:
    joining = replace(member(PODS[2], MemberState.JOINING, age_s=age_s), weight=25)
    made = plan(template_spec(), seen(PODS, (*ACTIVE[:2], joining)), NOW_S)
    (after,) = (each for each in made.status.members if each.id == "qwen-2")
    assert (after.state.value, after.weight) == (state, weight)
    assert made.status.ring_version == (6 if state == "Active" else 5), "weight alone is no new version"
    assert made.requeue_after_s <= 10


def test_joining_pod_starts_with_a_low_ring_weight() -> None:
    made = plan(template_spec(), seen((*PODS[:2], pod(2, ready=False, in_ring=False)), ACTIVE[:2]), NOW_S)
    (joined,) = (each for each in made.status.members if each.id == "qwen-2")
    assert (joined.state, joined.weight) == (MemberState.JOINING, 25)
    assert made.status.in_ring == 2


def test_unready_pod_leaves_the_ring_at_once() -> None:
    made = plan(template_spec(), seen((*PODS[:2], starting(2)), ACTIVE), NOW_S)
    assert "qwen-2" not in states(made)
    assert made.status.ring_version == 6
    assert EventReason.MEMBER_LEFT in {event.reason for event in made.events}


def test_restarted_pod_keeps_its_id_and_rejoins_the_ring() -> None:
    again = pod(2, incarnation="uid-2-1")
    made = plan(template_spec(), seen((*PODS[:2], again), ACTIVE), NOW_S)
    (joined,) = (each for each in made.status.members if each.id == "qwen-2")
    assert (joined.state, joined.incarnation) == (MemberState.JOINING, "uid-2-1")
    assert made.status.ring_version == 6


def test_pod_with_a_new_address_rejoins_the_ring() -> None:
    made = plan(template_spec(), seen((*PODS[:2], pod(2, address="10.9.9.9")), ACTIVE), NOW_S)
    (joined,) = (each for each in made.status.members if each.id == "qwen-2")
    assert (joined.state, joined.address) == (MemberState.JOINING, "10.9.9.9")


@pytest.mark.parametrize(
    ("flaps", "serving_s", "joins"),
    [(0, 0, True), (1, 4, False), (1, 5, True), (2, 9, False), (2, 10, True), (9, 29, False), (9, 30, True)],
)
def test_flapping_pod_waits_longer_to_rejoin_the_ring(flaps: int, serving_s: float, joins: bool) -> None:
    back = pod(2, ready=False, in_ring=False, flaps=flaps, serving_since_s=NOW_S - serving_s)
    made = plan(template_spec(), seen((*PODS[:2], back), ACTIVE[:2]), NOW_S)
    assert ("qwen-2" in states(made)) is joins
    if not joins:
        assert 0 < made.requeue_after_s <= 1, "nothing else would wake the pool when it has settled"


def test_terminating_pod_drains_and_does_not_rejoin_the_ring() -> None:
    going = pod(1, terminating=True)
    made = plan(template_spec(), seen((PODS[0], going, PODS[2]), ACTIVE), NOW_S)
    assert states(made)["qwen-1"] == "Draining"
    again = plan(template_spec(), seen((PODS[0], going, PODS[2]), made.status.members, version=6), NOW_S)
    assert states(again)["qwen-1"] == "Draining"
    dead = replace(going, serving=False, ready=False, in_ring=False)
    assert "qwen-1" not in states(
        plan(template_spec(), seen((PODS[0], dead, PODS[2]), again.status.members, version=6), NOW_S)
    )


def test_ring_lists_only_the_serving_pod_of_a_shared_address() -> None:
    old = pod(1, terminating=True)
    reused = pod(2, address=old.address)
    made = plan(template_spec(), seen((PODS[0], old, reused), (ACTIVE[0], member(old), member(PODS[2]))), NOW_S)
    assert [each.id for each in made.status.members if each.address == old.address] == ["qwen-2"]


def test_pool_without_ready_pods_is_degraded_and_recovers() -> None:
    down = tuple(starting(n) for n in range(3))
    made = plan(template_spec(), seen(down, ACTIVE), NOW_S)
    conditions = {each.type: each for each in made.status.conditions}
    assert made.status.members == ()
    assert (conditions["Available"].status, conditions["Degraded"].status) == (False, True)
    assert conditions["Degraded"].reason == "NoReadyMember"
    back = tuple(replace(each, serving=True, serving_since_s=NOW_S) for each in down)
    observed = replace(seen(back, version=6), published=made.status)
    assert set(states(plan(template_spec(), observed, NOW_S)).values()) == {"Active"}
