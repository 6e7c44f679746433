from dataclasses import replace

from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap_extproc.store.unsent import NODES_MAX, Unsent

QUIET = ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}))


def binding(host: str, version: int = 0) -> SharedBinding:
    return SharedBinding(session=1, host=host, tokens=10, version=version, moved_ago_s=0.0)


def test_unsent_counts_above_the_limit_keep_most_requested_nodes() -> None:
    unsent = Unsent()
    rare = dict.fromkeys(range(NODES_MAX), 1)
    often = {-node: 2 for node in range(1, 101)}
    unsent.add(0.0, replace(QUIET, hotness=HotnessCounts(requests=NODES_MAX + 100, nodes=rare)))
    unsent.add(0.0, replace(QUIET, hotness=HotnessCounts(requests=200, nodes=often)))
    update = unsent.update(0.0)
    assert update is not None
    hotness = update.hotness
    assert len(hotness.nodes) == NODES_MAX
    assert hotness.nodes.items() >= often.items()
    assert hotness.requests == NODES_MAX + 300


def test_unsent_binding_is_sent_once_after_its_acceptance() -> None:
    unsent = Unsent()
    unsent.add(0.0, replace(QUIET, bindings=(binding("a"),)))
    assert unsent.update(0.0) is None
    assert unsent.resolved(1.0, unsent.claims(1.0)) == ()
    assert unsent.claims(1.0) == ()
    update = unsent.update(2.0)
    assert update is not None
    assert [each.host for each in update.bindings] == ["a"]
    unsent.sent_update()
    assert unsent.update(2.0) is None


def test_unsent_binding_that_is_rejected_is_not_sent() -> None:
    unsent = Unsent()
    unsent.add(0.0, replace(QUIET, bindings=(binding("a"),)))
    winner = binding("b", version=1)
    assert unsent.resolved(0.0, (winner,)) == (winner,)
    assert unsent.update(0.0) is None


def test_unsent_loads_are_sent_at_most_four_times_a_second() -> None:
    unsent = Unsent()
    assert unsent.loads(0.0) == {}
    told: list[tuple[float, int]] = []
    for tick in range(48):
        now = tick / 16
        # The loads change constantly in the first second, and no longer after it.
        in_flight = min(tick, 17)
        unsent.add(now, replace(QUIET, loads={"m-0": SharedLoad(in_flight=in_flight)}))
        if (loads := unsent.loads(now)) is not None:
            told.append((now, loads["m-0"].in_flight))
            unsent.sent_loads(now, loads)
    assert told == [(0.0, 0), (0.25, 4), (0.5, 8), (0.75, 12), (1.0, 16), (1.25, 17), (2.25, 17)]


def test_unsent_loads_are_due_again_after_a_failure() -> None:
    unsent = Unsent()
    unsent.sent_loads(0.0, {})
    unsent.add(0.5, replace(QUIET, loads={"m-0": SharedLoad(in_flight=1)}))
    assert unsent.loads(0.5) == unsent.loads(0.6) == {"m-0": SharedLoad(in_flight=1)}


def test_update_without_loads_keeps_the_last_loads() -> None:
    unsent = Unsent()
    unsent.add(0.0, replace(QUIET, loads={"m-0": SharedLoad(in_flight=1)}))
    unsent.add(0.1, QUIET)
    assert unsent.loads(0.1) == {"m-0": SharedLoad(in_flight=1)}


def test_unsent_loads_are_kept_separate_from_updates() -> None:
    unsent = Unsent()
    unsent.add(0.0, replace(QUIET, loads={"m-0": SharedLoad(in_flight=1)}))
    assert unsent.update(0.0) is None
    unsent.add(0.0, replace(QUIET, hotness=HotnessCounts(requests=1, nodes={}), loads={"m-0": SharedLoad()}))
    assert (update := unsent.update(0.0)) is not None
    assert update.loads is None
