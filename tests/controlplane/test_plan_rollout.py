"""A changed template goes through the ring one pod at a time; a pod that cannot start stops it."""

from dataclasses import replace

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import ObservedStatefulSet
from dualmap_operator.decide.plan import plan
from scenario import NOW_S, REVISION, member, pod, router, seen, starting, states, template_spec

NEW = "qwen-2"
PODS = (pod(0), pod(1), pod(2))
ACTIVE = tuple(member(each) for each in PODS)


def test_the_highest_outdated_pod_drains_first_and_alone() -> None:
    made = plan(template_spec(), seen(PODS, ACTIVE, routers=[router()], revision=NEW), NOW_S)
    assert states(made) == {"qwen-0": "Active", "qwen-1": "Active", "qwen-2": "Draining"}
    assert made.restarts == ()


def test_it_is_deleted_when_it_has_drained() -> None:
    members = (*ACTIVE[:2], member(PODS[2], MemberState.DRAINING, age_s=5))
    waiting = seen(PODS, members, routers=[router(busy={"qwen-2": 1})], revision=NEW)
    assert plan(template_spec(), waiting, NOW_S).restarts == ()
    idle = seen(PODS, members, routers=[router()], idle_checks={"qwen-2": 2}, revision=NEW)
    (restart,) = plan(template_spec(), idle, NOW_S).restarts
    assert (restart.pod, restart.uid) == ("qwen-2", "uid-2")


def test_the_next_waits_until_its_successor_is_active() -> None:
    successor = pod(2, revision=NEW, uid="uid-9", incarnation="uid-9-0", ready=False, in_ring=False)
    joining = seen((*PODS[:2], successor), (*ACTIVE[:2], member(successor, MemberState.JOINING, age_s=5)), revision=NEW)
    assert states(plan(template_spec(), joining, NOW_S))["qwen-1"] == "Active"
    active = seen((*PODS[:2], successor), (*ACTIVE[:2], member(successor)), revision=NEW)
    assert states(plan(template_spec(), active, NOW_S))["qwen-1"] == "Draining"


def test_a_template_that_cannot_start_takes_one_pod_only() -> None:
    broken = starting(2, revision=NEW)
    made = plan(template_spec(), seen((*PODS[:2], broken), ACTIVE[:2], revision=NEW), NOW_S)
    assert states(made) == {"qwen-0": "Active", "qwen-1": "Active"}
    assert made.restarts == ()


def test_its_mended_version_replaces_the_broken_pod_first() -> None:
    broken = starting(2, revision=NEW)
    made = plan(template_spec(), seen((*PODS[:2], broken), ACTIVE[:2], revision="qwen-3"), NOW_S)
    assert [restart.pod for restart in made.restarts] == ["qwen-2"]
    assert set(states(made).values()) == {"Active"}


def test_a_template_taken_back_takes_the_pod_back() -> None:
    members = (*ACTIVE[:2], member(PODS[2], MemberState.DRAINING, age_s=5))
    made = plan(template_spec(), seen(PODS, members, routers=[router()], revision=REVISION), NOW_S)
    assert states(made)["qwen-2"] == "Active"


def test_a_pod_that_drains_is_taken_back_when_all_others_fail() -> None:
    members = (*ACTIVE[:2], member(PODS[2], MemberState.DRAINING, age_s=5))
    pods = (starting(0), starting(1), PODS[2])
    made = plan(template_spec(), seen(pods, members, routers=[router(busy={"qwen-2": 1})], revision=NEW), NOW_S)
    assert states(made) == {"qwen-2": "Active"}


def test_the_only_pod_is_replaced_all_the_same() -> None:
    drains = member(PODS[0], MemberState.DRAINING, age_s=5)
    observed = seen(PODS[:1], [drains], size=1, routers=[router()], idle_checks={"qwen-0": 2}, revision=NEW)
    assert [each.pod for each in plan(template_spec(1), observed, NOW_S).restarts] == ["qwen-0"]


def test_a_scale_down_waits_for_the_pod_that_is_being_replaced() -> None:
    replaced = pod(1, revision=NEW)
    members = (member(PODS[0], MemberState.DRAINING, age_s=5), member(replaced))
    observed = seen((PODS[0], replaced), members, size=2, routers=[router(busy={"qwen-0": 1})], revision=NEW)
    made = plan(template_spec(1), observed, NOW_S)
    assert states(made) == {"qwen-0": "Draining", "qwen-1": "Active"}


def test_nothing_rolls_before_the_statefulset_has_seen_its_template() -> None:
    observed = replace(
        seen(PODS, ACTIVE, revision=NEW),
        statefulset=ObservedStatefulSet(replicas=3, update_revision=NEW, generation=2, observed_generation=1),
    )
    assert set(states(plan(template_spec(), observed, NOW_S)).values()) == {"Active"}


def test_a_pool_that_shrinks_does_not_roll_at_the_same_time() -> None:
    members = (*ACTIVE[:2], member(PODS[2], MemberState.DRAINING, age_s=5))
    made = plan(template_spec(2), seen(PODS, members, routers=[router(busy={"qwen-2": 1})], revision=NEW), NOW_S)
    assert states(made) == {"qwen-0": "Active", "qwen-1": "Active", "qwen-2": "Draining"}
    assert made.restarts == ()
