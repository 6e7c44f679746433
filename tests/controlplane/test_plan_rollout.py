"""Tests of the rollout of a changed template: one pod at a time, until a pod cannot start."""

from dataclasses import replace

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import ObservedStatefulSet
from dualmap_operator.decide.plan import plan
from scenario import NOW_S, REVISION, member, pod, router, seen, starting, states, template_spec

NEW = "qwen-2"
PODS = (pod(0), pod(1), pod(2))
ACTIVE = tuple(member(each) for each in PODS)


def test_rollout_drains_only_the_highest_outdated_pod_first() -> None:
    made = plan(template_spec(), seen(PODS, ACTIVE, routers=[router()], revision=NEW), NOW_S)
    assert states(made) == {"qwen-0": "Active", "qwen-1": "Active", "qwen-2": "Draining"}
    assert made.restarts == ()


def test_rollout_deletes_the_drained_pod() -> None:
    members = (*ACTIVE[:2], member(PODS[2], MemberState.DRAINING, age_s=5))
    waiting = seen(PODS, members, routers=[router(busy={"qwen-2": 1})], revision=NEW)
    assert plan(template_spec(), waiting, NOW_S).restarts == ()
    idle = seen(PODS, members, routers=[router()], idle_checks={"qwen-2": 2}, revision=NEW)
    (restart,) = plan(template_spec(), idle, NOW_S).restarts
    assert (restart.pod, restart.uid) == ("qwen-2", "uid-2")


def test_rollout_waits_for_the_replacement_before_the_next_pod() -> None:
    successor = pod(2, revision=NEW, uid="uid-9", incarnation="uid-9-0", ready=False, in_ring=False)
    joining = seen((*PODS[:2], successor), (*ACTIVE[:2], member(successor, MemberState.JOINING, age_s=5)), revision=NEW)
    assert states(plan(template_spec(), joining, NOW_S))["qwen-1"] == "Active"
    active = seen((*PODS[:2], successor), (*ACTIVE[:2], member(successor)), revision=NEW)
    assert states(plan(template_spec(), active, NOW_S))["qwen-1"] == "Draining"


def test_rollout_of_broken_template_stops_after_one_pod() -> None:
    broken = starting(2, revision=NEW)
    made = plan(template_spec(), seen((*PODS[:2], broken), ACTIVE[:2], revision=NEW), NOW_S)
    assert states(made) == {"qwen-0": "Active", "qwen-1": "Active"}
    assert made.restarts == ()


def test_rollout_of_fixed_template_replaces_the_broken_pod_first() -> None:
    broken = starting(2, revision=NEW)
    made = plan(template_spec(), seen((*PODS[:2], broken), ACTIVE[:2], revision="qwen-3"), NOW_S)
    assert [restart.pod for restart in made.restarts] == ["qwen-2"]
    assert set(states(made).values()) == {"Active"}


def test_rollout_of_reverted_template_reactivates_draining_pod() -> None:
    members = (*ACTIVE[:2], member(PODS[2], MemberState.DRAINING, age_s=5))
    made = plan(template_spec(), seen(PODS, members, routers=[router()], revision=REVISION), NOW_S)
    assert states(made)["qwen-2"] == "Active"


def test_rollout_reactivates_draining_pod_if_all_other_pods_fail() -> None:
    members = (*ACTIVE[:2], member(PODS[2], MemberState.DRAINING, age_s=5))
    pods = (starting(0), starting(1), PODS[2])
    made = plan(template_spec(), seen(pods, members, routers=[router(busy={"qwen-2": 1})], revision=NEW), NOW_S)
    assert states(made) == {"qwen-2": "Active"}


def test_rollout_replaces_a_single_pod() -> None:
    drains = member(PODS[0], MemberState.DRAINING, age_s=5)
    observed = seen(PODS[:1], [drains], size=1, routers=[router()], idle_checks={"qwen-0": 2}, revision=NEW)
    assert [each.pod for each in plan(template_spec(1), observed, NOW_S).restarts] == ["qwen-0"]


def test_scale_down_during_rollout_waits_for_the_replacement() -> None:
    replaced = pod(1, revision=NEW)
    members = (member(PODS[0], MemberState.DRAINING, age_s=5), member(replaced))
    observed = seen((PODS[0], replaced), members, size=2, routers=[router(busy={"qwen-0": 1})], revision=NEW)
    made = plan(template_spec(1), observed, NOW_S)
    assert states(made) == {"qwen-0": "Draining", "qwen-1": "Active"}


def test_rollout_waits_for_the_statefulset_to_observe_the_template() -> None:
    observed = replace(
        seen(PODS, ACTIVE, revision=NEW),
        statefulset=ObservedStatefulSet(replicas=3, update_revision=NEW, generation=2, observed_generation=1),
    )
    assert set(states(plan(template_spec(), observed, NOW_S)).values()) == {"Active"}


def test_rollout_waits_for_a_scale_down() -> None:
    members = (*ACTIVE[:2], member(PODS[2], MemberState.DRAINING, age_s=5))
    made = plan(template_spec(2), seen(PODS, members, routers=[router(busy={"qwen-2": 1})], revision=NEW), NOW_S)
    assert states(made) == {"qwen-0": "Active", "qwen-1": "Active", "qwen-2": "Draining"}
    assert made.restarts == ()
