"""The wait for KV memory at a member that has much less memory than the others counts in its predicted TTFT."""

from unittest.mock import ANY

import pytest

from builders import chain, pool, request, text_of
from dualmap.engines.profile import EngineProfile
from dualmap.fleet.fleet import Fleet
from dualmap.queue.request_queue import QueuedRequest
from dualmap.receipt import Key
from dualmap.requests import Decision, Queued, Usage
from dualmap.router import PoolRouter

PROMPT = text_of(4000, "warm")
SMALL, LARGE = 10_000, 100_000
ANSWER_S = 20.0
LATER_S = 100.0


def _warmed(small: int, others: int) -> tuple[PoolRouter, str]:
    """Return a router and the member that cached the prompt and took 20 s to answer; members report their memory."""
    router = PoolRouter(pool(4))
    home = _decision(router, "first", 0.0)
    router.on_first_token(0.5, "first")
    router.on_finished(0.5 + ANSWER_S, "first", Usage(completion_tokens=100))
    for member in router.pool.members:
        tokens = small if member.id == home else others
        router.on_profile(1.0 + ANSWER_S, member.id, EngineProfile(kv_tokens=tokens))
    return router, home


def _decision(router: PoolRouter, name: str, now: float) -> str:
    answer = router.on_request(now, request(name, PROMPT, now=now)).answer
    assert isinstance(answer, Decision)
    return answer.receipt.chosen


def _fill(router: PoolRouter, home: str) -> None:
    """Send as many requests as the home's memory has room for; both decode."""
    for name in ("second", "third"):
        assert _decision(router, name, LATER_S) == home
        router.on_first_token(LATER_S, name)


def test_prompt_leaves_its_warm_member_if_the_small_memory_there_is_full() -> None:
    router, home = _warmed(SMALL, LARGE)
    _fill(router, home)
    assert _decision(router, "fourth", LATER_S + 1.0) != home


@pytest.mark.parametrize("others", [SMALL, SMALL * 3 // 2])
def test_prompt_waits_at_its_warm_member_if_members_have_similar_memories(others: int) -> None:
    router, home = _warmed(SMALL, others)
    _fill(router, home)
    answer = router.on_request(LATER_S + 1.0, request("fourth", PROMPT, now=LATER_S + 1.0)).answer
    assert isinstance(answer, Queued)
    released = router.on_finished(LATER_S + 2.0, "second", None).outcomes
    assert [each.receipt.chosen for each in released if isinstance(each, Decision)] == [home]


def test_prompt_waits_at_its_small_member_if_answers_there_end_soon() -> None:
    router, home = _warmed(SMALL, LARGE)
    _fill(router, home)
    soon_s = LATER_S + ANSWER_S - 1.0
    assert isinstance(router.on_request(soon_s, request("fourth", PROMPT, now=soon_s)).answer, Queued)


def test_wait_counts_no_longer_after_the_member_reports_more_memory() -> None:
    router, home = _warmed(SMALL, LARGE)
    _fill(router, home)
    router.on_profile(LATER_S + 0.5, home, EngineProfile(kv_tokens=LARGE))
    assert _decision(router, "fourth", LATER_S + 1.0) == home


def test_cold_prompts_leave_out_the_small_member_while_its_memory_is_full() -> None:
    router, home = _warmed(SMALL, LARGE)
    _fill(router, home)
    for number in range(20):
        now, name = LATER_S + 1.0 + number, f"cold {number}"
        answer = router.on_request(now, request(name, text_of(4000, name), now=now)).answer
        assert isinstance(answer, Decision)
        assert answer.receipt.chosen != home
        router.on_first_token(now + 0.5, name)


def test_expected_wait_is_bounded_for_any_queue() -> None:
    fleet = Fleet(pool(2))
    for member, tokens in (("m-0", SMALL), ("m-1", LARGE)):
        fleet.on_profile(0.0, member, EngineProfile(kv_tokens=tokens))
    fleet.answers.add(ANSWER_S)
    for number in range(50):
        fleet.capacity.queue("m-0").add(
            QueuedRequest(
                request=request(f"{number}", PROMPT),
                key=Key(hash=1, blocks=1, tokens=1),
                pair=("m-0",),
                member="m-0",
                matched_tokens=0,
                compute_s=0.1,
                predicted_ttft_s=0.1,
                receipt=ANY,
            )
        )
    view = fleet.candidates.view(0.0, chain(PROMPT))
    assert view.candidate("m-0").queue_s == 3 * ANSWER_S
    assert view.candidate("m-1").queue_s == 0.0
