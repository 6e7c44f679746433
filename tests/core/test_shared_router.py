"""Tests of a pool's router among several routers: its decisions, its accounts, and any order of events."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import pool, text_of
from core.queue_pools import slow_pool
from core.shared_routers import Routers, at
from dualmap.fleet.ledger import IN_FLIGHT_TTL_S
from dualmap.ownership.messages import Progress, Step
from dualmap.requests import Asked, Completion, Decision, FirstToken, Queued, Usage
from dualmap.router import PoolRouter


def test_two_routers_decide_like_one() -> None:
    both, alone = Routers(pool(4)), PoolRouter(pool(4))
    for number in range(40):
        asked = at(f"r{number}", text_of(3000, f"prompt {number % 7}"), now=both.now)
        both.ask(both.names[number % 2], asked)
        both.deliver()
        decided = alone.on_request(both.now, asked).answer
        assert isinstance(decided, Decision)
        assert both.decision(asked.id) == decided
        if number % 3:
            both.first_token(asked.id)
            both.deliver()
            alone.on_first_token(both.now, asked.id)
        both.now += 0.05
    assert set(both.results) == {"answered"}


def test_request_is_in_the_owners_accounts_only_until_it_ends() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    assert both.ask(other, at("a")) == Asked(request_id="a")
    both.deliver()
    assert (both.in_flight(both.owner), both.in_flight(other)) == (1, 0)
    decision = both.decision("a")
    both.now = 1.5
    first_token = both[other].on_first_token(both.now, "a").answer
    assert first_token == FirstToken(
        member=decision.receipt.chosen,
        ttft_s=1.5,
        predicted_ttft_s=decision.receipt.predicted_ttft_s,
        within_slo=True,
    )
    assert both[other].on_first_token(both.now, "a").answer is None
    both.deliver()
    assert sum(each.pending_prefill_tokens for each in both[both.owner].status().endpoints) == 0
    usage = Usage(prompt_tokens=4000, completion_tokens=10, cached_tokens=0)
    completion = both[other].on_finished(both.now, "a", usage).answer
    assert completion == Completion(
        request_id="a", member=decision.receipt.chosen, predicted_cached_tokens=0, measured_cached_tokens=0
    )
    both.deliver()
    assert both.in_flight(both.owner) == 0


def test_request_queued_by_the_owner_is_told_and_released() -> None:
    both = Routers(slow_pool())
    (other,) = both.others
    both.ask(other, at("first"))
    both.ask(other, at("second"))
    both.deliver()
    assert both.outcomes["second"] == [Queued(request_id="second")]
    both.first_token("first")
    both.finish("first")
    both.deliver()
    assert isinstance(both.outcomes["second"][1], Decision)


def test_queue_is_fair_between_clients_of_different_routers() -> None:
    both = Routers(slow_pool())
    for number in range(6):
        both.ask(both.names[0], at(f"a{number}", text_of(2000, f"a {number}"))._replace(client=1))
    both.ask(both.names[1], at("b", text_of(2000, "b"))._replace(client=2))
    both.deliver()
    order = []
    while len(order) < 7:
        running = [
            each for each in both.outcomes if each not in order and isinstance(both.outcomes[each][-1], Decision)
        ]
        order += running
        for each in running:
            both.now += 0.1
            both.first_token(each)
            both.finish(each)
            both.deliver()
    assert order.index("b") <= 2


def test_client_that_disconnects_leaves_the_owners_queue() -> None:
    both = Routers(slow_pool())
    (other,) = both.others
    both.ask(other, at("first"))
    both.ask(other, at("second"))
    both.deliver()
    assert both[both.owner].status().held == 1
    assert both[other].on_aborted(0.0, "second").answer is None
    both.deliver()
    assert both[both.owner].status().held == 0
    assert both[other].on_aborted(0.0, "first").answer is not None
    both.deliver()
    assert both.in_flight(both.owner) == 0


def test_request_without_reports_expires_at_its_own_router_too() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    both.ask(other, at("a"))
    both.deliver()
    expired = []
    both.now = IN_FLIGHT_TTL_S + 1
    expired += both[other].on_deadline(both.now).answer
    assert [each.request_id for each in expired] == ["a"]
    both.deliver()
    both.take(both[both.owner].on_deadline(both.now))
    assert both.in_flight(both.owner) == 0
    assert not both.finish("a")


def test_counts_of_an_ended_request_are_its_own_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    all3 = Routers(pool(2), count=3)
    asking, stranger = all3.others
    counted: list[str] = []
    monkeypatch.setattr(PoolRouter, "on_usage", lambda _, now, id, usage: counted.append(id))
    all3.ask(asking, at("a"))
    all3.deliver()
    all3.finish("a")
    all3.deliver()
    counts = Progress(request_id="a", step=Step.COUNTED, usage=Usage(prompt_tokens=1))
    all3[all3.owner].on_message(0.0, stranger, counts)
    all3[all3.owner].on_message(0.0, stranger, replace(counts, request_id="unknown"))
    assert counted == []
    all3[asking].on_usage(0.0, "a", Usage(prompt_tokens=4000))
    all3.deliver()
    assert counted == ["a"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=10, max_size=120))
def test_any_order_of_events_decides_each_request_once(steps: list[tuple[int, int, int]]) -> None:
    routers = Routers(slow_pool(2, max_wait_s=5.0), count=3)
    asked = 0
    for kind, which, how in steps:
        running = sorted(routers.running)
        router = running[which % len(running)]
        live = [
            each
            for each, outcomes in routers.outcomes.items()
            if isinstance(outcomes[-1], Decision) and routers.asked_at[each] in routers.running
        ]
        match kind:
            case 0 | 1 | 2:
                routers.ask(router, at(f"r{asked}", text_of(500 + 300 * how, f"p {which}"), now=routers.now))
                asked += 1
            case 3 | 4:
                links = sorted(link for link, messages in routers.links.items() if messages)
                if links:
                    routers.deliver_one(links[how % len(links)])
            case 5:
                routers.wait(0.004 * (1 + how))
            case 6 if live:
                routers.first_token(live[how % len(live)])
            case 7 if live:
                routers.finish(live[how % len(live)])
            case 8 if how < 2 and len(running) > 1:
                routers.lose(router)
            case 8:
                known = {each for each in running if each != running[how % len(running)]}
                routers.take(routers[router].on_routers(routers.now, known))
            case 9 if live:
                ended = live[how % len(live)]
                routers.take(routers[routers.asked_at[ended]].on_failed(routers.now, ended))
            case _:
                routers.meet()
    routers.meet()
    for _ in range(60):
        routers.deliver()
        for each, outcomes in tuple(routers.outcomes.items()):
            if isinstance(outcomes[-1], Decision) and routers.asked_at[each] in routers.running:
                routers.first_token(each)
                routers.finish(each)
        routers.wait(0.2)
    for request_id, router in routers.asked_at.items():
        if router in routers.running:
            outcomes = [each for each in routers.outcomes[request_id] if not isinstance(each, Queued)]
            assert len(outcomes) == 1, (request_id, routers.outcomes[request_id])
    routers.wait(IN_FLIGHT_TTL_S + 10)
    routers.deliver()
    for name in routers.running:
        assert routers.in_flight(name) == 0
        assert routers[name].status().held == 0


@pytest.mark.parametrize("count", [1, 3])
def test_router_without_others_decides_like_a_pool_router(count: int) -> None:
    routers, alone = Routers(pool(2), count=count), PoolRouter(pool(2))
    for name in routers.names:
        routers.take(routers[name].on_routers(0.0, ()))
    asked = at("a")
    assert routers.ask(routers.names[0], asked) == alone.on_request(0.0, asked).answer
    assert routers[routers.names[0]].owner == routers.names[0]
