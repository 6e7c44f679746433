"""Tests of the decisions of a pool's router: pairs, spills, hotness, subsets, rejections, and the receipt."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import members, pool, request, text_of
from core.routers import decide, loads
from dualmap.keys.hotness import MIN_SPLIT_REQUESTS
from dualmap.pools.pool import Engine, Member, MemberState, ReceiptFields
from dualmap.requests import Decision, Reason, Rejection
from dualmap.router import PoolRouter


def test_conversation_stays_at_the_member_with_its_cached_prefix() -> None:
    router = PoolRouter(pool())
    history, chosen = text_of(600, "conversation"), set()
    for turn in range(6):
        decision = decide(router, str(turn), history, float(turn))
        chosen.add(decision.receipt.chosen)
        if turn:
            assert decision.receipt.rule == "pair-warm"
            assert decision.receipt.matched_tokens == (600 + 300 * (turn - 1)) // 128 * 128
        router.on_first_token(turn + 0.2, str(turn))
        router.on_finished(turn + 0.5, str(turn))
        history += text_of(300, f"turn {turn}")
    assert len(chosen) == 1
    assert loads(router) == (0, 0, 0)


@given(common=st.text(min_size=1024, max_size=1500), tails=st.lists(st.text(max_size=800), min_size=2, max_size=5))
@settings(max_examples=30)
def test_prompts_with_equal_prefix_have_the_same_pair(common: str, tails: list[str]) -> None:
    router = PoolRouter(pool())
    assert len({decide(router, str(n), common + tail).receipt.pair for n, tail in enumerate(tails)}) == 1


def test_decision_counts_only_full_blocks_as_cached() -> None:
    router = PoolRouter(pool(1))
    for id in ("1", "2"):
        decide(router, id, text_of(100, "short"))
    receipt = decide(router, "3", text_of(100, "short")).receipt
    assert (receipt.matched_tokens, receipt.key.blocks) == (0, 1)


def test_destination_lists_chosen_member_then_other_pair_member() -> None:
    router = PoolRouter(pool())
    addresses = {each.id: each.endpoint for each in router.pool.members}
    for n in range(50):
        decision = decide(router, str(n), text_of(500, str(n)))
        receipt = decision.receipt
        other = receipt.pair[1] if receipt.chosen == receipt.pair[0] else receipt.pair[0]
        assert decision.endpoints == (addresses[receipt.chosen], addresses[other])
        assert decision.destination == f"{receipt.address},{addresses[other]}"


@given(requests=st.integers(1, MIN_SPLIT_REQUESTS - 1), others=st.lists(st.integers(0, 8000), min_size=32, max_size=32))
@settings(max_examples=30)
def test_decision_hit_rate_reaches_the_bound_of_two_candidates(requests: int, others: list[int]) -> None:
    # Paper section 2.3: m requests with one prefix have at least m - 2 cache hits, because only the first request at
    # each of the two candidates misses. A prefix that becomes hot changes its key, and misses once per new pair.
    router, hits = PoolRouter(pool(policy="dualmap_paper")), 0
    for n in range(requests):
        hits += decide(router, str(n), text_of(512, "shared"), float(n)).receipt.matched_tokens == 512
        decide(router, f"other {n}", text_of(others[n], f"other {n}"), float(n))
        if n % 3:
            router.on_first_token(n + 0.1, str(n))
    assert hits >= requests - 2


def test_overloaded_pair_spills_requests_to_the_pool() -> None:
    router = PoolRouter(pool())
    decisions = [decide(router, str(n), text_of(2000, "tool") + text_of(6000, f"q{n}")).receipt for n in range(30)]
    assert len({receipt.pair for receipt in decisions}) == 1
    assert [receipt.rule for receipt in decisions][:2] == ["pair-equal", "pair-warm"]
    assert {receipt.chosen for receipt in decisions if receipt.rule == "spill"} == {f"m-{n}" for n in range(8)} - set(
        decisions[0].pair
    )
    chosen = Counter(receipt.chosen for receipt in decisions)
    assert {each.id: each.in_flight for each in router.status().endpoints} == chosen


def test_decision_counts_queue_time_against_the_slo() -> None:
    router = PoolRouter(pool())
    text = text_of(2000, "x")
    decide(router, "1", text)
    router.on_first_token(0.3, "1")
    patient = router.on_request(10.0, request("2", text, now=10.0)).answer
    late = router.on_request(10.0, request("3", text, now=7.0)).answer
    assert isinstance(patient, Decision)
    assert isinstance(late, Decision)
    assert patient.receipt.rule == "pair-warm"
    assert late.receipt.rule in ("pair-marginal", "spill")
    assert late.receipt.predicted_ttft_s >= 3.0


def test_request_without_eligible_member_is_rejected() -> None:
    refusal = Rejection(request_id="1", reason=Reason.NO_ENDPOINT, retry_after_s=30.0)
    assert PoolRouter(pool(0)).on_request(0.0, request("1", "x")).answer == refusal
    assert PoolRouter(pool(0)).any_endpoints(None) == ()
    draining = replace(pool(0), members=members(2, state=MemberState.DRAINING))
    assert PoolRouter(draining).on_request(0.0, request("1", "x")).answer == refusal
    assert PoolRouter(draining).any_endpoints(None) == ()


def test_single_member_is_the_only_destination() -> None:
    decision = decide(PoolRouter(pool(1)), "1", "hello")
    assert (decision.receipt.pair, decision.destination) == (("m-0",), "10.0.0.1:8000")


@pytest.mark.parametrize(
    ("subset", "allowed"),
    [
        ({"10.0.0.3:8000"}, {"m-2"}),
        ({"10.0.0.3"}, {"m-2"}),
        ({"10.0.0.3:9999"}, set()),
        (set(), set()),
        ({"10.0.0.1", "10.0.0.2:8000", "10.0.0.99"}, {"m-0", "m-1"}),
    ],
)
def test_subset_hint_restricts_requests_with_and_without_body(subset: set[str], allowed: set[str]) -> None:
    router = PoolRouter(pool())
    for n in range(20):
        decision = router.on_request(0.0, request(str(n), text_of(400, str(n)), subset=frozenset(subset))).answer
        if not allowed:
            assert isinstance(decision, Rejection)
            continue
        assert isinstance(decision, Decision)
        assert set(decision.receipt.pair) <= allowed
        assert len(decision.endpoints) == min(2, len(allowed))
    ids = {each.endpoint: each.id for each in router.pool.members}
    served = {ids[endpoint] for _ in range(8) for endpoint in router.any_endpoints(frozenset(subset))}
    assert served == allowed


def test_bodiless_requests_are_spread_round_robin() -> None:
    router = PoolRouter(pool(3))
    firsts = Counter(router.any_endpoints(None)[0] for _ in range(9))
    assert set(firsts.values()) == {3}


def test_subset_hint_does_not_change_the_hotness_of_the_pool() -> None:
    router = PoolRouter(pool(8))
    for n in range(300):
        shared = text_of(1500, "tool") if n % 6 == 0 else text_of(1500, f"other {n}")
        decide(router, str(n), shared + text_of(400, f"question {n}"), 1.0)
    probe = text_of(1500, "tool") + text_of(400, "probe")
    before = decide(router, "before", probe, 1.0).receipt.key
    router.on_request(1.0, request("s", probe, now=1.0, subset=frozenset({"10.0.0.1", "10.0.0.2"})))
    assert before.blocks > 10
    assert decide(router, "after", probe, 1.0).receipt.key == before


def test_round_robin_is_not_skewed_by_bodiless_requests() -> None:
    router = PoolRouter(pool(2, policy="round_robin"))
    chosen = []
    for n in range(10):
        router.any_endpoints(None)
        chosen.append(decide(router, str(n), "hello").receipt.chosen)
    assert Counter(chosen) == {"m-0": 5, "m-1": 5}


def test_hot_prefix_spreads_over_more_members() -> None:
    router = PoolRouter(pool(8))
    seen_early, seen_late = set(), set()
    for n in range(400):
        receipt = decide(router, str(n), text_of(1500, "tool") + text_of(400, f"question {n}"), n * 0.1).receipt
        (seen_early if n < 20 else seen_late).update(receipt.pair)
        router.on_first_token(n * 0.1 + 0.05, str(n))
        router.on_finished(n * 0.1 + 0.06, str(n))
    assert len(seen_early) == 2
    assert len(seen_late) == 8


def test_prompts_without_text_spread_over_members() -> None:
    router = PoolRouter(pool(8))
    receipts = [decide(router, str(n), "").receipt for n in range(200)]
    assert {receipt.key.blocks for receipt in receipts} == {0}
    assert len({receipt.pair for receipt in receipts}) > 20


def test_receipt_has_header_and_json_form() -> None:
    odd = Member(id="a:b/c@d", address="10.0.0.1", port=80)
    router = PoolRouter(replace(pool(0, engine=Engine()), members=(odd,)))
    receipt = decide(router, "1", text_of(300, "x")).receipt
    assert receipt.header() == (
        'policy=dualmap, rule="lone", pair=("a:b/c@d"), chosen="a:b/c@d", matched=0, prompt=300, key=2, '
        'source="records"'
    )
    assert receipt.header(ReceiptFields.CHOSEN) == 'policy=dualmap, chosen="a:b/c@d", prompt=300'
    document = receipt.as_json()
    assert document["key"] == {"hash": f"{receipt.key.hash:016x}", "blocks": 2, "tokens": 256}
    assert document["pair"] == ["a:b/c@d"]
    assert isinstance(document["candidates"], list)


SCRIPT = """
from builders import pool, request, text_of
from dualmap.router import PoolRouter
import hashlib
digest = hashlib.sha256()
for policy in ("dualmap", "dualmap_paper", "min_ttft", "least_loaded"):
    router = PoolRouter(pool(8, policy=policy))
    for n in range(120):
        asked = request(str(n), text_of(300 + 70 * (n % 9), f"p{n % 7}"), now=n * 0.05)
        decision = router.on_request(n * 0.05, asked).answer
        digest.update(repr(decision).encode())
        if n % 3 == 0:
            router.on_first_token(n * 0.05 + 0.04, str(n))
print(digest.hexdigest())
"""


def test_decisions_are_independent_of_the_hash_seed() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 65
