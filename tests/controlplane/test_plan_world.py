"""Tests that a pool converges to its spec after any events and operator restarts, without aborted requests."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import RingMember
from scenario import World, size_asked, states, template_spec


def settled(world: World) -> None:
    world.busy.clear()
    world.settle()
    wanted = {f"qwen-{n}": "Active" for n in range(world.spec.replicas)}
    assert states(world.published.members) == wanted
    assert world.size == world.spec.replicas
    assert set(world.pods) == set(wanted)
    assert all(each.revision == world.revision and each.ready for each in world.pods.values())
    last = world.step()
    assert (last.status, last.events, last.gates) == (world.plans[-2].status, (), ())


def test_new_pool_becomes_ready_and_serves() -> None:
    settled(World(spec=template_spec(3)))


def test_deleted_pool_drains_and_finishes() -> None:
    world = World(spec=template_spec(3))
    settled(world)
    world.busy["qwen-1"] = 1
    world.spec = replace(world.spec, deleting=True)
    world.settle(10)
    assert not world.plans[-1].finished
    world.busy.clear()
    world.settle(5)
    assert world.plans[-1].finished


def test_rollout_has_at_most_one_inactive_pod_at_a_time() -> None:
    world = World(spec=template_spec(3))
    settled(world)
    world.revision = "qwen-2"
    for _ in range(200):
        world.step()
        assert sum(each.state is MemberState.ACTIVE for each in world.published.members) >= 1
        assert sum(each.state is not MemberState.ACTIVE for each in world.published.members) <= 1
    settled(world)


def test_pool_scales_to_zero_and_back_and_converges() -> None:
    """Like an autoscaler, the test drains the last member, returns it, removes it, and requests it again."""
    world = World(spec=template_spec(1))
    settled(world)
    uid = world.pods["qwen-0"].uid
    world.busy["qwen-0"] = 1
    world.spec = replace(world.spec, replicas=0, generation=2)
    world.settle(10)
    assert (states(world.published.members), world.size) == ({"qwen-0": "Draining"}, 1)
    world.spec = replace(world.spec, replicas=1, generation=3)
    settled(world)
    assert world.pods["qwen-0"].uid == uid

    world.spec = replace(world.spec, replicas=0, generation=4)
    settled(world)
    said = {each.type: (each.status, each.reason) for each in world.published.conditions}
    assert said["Available"] == (False, "ScaledToZero")
    assert said["Degraded"] == (False, "AsExpected")
    assert said["Progressing"] == (False, "Settled")
    world.step(600.0)
    assert {each.type: (each.status, each.reason) for each in world.published.conditions} == said

    world.spec = replace(world.spec, replicas=1, generation=5)
    settled(world)
    assert world.pods["qwen-0"].uid != uid


@pytest.mark.parametrize("reasons", [True, False])
def test_draining_member_becomes_active_after_scale_up(reasons: bool) -> None:
    """Some kubelets report no reason for Ready false while the readiness gate is closed."""
    world = World(spec=template_spec(2), kubelet_gives_reasons=reasons)
    settled(world)
    world.busy["qwen-1"] = 1
    world.spec = replace(world.spec, replicas=1, generation=2)
    world.settle(10)
    assert states(world.published.members)["qwen-1"] == "Draining"
    assert world.pods["qwen-1"].in_ring is False
    world.spec = replace(world.spec, replicas=2, generation=3)
    settled(world)


happenings = st.one_of(
    st.tuples(st.just("scale"), st.integers(0, 5)),
    st.tuples(st.just("crash"), st.integers(0, 4)),
    st.tuples(st.just("delete"), st.integers(0, 4)),
    st.tuples(st.just("busy"), st.integers(0, 4)),
    st.tuples(st.just("idle"), st.integers(0, 4)),
    st.tuples(st.just("template"), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.integers(1, 40)),
    st.tuples(st.just("lost children"), st.just(0)),
)


@given(st.lists(happenings, max_size=25))
def test_any_event_history_converges_and_keeps_invariants(history: list[tuple[str, int]]) -> None:
    world = World(spec=template_spec(3))
    world.settle(5)
    for what, number in history:
        name = f"qwen-{number}"
        if what == "scale":
            world.spec = replace(world.spec, replicas=number, generation=world.spec.generation + 1)
        elif what == "crash" and name in world.pods:
            world.crash(name)
        elif what == "delete":
            world.terminate(name)
        elif what == "busy" and name in states(world.published.members):
            world.busy[name] = 1
        elif what == "idle":
            world.busy.pop(name, None)
        elif what == "template":
            world.revision = f"qwen-{number}"
        elif what == "lost children":
            world.size = None
        for _ in range(number if what == "wait" else 1):
            _step_and_check(world)
    settled(world)


def _step_and_check(world: World) -> None:
    before, size, busy = world.published, world.size, {name for name, count in world.busy.items() if count}
    made = world.step()
    after = made.status
    assert after.ring_version >= before.ring_version
    if _identities(before.members) != _identities(after.members):
        assert after.ring_version > before.ring_version
    asked = size_asked(made)
    assert asked is not None
    if size is not None and asked < size:
        was = {each.id: each for each in before.members}
        for number in range(asked, size):
            member = was.get(f"qwen-{number}")
            assert member is None or member.state is MemberState.DRAINING, "shrunk before it was published Draining"
            overdue = member is not None and world.now_s - member.since_s >= world.spec.drain_timeout_s
            assert member is None or overdue or member.id not in busy, "shrunk with a request in flight"
    for restart in made.restarts:
        assert restart.pod not in busy or restart.pod not in {each.id for each in before.members}


def _identities(members: tuple[RingMember, ...]) -> set[tuple[str, str, int, str, str]]:
    return {(each.id, each.address, each.port, each.state, each.incarnation) for each in members}
