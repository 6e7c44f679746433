from dataclasses import replace

from dualmap.hotness import HotnessCounts
from dualmap.news import News, SharedBinding, SharedLoad
from dualmap_extproc.store.unsent import NODES_MAX, Unsent

QUIET = News(hotness=HotnessCounts(requests=0, nodes={}), loads={})


def binding(host: str, version: int = 0) -> SharedBinding:
    return SharedBinding(session=1, host=host, tokens=10, version=version, moved_ago_s=0.0)


def test_of_too_many_nodes_the_most_met_are_told() -> None:
    unsent = Unsent()
    rare = dict.fromkeys(range(NODES_MAX), 1)
    often = {-node: 2 for node in range(1, 101)}
    unsent.add(0.0, replace(QUIET, hotness=HotnessCounts(requests=NODES_MAX + 100, nodes=rare)))
    unsent.add(0.0, replace(QUIET, hotness=HotnessCounts(requests=200, nodes=often)))
    hotness = unsent.news(0.0).hotness
    assert len(hotness.nodes) == NODES_MAX
    assert hotness.nodes.items() >= often.items()
    assert hotness.requests == NODES_MAX + 300


def test_a_binding_is_told_once_it_holds_and_until_it_was_told() -> None:
    unsent = Unsent()
    unsent.add(0.0, replace(QUIET, bindings=(binding("a"),)))
    assert unsent.news(0.0).bindings == ()
    assert unsent.settled(1.0, unsent.claims(1.0)) == ()
    assert unsent.claims(1.0) == ()
    assert [each.host for each in unsent.news(2.0).bindings] == ["a"]
    assert unsent.worth_telling(2.0, heartbeat_s=99.0)
    unsent.published(2.0)
    assert unsent.news(2.0).bindings == ()
    assert not unsent.worth_telling(2.5, heartbeat_s=99.0)


def test_a_binding_that_lost_is_not_told() -> None:
    unsent = Unsent()
    unsent.add(0.0, replace(QUIET, bindings=(binding("a"),)))
    winner = binding("b", version=1)
    assert unsent.settled(0.0, (winner,)) == (winner,)
    assert unsent.news(0.0).bindings == ()


def test_loads_that_are_as_they_were_told_are_worth_a_heartbeat_only() -> None:
    unsent = Unsent()
    loads = {"m-0": SharedLoad(in_flight=1)}
    unsent.add(0.0, replace(QUIET, loads=loads))
    unsent.published(0.0)
    unsent.add(0.5, replace(QUIET, loads=dict(loads)))
    assert not unsent.worth_telling(0.5, heartbeat_s=1.0)
    assert unsent.worth_telling(1.0, heartbeat_s=1.0)
    unsent.add(0.6, QUIET)
    assert unsent.worth_telling(0.6, heartbeat_s=1.0)
