"""Tests of claims: prompts that a member will compute, before its engine reports their blocks."""

import pytest

from dualmap.fleet import claims
from dualmap.fleet.claims import CLAIM_MAX_S, CLAIM_S, Claims


def chain(*keys: int) -> tuple[int, ...]:
    return keys


def test_claimed_prompt_matches_its_first_blocks():
    made = Claims()
    made.add(0.0, "r", chain(1, 2, 3), expected_s=1.0)
    assert made.leading_blocks(1.0, chain(1, 2, 3, 4, 5)) == 3
    assert made.leading_blocks(1.0, chain(1, 2, 9)) == 2
    assert made.leading_blocks(1.0, chain(9, 8)) == 0
    assert made.leading_blocks(1.0, chain()) == 0


def test_claim_ends_after_its_time():
    made = Claims()
    made.add(0.0, "r", chain(1), expected_s=2.0)
    assert made.leading_blocks(1.9 + CLAIM_S, chain(1)) == 1
    assert made.leading_blocks(2.0 + CLAIM_S, chain(1)) == 0


def test_claim_has_a_longest_time():
    made = Claims()
    made.add(0.0, "r", chain(1), expected_s=1e9)
    assert made.leading_blocks(CLAIM_MAX_S, chain(1)) == 0


def test_second_claim_of_a_request_extends_the_first():
    made = Claims()
    made.add(0.0, "r", chain(1), expected_s=0.0)
    made.add(3.0, "r", chain(1), expected_s=0.0)
    assert made.leading_blocks(CLAIM_S + 1, chain(1)) == 1
    made.withdraw("r")
    assert made.leading_blocks(CLAIM_S + 1, chain(1)) == 0


def test_withdrawn_claim_keeps_the_blocks_of_others():
    made = Claims()
    made.add(0.0, "a", chain(1, 2, 3), expected_s=0.0)
    made.add(0.0, "b", chain(1, 2, 4), expected_s=0.0)
    made.withdraw("a")
    made.withdraw("unknown")
    assert made.leading_blocks(1.0, chain(1, 2, 3)) == 2


def test_cleared_claims_match_nothing():
    made = Claims()
    made.add(0.0, "a", chain(1), expected_s=0.0)
    made.clear()
    made.withdraw("a")
    assert made.leading_blocks(1.0, chain(1)) == 0


def test_claim_ends_with_the_report_of_its_last_block():
    made = Claims()
    for request in ("a", "b"):
        made.add(0.0, request, chain(1, 2, 3), expected_s=0.0)
    made.add(0.0, "longer", chain(1, 2, 3, 4), expected_s=0.0)
    assert all(key in made.awaited for key in (3, 4))
    assert 2 not in made.awaited
    made.on_reported(3)
    made.on_reported(2)
    assert 3 not in made.awaited
    made.withdraw("longer")
    assert made.leading_blocks(1.0, chain(1, 2, 3, 4)) == 0
    assert 4 not in made.awaited


def test_claimed_blocks_are_bounded_and_the_oldest_end(monkeypatch):
    monkeypatch.setattr(claims, "CLAIMED_BLOCKS_MAX", 4)
    made = Claims()
    made.add(0.0, "too long", chain(1, 2, 3, 4, 5), expected_s=0.0)
    made.add(0.0, "a", chain(1, 2), expected_s=0.0)
    made.add(0.0, "b", chain(3, 4), expected_s=0.0)
    made.add(0.0, "c", chain(5), expected_s=0.0)
    assert [made.leading_blocks(1.0, chain(first)) for first in (1, 3, 5)] == [0, 1, 1]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_claims_end_in_the_order_of_their_times(order):
    made = Claims()
    times = {"a": 1.0, "b": 30.0}
    for each in order:
        made.add(0.0, each, chain(ord(each)), expected_s=times[each])
    assert made.leading_blocks(10.0, chain(ord("a"))) == 0
    assert made.leading_blocks(10.0, chain(ord("b"))) == 1
