"""Tests of questions to a pool's owner whose answer comes late, or not at all."""

from builders import pool
from core.queue_pools import slow_pool
from core.shared_routers import Routers, at
from dualmap.ownership.messages import Answer, Ask
from dualmap.ownership.missed_answers import PAUSE_S
from dualmap.requests import Asked, Decision, Queued, Reason, Rejection


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
