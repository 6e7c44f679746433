"""Tests of the choice of a pool's owner, and of the requests after the owner has changed."""

from builders import pool, text_of
from core.queue_pools import slow_pool
from core.shared_routers import Routers, at
from dualmap.fleet.ledger import IN_FLIGHT_TTL_S
from dualmap.ownership.messages import Progress, Step
from dualmap.ownership.owner import owner_of
from dualmap.requests import Decision, Queued


def test_owner_of_is_the_same_for_any_order_and_moves_only_its_own() -> None:
    names = [f"router-{number}" for number in range(5)]
    pools = [f"tests/pool-{number}" for number in range(200)]
    owners = {pool: owner_of(pool, names) for pool in pools}
    assert owners == {pool: owner_of(pool, tuple(reversed(names))) for pool in pools}
    assert all(20 <= list(owners.values()).count(name) <= 60 for name in names)
    without = {pool: owner_of(pool, names[1:]) for pool in pools}
    assert all(without[pool] == owners[pool] for pool in pools if owners[pool] != names[0])
    assert owner_of("tests/pool", ()) is None


def test_lost_owners_requests_move_to_the_new_owner() -> None:
    all3 = Routers(slow_pool(2), count=3)
    for number in range(8):
        all3.ask(all3.others[number % 2], at(f"r{number}", text_of(2000, f"prompt {number}")))
    all3.deliver()
    sent = {each for each in all3.outcomes if isinstance(all3.outcomes[each][-1], Decision)}
    assert 0 < len(sent) < 8
    all3.lose(all3.owner)
    all3.deliver()
    new = all3[all3.others[0]].owner
    assert new in all3.others
    status = all3[new].status()
    assert sum(each.in_flight for each in status.endpoints) + status.held == 8
    # The new owner sends a queued request of its own before it hears of the other router's requests in flight.
    assert status.held == 8 - len(sent) - 1
    for _ in range(8):
        for each in [each for each in all3.outcomes if isinstance(all3.outcomes[each][-1], Decision)]:
            all3.first_token(each)
            all3.finish(each)
        all3.deliver()
    assert all(isinstance(outcomes[-1], Decision) for outcomes in all3.outcomes.values())
    assert all(all3.in_flight(name) == 0 for name in all3.others)
    # Each request was queued at most once for its driver, and dispatched once.
    assert all(len([each for each in o if isinstance(each, Decision)]) == 1 for o in all3.outcomes.values())
    assert all(len([each for each in o if isinstance(each, Queued)]) <= 1 for o in all3.outcomes.values())


def test_router_that_returns_takes_its_pool_and_all_requests_back() -> None:
    both = Routers(slow_pool())
    (other,) = both.others
    both.meet({other})
    both.ask(both.owner, at("a"))
    both.deliver()
    both.ask(other, at("b", text_of(2000, "another")))
    both.deliver()
    assert both.in_flight(other) == 1
    both.meet()
    both.deliver()
    assert (both.in_flight(both.owner), both.in_flight(other)) == (1, 0)
    assert both[both.owner].status().held == 1
    both.first_token("a")
    both.finish("a")
    both.deliver()
    assert isinstance(both.outcomes["b"][-1], Decision)


def test_lost_routers_queued_requests_leave_the_queue_and_those_in_flight_stay() -> None:
    both = Routers(slow_pool())
    (other,) = both.others
    both.ask(other, at("first"))
    both.ask(other, at("second"))
    both.deliver()
    both.lose(other)
    assert both[both.owner].status().held == 0
    assert both.in_flight(both.owner) == 1
    both.wait(IN_FLIGHT_TTL_S + 1)
    assert both.in_flight(both.owner) == 0


def test_orphan_report_ends_only_a_request_of_a_lost_router() -> None:
    both = Routers(slow_pool())
    (other,) = both.others
    both.ask(other, at("first"))
    both.deliver()
    end = Progress(request_id="first", step=Step.FINISHED)
    both.take(both[both.owner].on_orphan(both.now, end))
    assert both.in_flight(both.owner) == 1
    both.lose(other)
    both.take(both[both.owner].on_orphan(both.now, Progress(request_id="unknown", step=Step.FINISHED)))
    assert both.in_flight(both.owner) == 1
    both.take(both[both.owner].on_orphan(both.now, end))
    both.take(both[both.owner].on_orphan(both.now, end))
    assert both.in_flight(both.owner) == 0


def test_two_routers_that_both_own_the_pool_lose_nothing() -> None:
    both = Routers(pool(2))
    first, second = both.names
    both.take(both[first].on_routers(0.0, {first}))
    both.take(both[second].on_routers(0.0, {second}))
    both.ask(first, at("a"))
    both.ask(second, at("b"))
    both.meet()
    both.deliver()
    assert both.in_flight(both.owner) == 2
    assert both.in_flight(both.others[0]) == 0
    assert both.finish("a")
    assert both.finish("b")
    both.deliver()
    assert both.in_flight(both.owner) == 0
