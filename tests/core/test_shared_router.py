"""Tests of a pool's router among several routers."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import pool, request, text_of
from core.queue_pools import slow_pool
from core.shared_routers import Routers
from dualmap.fleet.ledger import IN_FLIGHT_TTL_S
from dualmap.ownership.messages import Answer, Ask, Declined, Message, Progress, Sent, Step
from dualmap.ownership.owner import owner_of
from dualmap.prompts.blocks import BlockChain
from dualmap.requests import Asked, Completion, Decision, FirstToken, Queued, Reason, Rejection, Usage
from dualmap.router import PoolRouter
from dualmap.shared_router import DECLINED_S, PAUSE_S

LONG = text_of(4000, "a long prompt")


def at(id: str, text: str = LONG, *, now: float = 0.0):  # type: ignore[no-untyped-def]
    return request(id, text, now=now)


def test_owner_of_is_the_same_for_any_order_and_moves_only_its_own() -> None:
    names = [f"router-{number}" for number in range(5)]
    pools = [f"tests/pool-{number}" for number in range(200)]
    owners = {pool: owner_of(pool, names) for pool in pools}
    assert owners == {pool: owner_of(pool, tuple(reversed(names))) for pool in pools}
    assert all(20 <= list(owners.values()).count(name) <= 60 for name in names)
    without = {pool: owner_of(pool, names[1:]) for pool in pools}
    assert all(without[pool] == owners[pool] for pool in pools if owners[pool] != names[0])
    assert owner_of("tests/pool", ()) is None


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
        both.ask(both.names[0], replace(at(f"a{number}", text_of(2000, f"a {number}")), client=1))
    both.ask(both.names[1], replace(at("b", text_of(2000, "b")), client=2))
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


def test_owner_without_three_answers_is_not_asked_for_a_while() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    both.miss(other, "a", "b", "c")
    assert all(isinstance(both.outcomes[each][-1], Decision) for each in "abc")
    assert isinstance(both.ask(other, at("d", now=both.now)), Decision)
    assert both.in_flight(other) == 4
    assert both.results == ["timeout", "timeout", "timeout", "local"]
    both.wait(PAUSE_S)
    assert isinstance(both.ask(other, at("e", now=both.now)), Asked)
    both.wait_for_answer()
    assert isinstance(both.ask(other, at("f", now=both.now)), Decision)


def test_late_answers_of_one_burst_are_one_missed_answer() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    for number in range(10):
        both.ask(other, at(f"r{number}"))
    both.wait_for_answer()
    assert both.results == ["timeout"] * 10
    assert isinstance(both.ask(other, at("next", now=both.now)), Asked)


def test_answer_between_missed_ones_keeps_the_owner_and_moves_the_requests() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    for number in range(6):
        assert isinstance(both.ask(other, at(f"late {number}", now=both.now)), Asked)
        both.wait_for_answer()
        both.deliver()
        assert both.in_flight(other) == 1
        assert isinstance(both.ask(other, at(f"early {number}", now=both.now)), Asked)
        both.deliver()
        assert (both.in_flight(both.owner), both.in_flight(other)) == (2 * number + 2, 0)


def test_miss_of_a_question_asked_before_an_answer_moves_its_request() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    link, back = (other, both.owner), (both.owner, other)
    both.ask(other, at("a"))
    both.wait(0.010)
    both.ask(other, at("b", now=both.now))
    both.wait(0.011)
    both.ask(other, at("c", now=both.now))
    both.links[link].clear()
    both[both.owner].on_message(both.now, other, Ask(request=at("c"), age_s=0.0, number=3))
    both.deliver_one(back)
    both.wait(0.020)
    assert both.results == ["timeout", "answered", "timeout"]
    both.ask(other, at("d", now=both.now))
    both.deliver()
    assert (both.in_flight(both.owner), both.in_flight(other)) == (4, 0)


def test_late_answer_to_an_earlier_question_has_no_effect() -> None:
    both = Routers(slow_pool())
    (other,) = both.others
    link = (other, both.owner)
    both.ask(other, at("x"))
    both.ask(other, at("a"))
    both.wait_for_answer()
    assert both.outcomes["a"] == [Queued(request_id="a")]
    both.links[link].clear()
    # The owner answers another question, so it is asked about the queued request again.
    both.ask(other, at("b", now=both.now))
    both.deliver_one(link)
    both.deliver_one((both.owner, other))
    assert [each.number for each in both.links[link] if isinstance(each, Ask)] == [4]
    late = Answer(outcome=Rejection(request_id="a", reason=Reason.QUEUE_FULL), number=2)
    both.take(both[other].on_message(both.now, both.owner, late))
    both.deliver()
    assert both.outcomes["a"] == [Queued(request_id="a")]
    for each in ("b", "x", "a"):
        both.first_token(each)
        assert both.finish(each)
        both.deliver()
    assert (both.in_flight(both.owner), both.in_flight(other)) == (0, 0)


def test_owner_that_answers_again_gets_the_requests_decided_meanwhile() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    both.miss(other, "a", "b", "c")
    both.ask(other, at("d", now=both.now))
    both.first_token("d")
    both.wait(PAUSE_S)
    both.ask(other, at("e", now=both.now))
    both.deliver()
    assert (both.in_flight(both.owner), both.in_flight(other)) == (5, 0)
    assert len(both.outcomes["a"]) == 1
    for each in "abcde":
        assert both.finish(each)
    both.deliver()
    assert (both.in_flight(both.owner), both.in_flight(other)) == (0, 0)


def test_request_is_rejected_after_the_longest_wait_if_the_owner_is_silent() -> None:
    both = Routers(slow_pool(max_wait_s=5.0))
    (other,) = both.others
    both.ask(other, at("first"))
    both.ask(other, at("second"))
    both.deliver()
    both.wait(4.9)
    assert both.outcomes["second"] == [Queued(request_id="second")]
    both.now = 5.0
    both.take(both[other].on_deadline(5.0))
    rejection = Rejection(request_id="second", reason=Reason.WAITED_TOO_LONG, retry_after_s=5.0)
    assert both.outcomes["second"][1:] == [rejection]
    assert both.results == ["answered", "answered"]
    both.deliver()
    assert both[both.owner].status().held == both[other].status().held == 0


@pytest.mark.parametrize("moves_to", ["other", "self"])
def test_longest_wait_counts_from_the_first_router_that_queued_the_request(moves_to: str) -> None:
    all3 = Routers(slow_pool(max_wait_s=5.0), count=3)
    asking, third = all3.others
    for each in ("first", "second"):
        all3.ask(asking, at(each))
        all3.deliver()
    all3.wait(4.0)
    all3.ask(asking, at("third", now=all3.now))
    all3.meet({third if moves_to == "other" else asking})
    all3.deliver()
    for each in ("second", "third"):
        assert all3.outcomes[each] == [Queued(request_id=each)]
    all3.wait(1.001)
    assert [type(each) for each in all3.outcomes["second"]] == [Queued, Rejection]
    assert len(all3.outcomes["third"]) == 1
    all3.deliver()
    assert sum(all3[each].status().held for each in all3.names) == 1


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


def test_decision_for_an_unknown_endpoint_is_made_again() -> None:
    both = Routers(pool(3))
    (other,) = both.others
    both[other].on_pool(0.0, replace(both[other].pool, members=both[other].pool.members[:1], ring_version=2))
    for number in range(8):
        both.ask(other, at(f"r{number}", text_of(2000, f"prompt {number}"), now=both.now))
        both.deliver()
        both.wait(PAUSE_S)
    endpoints = {both.decision(f"r{number}").endpoints[0] for number in range(8)}
    assert endpoints == {both[other].pool.members[0].endpoint}
    assert "refused" in both.results


def test_unknown_second_endpoint_of_a_decision_is_dropped() -> None:
    both = Routers(pool(3))
    (other,) = both.others
    both.ask(other, at("a"))
    decision = PoolRouter(pool(3)).on_request(0.0, at("a")).answer
    assert isinstance(decision, Decision)
    first, second = decision.endpoints
    forged = replace(decision, endpoints=(first, "6.6.6.6:80", second))
    both.take(both[other].on_message(0.0, both.owner, Answer(outcome=forged, number=1)))
    assert both.decision("a").destination == f"{first},{second}"


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


def test_questions_with_ids_of_other_requests_are_declined() -> None:
    both = Routers(pool(2))
    (other,) = both.others
    both.ask(both.owner, at("a"))
    both[both.owner].on_message(0.0, other, Ask(request=at("a"), age_s=0.0))
    assert list(both.links[both.owner, other]) == [Declined(request_id="a")]
    assert both.in_flight(both.owner) == 1


def test_question_that_raises_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Routers(pool(2))
    (other,) = both.others
    both.deliver()

    def raises(*_: object) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(PoolRouter, "on_request", raises)
        with pytest.raises(ValueError, match="broken"):
            both[both.owner].on_message(0.0, other, Ask(request=at("a"), age_s=0.0))
    both.ask(other, at("a"))
    both.deliver()
    assert both.results == ["answered"]


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


def test_reports_and_answers_of_strangers_have_no_effect() -> None:
    all3 = Routers(pool(2), count=3)
    asking, stranger = all3.others
    all3.ask(asking, at("a"))
    all3.deliver()
    all3[all3.owner].on_message(0.0, stranger, Progress(request_id="a", step=Step.ABORTED))
    assert all3.in_flight(all3.owner) == 1
    all3.ask(asking, at("b"))
    answer = Answer(outcome=Rejection(request_id="b", reason=next(iter(type(_no_endpoint().reason)))))
    assert all3[asking].on_message(0.0, stranger, answer).outcomes == ()


@pytest.mark.parametrize(
    "chain",
    [
        BlockChain(hashes=(1, 2), block_tokens=128, tokens=2**50),
        BlockChain(hashes=(1, 2), block_tokens=1, tokens=100_000),
        BlockChain(hashes=(1, 2), block_tokens=128, tokens=2**50, exact=True),
        BlockChain(hashes=(1, 2), block_tokens=128, tokens=2**50, full_blocks=2**50),
    ],
)
@pytest.mark.parametrize("sent", [False, True])
def test_prompt_of_a_peer_counts_up_to_the_longest_prompt(chain: BlockChain, sent: bool) -> None:
    both = Routers(pool(2))
    (other,) = both.others
    asked = replace(at("a"), chain=chain)
    message: Message = Ask(request=asked, age_s=0.0)
    if sent:
        message = Sent(
            request=asked,
            age_s=0.0,
            endpoint=both[other].pool.members[0].endpoint,
            sent_ago_s=0.0,
            matched_tokens=0,
            predicted_ttft_s=0.0,
            prefilled=False,
        )
    both[both.owner].on_message(0.0, other, message)
    statuses = both[both.owner].status().endpoints
    assert sum(each.in_flight for each in statuses) == 1
    assert sum(each.pending_prefill_tokens for each in statuses) == both[other].pool.engine.max_model_len
    both[both.owner].on_message(0.0, other, Progress(request_id="a", step=Step.FINISHED))
    assert all(each.pending_prefill_tokens == 0 for each in both[both.owner].status().endpoints)


def _no_endpoint() -> Rejection:
    rejection = PoolRouter(pool(0)).on_request(0.0, at("x")).answer
    assert isinstance(rejection, Rejection)
    return rejection


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
