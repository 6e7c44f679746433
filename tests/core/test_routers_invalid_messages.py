"""Tests of messages from another router that are invalid, false, or about another router's requests."""

from dataclasses import replace

import pytest

from builders import pool, text_of
from core.shared_routers import Routers, at
from dualmap.ownership.messages import Answer, Ask, Declined, Message, Progress, Sent, Step
from dualmap.ownership.missed_answers import PAUSE_S
from dualmap.prompts.blocks import BlockChain
from dualmap.requests import Decision, Rejection
from dualmap.router import PoolRouter


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
    forged = decision._replace(endpoints=(first, "6.6.6.6:80", second))
    both.take(both[other].on_message(0.0, both.owner, Answer(outcome=forged, number=1)))
    assert both.decision("a").destination == f"{first},{second}"


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
    asked = at("a")._replace(chain=chain)
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
