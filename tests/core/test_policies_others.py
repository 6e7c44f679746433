"""Tests of other systems' rules in constructed situations: each branch and its boundary, computed from the definition.

By default, prompts have 1000 tokens, the SLO is 5 s, and every member prefills 1000 tokens per second.
"""

from collections import Counter

import pytest

from builders import pool, request, text_of
from dualmap.policies.situation import Candidate
from dualmap.pools.pool import Engine, Queue, Routing
from dualmap.requests import Decision
from dualmap.router import PoolRouter
from situations import candidate, decide


def test_random_picks_every_member_equally_often() -> None:
    members = [candidate(id, requests=n, matched=100 * n) for n, id in enumerate("abcd")]
    picks = Counter(decide("random", *members, id=f"r{n}")[0] for n in range(800))
    assert sorted(picks) == list("abcd")
    assert min(picks.values()) > 150
    assert max(picks.values()) < 250


def test_least_requests_counts_requests_not_tokens() -> None:
    long, short = candidate("a", requests=2, pending=90_000, queue_s=90.0), candidate("b", requests=3)
    assert decide("least_requests", short, long) == ("a", "least-requests")


def test_power_of_two_picks_the_less_loaded_of_two_members() -> None:
    members = [candidate(id, requests=n) for n, id in enumerate("abcd")]
    picks = Counter(decide("power_of_two", *members, id=f"r{n}")[0] for n in range(1200))
    # Three of the six pairs contain the idlest member. The second idlest member wins two pairs, the third wins one
    # pair, and the busiest wins none.
    assert {id: round(count / 200) for id, count in picks.items()} == {"a": 3, "b": 2, "c": 1}


def test_cache_affinity_global_ignores_load() -> None:
    warm = candidate("c", matched=640, queue_s=99.0, pending=99_000, requests=99)
    for n in range(20):
        chosen = decide("cache_affinity_global", candidate("a"), candidate("b", matched=512), warm, id=f"r{n}")
        assert chosen == ("c", "longest-prefix")
    # Load also has no effect between members with equal matches.
    busy, idle = candidate("a", matched=512, requests=9), candidate("b", matched=512)
    assert {decide("cache_affinity_global", busy, idle, id=f"r{n}")[0] for n in range(20)} == {"a", "b"}


class TestPreble:
    def test_preble_with_match_over_half_picks_the_longest_match(self) -> None:
        busy = candidate("a", matched=501, queue_s=99.0, pending=99_000)
        assert decide("preble", candidate("b", matched=384), busy) == ("a", "exploit")

    def test_preble_with_equal_matches_picks_the_least_loaded(self) -> None:
        busy, less = candidate("a", matched=640, pending=20), candidate("b", matched=640, pending=10, requests=5)
        assert decide("preble", busy, less, candidate("c", matched=512)) == ("b", "exploit")

    def test_preble_with_match_of_half_or_less_uses_the_cost(self) -> None:
        warm = candidate("a", matched=500, queue_s=0.5, compute_s=0.5)
        # 0.2 + 0.7 < 0.5 + 0.5 < 0.2 + 0.9.
        assert decide("preble", warm, candidate("b", queue_s=0.2, compute_s=0.7)) == ("b", "explore")
        assert decide("preble", warm, candidate("b", queue_s=0.2, compute_s=0.9)) == ("a", "explore")


def test_dynamo_cost_is_new_prefill_plus_active_kv() -> None:
    cold = candidate("b", kv=50)
    # New plus active tokens: 200 + 840 < 1000 + 50 < 200 + 900.
    assert decide("dynamo", candidate("a", matched=800, kv=840), cold) == ("a", "least-blocks")
    assert decide("dynamo", candidate("a", matched=800, kv=900), cold) == ("b", "least-blocks")


def test_dynamo_cost_includes_unfinished_prefills() -> None:
    idle = candidate("b", kv=300)
    # Unfinished plus new plus active tokens: 200 + 1000 + 0 < 1000 + 300 < 400 + 1000 + 0.
    assert decide("dynamo", candidate("a", pending=200), idle) == ("a", "least-blocks")
    assert decide("dynamo", candidate("a", pending=400), idle) == ("b", "least-blocks")


def test_dynamo_counts_shared_blocks_in_flight_once() -> None:
    router = PoolRouter(pool(routing=Routing(policy="dynamo", queue=Queue(dispatch_window_s=float("inf")))))
    first = router.on_request(0.0, request("first", text_of(1000, "chat"))).answer
    assert isinstance(first, Decision)
    router.on_first_token(1.0, "first")
    # Other members hold nothing of the prompt: each would add the full prompt as prefill and as active blocks.
    for number in range(3):
        again = router.on_request(1.0, request(f"again-{number}", text_of(1000, "chat"))).answer
        assert isinstance(again, Decision)
        assert again.endpoints[0] == first.endpoints[0]
        router.on_first_token(1.0, f"again-{number}")


class TestAibrix:
    def test_aibrix_with_load_difference_over_8_ignores_prefixes(self) -> None:
        idle = candidate("b")
        assert decide("aibrix_prefix", candidate("a", matched=896, requests=9), idle) == ("b", "imbalanced")
        # The limit is mean plus one standard deviation, here 8 requests.
        assert decide("aibrix_prefix", candidate("a", matched=896, requests=8), idle) == ("a", "prefix-match")

    def test_aibrix_ignores_matches_of_members_above_one_sigma(self) -> None:
        # Mean 3, variance 14/3: no member above 5.16.
        best, second, idle = candidate("a", matched=896, requests=6), candidate("b", matched=256, requests=2), "c"
        assert decide("aibrix_prefix", best, second, candidate(idle, requests=1)) == ("b", "prefix-match")
        assert decide("aibrix_prefix", best, candidate("b", requests=2), candidate(idle, requests=1)) == (
            "c",
            "no-match",
        )

    def test_aibrix_with_equal_matches_picks_the_fewest_requests(self) -> None:
        members = candidate("a", matched=256, requests=3), candidate("b", matched=256, requests=2), candidate("c")
        assert decide("aibrix_prefix", *members)[0] == "b"


class TestSglang:
    @pytest.mark.parametrize(
        ("most", "fewest", "expected"),
        [
            (65, 0, ("b", "imbalanced")),
            (64, 0, ("a", "prefix-match")),  # The difference does not exceed 64.
            (200, 135, ("a", "prefix-match")),  # The difference is 65, but the ratio does not exceed 1.5 (202.5).
            (200, 133, ("b", "imbalanced")),
        ],
    )
    def test_sglang_load_is_unbalanced_above_both_thresholds(
        self, most: int, fewest: int, expected: tuple[str, str]
    ) -> None:
        warm, cold = candidate("a", matched=896, requests=most), candidate("b", requests=fewest)
        assert decide("sglang_cache_aware", warm, cold) == expected

    def test_cache_aware_match_must_exceed_the_threshold(self) -> None:
        idle = candidate("b")
        assert decide("sglang_cache_aware", candidate("a", matched=301, requests=1), idle) == ("a", "prefix-match")
        assert decide("sglang_cache_aware", candidate("a", matched=300, requests=1), idle) == ("b", "no-match")


class TestSmgSpill:
    @pytest.mark.parametrize(
        ("warm", "others", "rule"),
        [
            (6, (0, 0), "prefix-match"),  # Mean 2, margin 4: up to 6.
            (9, (0, 0), "spill"),  # Mean 3, margin 4: up to 7.
            (15, (6, 6), "prefix-match"),  # Mean 9, margin 2 * 3: up to 15, which is more than 1.5 times the mean.
            (17, (5, 5), "spill"),
            (150, (75, 75), "prefix-match"),  # Mean 100, margin 20: up to 150, which is 1.5 times the mean.
            (153, (74, 73), "spill"),
        ],
    )
    def test_smg_spill_leaves_the_match_only_if_overloaded(self, warm: int, others: tuple[int, int], rule: str) -> None:
        members = [candidate(id, requests=count) for id, count in zip("bc", others, strict=True)]
        chosen, fired = decide("smg_spill", candidate("a", matched=896, requests=warm), *members)
        assert (fired, chosen == "a") == (rule, rule == "prefix-match")

    def test_smg_spill_prefers_an_equal_match_to_a_spill(self) -> None:
        hot, holder, idle = candidate("a", matched=896, requests=12), candidate("b", matched=896, requests=2), "c"
        assert decide("smg_spill", hot, holder, candidate(idle)) == ("b", "prefix-match")

    def test_cache_aware_match_must_exceed_the_threshold(self) -> None:
        assert decide("smg_spill", candidate("a", matched=300, requests=1), candidate("b")) == ("b", "no-match")


@pytest.mark.parametrize(
    ("warm", "cold", "expected"),
    [
        (11, 9, "a"),  # 0.6 - 1/10 against 1/10.
        (14, 6, "b"),  # 0.6 - 4/10 against 4/10.
        (1, 0, "b"),  # A mean of 0.5 counts as 1: 0.6 - 0.5 against 0.5.
    ],
)
def test_stack_loadaware_compares_match_with_relative_load(warm: int, cold: int, expected: str) -> None:
    members = candidate("a", matched=600, requests=warm), candidate("b", requests=cold)
    assert decide("stack_loadaware", *members) == (expected, "best-score")


@pytest.mark.parametrize(
    ("warm", "expected"),
    [
        (candidate("a", pending=1000, kv=500_000, matched=800), "b"),  # 0 + 1 + 2.4 against 2 + 2 + 0.
        (candidate("a", pending=1000, kv=0, matched=896), "a"),  # 0 + 2 + 2.688 against 4.
        (candidate("a", pending=0, kv=500_000, matched=384), "a"),  # Equal queues both score 2: 4.152.
        (candidate("a", pending=0, kv=500_000, matched=256), "b"),  # 2 + 1 + 0.768.
        (candidate("a", pending=1, kv=0, matched=640), "b"),  # The longest queue always scores 0: 3.92.
        (
            candidate("a", pending=0, kv=5_000_000, matched=640),
            "b",
        ),  # A full cache scores 0: 3.92.
        (candidate("a", pending=0, kv=5_000_000, matched=768), "a"),  # 4.304.
    ],
)
def test_llmd_default_picks_by_the_sum_of_three_scores(warm: Candidate, expected: str) -> None:
    assert decide("llmd_default", warm, candidate("b")) == (expected, "best-score")


class TestLlmdSticky:
    def test_llmd_sticky_prefers_members_with_match_of_four_fifths(self) -> None:
        holder, nearly = candidate("a", matched=800, kv=5000), candidate("b", matched=799)
        assert decide("llmd_sticky", holder, nearly) == ("a", "sticky")
        assert decide("llmd_sticky", holder, candidate("b", matched=800, kv=4999))[0] == "b"

    def test_llmd_sticky_without_match_uses_tokens_in_flight(self) -> None:
        members = candidate("a", matched=799, kv=10, requests=1), candidate("b", kv=9, requests=5)
        assert decide("llmd_sticky", *members) == ("b", "no-match")

    def test_llmd_sticky_skips_members_over_18_s_slower(self) -> None:
        # The best member has its first token after 0.1 s.
        slow, idle = candidate("a", matched=896, queue_s=17.9, kv=9000), candidate("b", kv=8000)
        assert decide("llmd_sticky", slow, idle) == ("a", "sticky")
        assert decide("llmd_sticky", slow._replace(queue_s=18.1), idle) == ("b", "penalty")
        # If one member with a match is fast enough, all members with a match are candidates.
        other = candidate("c", matched=896, queue_s=1.0, kv=9500)
        assert decide("llmd_sticky", slow._replace(queue_s=18.1), idle, other) == ("a", "sticky")


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ((2, 2, 2), ("c", "affinity")),  # ceil(1.25 * 7 / 3) = 3.
        ((3, 1, 1), ("b", "bounded")),  # ceil(1.25 * 6 / 3) = 3.
        ((3, 3, 0), ("a", "bounded")),  # ceil(1.25 * 7 / 3) = 3.
        ((2, 1, 1), ("c", "affinity")),  # ceil(1.25 * 5 / 3) = 3.
        ((0, 9, 9), ("c", "affinity")),
        ((1, 0, 0), ("b", "bounded")),  # ceil(1.25 * 2 / 3) = 1.
    ],
)
def test_chwbl_picks_the_first_ring_member_within_the_load_bound(
    loads: tuple[int, int, int], expected: tuple[str, str]
) -> None:
    on_the_way = [candidate(id, requests=count) for id, count in zip("cba", loads, strict=True)]
    assert decide("chwbl", *on_the_way) == expected


def test_lmetric_cost_is_uncomputed_tokens_times_requests() -> None:
    warm = candidate("a", matched=800, pending=100, requests=2)
    # (200 + 100) * 3 < (1000 + 0) * 1 < (200 + 100) * 4.
    assert decide("lmetric", warm, candidate("b")) == ("a", "least-product")
    assert decide("lmetric", warm._replace(in_flight=3), candidate("b")) == ("b", "least-product")
    # (200 + 100) * 3 < (1000 + 0) * 1 < (200 + 134) * 3.
    assert decide("lmetric", warm._replace(pending_tokens=134), candidate("b"))[0] == "b"


@pytest.mark.parametrize(("pending", "expected"), [(390, "a"), (410, "b")])
def test_linear_score_weighs_match_and_relative_load_equally(pending: int, expected: str) -> None:
    # 0.8 - pending / 1000 against 0.4 for an idle member with half of the match; "c" has the most pending tokens.
    members = candidate("a", matched=800, pending=pending), candidate("b", matched=400), candidate("c", pending=1000)
    assert decide("linear_score", *members) == (expected, "best-score")


class TestLlumnix:
    def test_llumnix_cost_is_uncached_plus_pending_tokens(self) -> None:
        warm = candidate("a", matched=1800, pending=1700)
        # 200 + 1700 < 2000 + 0 < 200 + 1900; a member without a match computes the whole prompt.
        assert decide("llumnix", warm, candidate("b"), prompt=2000) == ("a", "cache-aware")
        assert decide("llumnix", warm._replace(pending_tokens=1900), candidate("b"), prompt=2000)[0] == "b"

    def test_llumnix_ignores_caches_for_short_prompts(self) -> None:
        warm, idle = candidate("a", matched=896, pending=10), candidate("b")
        assert decide("llumnix", warm, idle, prompt=1023) == ("b", "short-prompt")
        assert decide("llumnix", warm, idle, prompt=1024) == ("a", "cache-aware")

    def test_llumnix_with_equal_costs_picks_the_fewest_requests(self) -> None:
        members = candidate("a", requests=2), candidate("b", requests=1)
        assert {decide("llumnix", *members, prompt=2000, id=f"r{n}")[0] for n in range(20)} == {"b"}


class TestEar:
    hot = candidate("a", matched=896, pending=5001)
    less = candidate("c", pending=4000)
    more = candidate("b", pending=9000)

    def test_ear_sends_new_session_to_member_with_least_pending(self) -> None:
        assert decide("ear", self.hot, self.more, self.less) == ("c", "new-session")

    def test_ear_sends_turn_to_session_host_within_the_slo(self) -> None:
        host = self.hot._replace(pending_tokens=5000)
        assert decide("ear", host, self.more, self.less, host=host) == ("a", "session-host")

    def test_ear_moves_session_of_hot_host_to_least_pending_member(self) -> None:
        assert decide("ear", self.hot, self.more, self.less, host=self.hot) == ("c", "session-move")

    def test_ear_cooldown_prevents_a_session_move(self) -> None:
        chosen = decide("ear", self.hot, self.more, self.less, host=self.hot, may_move=False)
        assert chosen == ("a", "session-host")

    def test_ear_moves_no_session_to_a_busy_or_full_member(self) -> None:
        as_busy = self.less._replace(pending_tokens=5001)
        assert decide("ear", self.hot, self.more, as_busy, host=self.hot) == ("a", "session-host")
        full = self.less._replace(active_kv_tokens=9001)
        assert decide("ear", self.hot, self.more, full, host=self.hot, room=10_000) == ("a", "session-host")
        just_room = self.less._replace(active_kv_tokens=9000)
        assert decide("ear", self.hot, self.more, just_room, host=self.hot, room=10_000) == ("c", "session-move")

    def test_ear_session_moves_once_and_then_stays_for_the_cooldown(self) -> None:
        """The router supplies the binding, the load and the cooldown."""
        routing = Routing(policy="ear", queue=Queue(dispatch_window_s=1e9))
        router = PoolRouter(pool(3, routing=routing, engine=Engine(prefill_tokens_per_second=1000.0)))

        def turn(number: int, now: float) -> tuple[str, str]:
            asked = request(f"turn {number}", text_of(1024, "chat"), now=now)._replace(session=7)
            outcome = router.on_request(now, asked).answer
            assert isinstance(outcome, Decision)
            router.on_first_token(now, asked.id)
            return outcome.receipt.chosen, outcome.receipt.rule

        def load(member: str, tokens: int, now: float) -> None:
            endpoint = next(each.endpoint for each in router.pool.members if each.id == member)
            asked = request(f"load {member} {now}", text_of(tokens, f"{member} {now}"), now=now)
            assert isinstance(router.on_request(now, asked._replace(subset=frozenset({endpoint}))).answer, Decision)

        first, rule = turn(1, 0.0)
        assert rule == "new-session"
        load(first, 4000, 0.1)
        assert turn(2, 0.2) == (first, "session-host")
        # The first token of this turn has arrived, so earlier requests count as prefilled.
        load(first, 6000, 0.3)
        second, rule = turn(3, 0.4)
        assert rule == "session-move"
        assert second != first
        load(second, 9000, 0.5)
        assert turn(4, 1.0) == (second, "session-host")
        load(second, 9000, 30.4)
        assert turn(5, 30.5)[1] == "session-move"
