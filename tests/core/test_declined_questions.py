"""Tests of routers that decide for no other router: they are about to end, or do not serve the pool."""

import pytest

from builders import pool
from core.queue_pools import slow_pool
from core.shared_routers import Routers, at
from dualmap.ownership.election import DECLINED_S
from dualmap.ownership.messages import Declined
from dualmap.ownership.owner import owner_of
from dualmap.requests import Asked, Decision


def test_router_about_to_end_decides_what_the_owner_has_queued() -> None:
    both = Routers(slow_pool())
    (other,) = both.others
    both.ask(other, at("first"))
    both.ask(other, at("second"))
    both.deliver()
    both.take(both[other].on_pool(both.now, both[other].pool.never_queueing()))
    both.take(both[other].stop_asking(both.now))
    assert isinstance(both.outcomes["second"][-1], Decision)
    assert isinstance(both.ask(other, at("third")), Decision)
    both.deliver()
    assert both[both.owner].status().held == 0
    # The owner answered both questions, also the one of the request that it queued.
    assert both.results == ["answered", "answered"]


def test_router_about_to_end_declines_questions() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    both[both.owner].stop_asking(0.0)
    both.ask(other, at("a"))
    both.deliver()
    assert isinstance(both.outcomes["a"][-1], Decision)
    assert both.results == ["refused"]
    assert both.in_flight(other) == 1


@pytest.mark.parametrize(("number", "owns", "result"), [(0, True, "refused"), (1, False, "answered")])
def test_router_that_declines_is_no_owner_for_a_while(number: int, owns: bool, result: str) -> None:
    all3 = Routers(pool(2), count=3)
    asking, third = all3.others[number], all3.others[1 - number]
    all3[all3.owner].stop_asking(0.0)
    all3.ask(asking, at("a"))
    all3.deliver()
    assert isinstance(all3.outcomes["a"][-1], Decision)
    assert all3[asking].owner == owner_of(all3[asking].pool.id, all3.others)
    assert all3.in_flight(all3[asking].owner) == 1
    assert (all3[asking].owner == asking, all3.results) == (owns, [result])
    all3.wait(DECLINED_S)
    all3.finish("a")
    all3.deliver()
    all3.ask(asking, at("b", now=all3.now))
    assert all3[asking].owner == all3.owner
    all3.deliver()
    assert isinstance(all3.outcomes["b"][-1], Decision)
    assert all3[third].owner == all3.owner


def test_router_that_declines_again_and_again_is_asked_less_often() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    both[both.owner].stop_asking(0.0)
    times_s = []
    while both.now < 100.0:
        asked = f"r{len(both.asked_at)}"
        if isinstance(both.ask(other, at(asked, now=both.now)), Asked):
            times_s.append(both.now)
        both.deliver()
        both.finish(asked)
        both.now += 0.5
    assert times_s == [0.0, 2.0, 6.0, 14.0, 30.0, 60.0, 90.0]


def test_router_that_serves_a_new_pool_later_is_asked_soon() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    both.ask(other, at("a"))
    both.links.clear()
    both.take(both[other].on_message(0.0, both.owner, Declined(request_id="a", number=1)))
    both.now = DECLINED_S
    assert isinstance(both.ask(other, at("b", now=both.now)), Asked)
    both.deliver()
    assert both.in_flight(both.owner) == 2
    both.ask(other, at("c", now=both.now))
    both.take(both[other].on_message(both.now, both.owner, Declined(request_id="c", number=3)))
    both.now += DECLINED_S
    assert isinstance(both.ask(other, at("d", now=both.now)), Asked)
