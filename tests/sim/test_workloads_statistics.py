"""Tests of a trace's statistics (shared blocks, skew of sessions, arrivals), and of random draws."""

import math
from random import Random

import pytest

from dualmap_sim.workloads.draws import Deck, LogNormal, Quantiles
from dualmap_sim.workloads.statistics import (
    Asked,
    Fact,
    arrival_cv,
    compare,
    fact_lines,
    ideal_block_hit_rate,
    ideal_block_tokens,
    input_per_output,
    intra_session_share,
    own_session_hit_rate,
    prefix_share,
    session_share,
    share_reusing,
    shared_prefix_rates,
)
from dualmap_sim.workloads.trace import Trace, TraceRequest


def trace(*prompts: tuple[tuple[int, ...], int], sessions=(), arrivals_s=(), closed_loop=False) -> Trace:
    return Trace(
        name="t",
        block_tokens=100,
        closed_loop=closed_loop,
        requests=tuple(
            TraceRequest(
                arrival_s=arrivals_s[number] if arrivals_s else 0.0,
                blocks=blocks,
                input_tokens=tokens,
                output_tokens=10,
                session=sessions[number] if sessions else None,
            )
            for number, (blocks, tokens) in enumerate(prompts)
        ),
    )


class TestSharing:
    def test_ideal_reuse_counts_only_complete_leading_blocks(self):
        grown = trace(((1, 2), 150), ((1, 2), 200), ((1, 2, 3), 250), ((9, 2), 200))

        assert ideal_block_tokens(grown) == (0, 100, 200, 0)
        assert ideal_block_hit_rate(grown) == 300 / 800

    def test_shared_prefix_rates_are_shares_of_each_prompt_in_order(self):
        grown = trace(((1, 2), 200), ((1, 2, 3, 4), 400), ((1, 2, 3), 250))

        assert shared_prefix_rates(grown) == (0.0, 0.5, 0.8)
        assert share_reusing(grown, 0.5) == pytest.approx(2 / 3)
        assert share_reusing(grown, 0.51) == pytest.approx(1 / 3)

    def test_prefixes_are_ranked_by_number_of_requests(self):
        mixed = trace(((1, 2), 200), ((1, 2), 200), ((1, 3), 200), ((4,), 100))

        assert [prefix_share(mixed, rank=rank) for rank in range(3)] == [0.75, 0.25, 0.0]
        assert [prefix_share(mixed, blocks=2, rank=rank) for rank in range(2)] == [0.5, 0.25]

    def test_reuse_from_other_sessions_is_not_intra_session_reuse(self):
        two = trace(((1, 2), 200), ((1, 2, 3), 300), ((1, 8), 200), ((1, 8, 9), 300), sessions=(0, 0, 1, 1))

        assert intra_session_share(two) == pytest.approx(3 / 5), "2 blocks of session 0, block 8 of session 1"
        assert own_session_hit_rate(two) == pytest.approx(400 / 1000), "alone, session 1 has block 1 too"
        assert ideal_block_hit_rate(two) == pytest.approx(500 / 1000)

    def test_trace_without_sessions_has_no_intra_session_reuse(self):
        nameless = trace(((1,), 100), ((1,), 100))

        assert (intra_session_share(nameless), own_session_hit_rate(nameless)) == (0.0, 0.0)
        assert math.isnan(intra_session_share(trace(((1,), 100))))


class TestSkewAndArrivals:
    def test_top_sessions_share_includes_a_fraction_of_the_last_session(self):
        four = trace(
            ((1,), 60), ((1, 2, 3), 300), ((1,), 40), ((2,), 100), ((3, 4, 5, 6, 7), 500), sessions=(0, 1, 0, 2, 3)
        )

        assert session_share(four, top=0.25) == 0.5
        assert session_share(four, top=0.375) == pytest.approx(0.65)
        assert session_share(four, top=1.0) == 1.0
        assert math.isnan(session_share(trace(((1,), 100)), top=0.5))

    def test_arrival_variation_matches_the_definition(self):
        prompts = [((1,), 100)] * 4

        assert arrival_cv(trace(*prompts, arrivals_s=(0.0, 1.0, 2.0, 3.0))) == 0.0
        assert arrival_cv(trace(*prompts, arrivals_s=(0.0, 0.0, 2.0, 2.0))) == pytest.approx(2**0.5)
        assert math.isnan(arrival_cv(trace(*prompts)))

    def test_arrival_variation_of_closed_loop_uses_session_starts(self):
        looped = {"sessions": (0, 0, 1, 2), "arrivals_s": (0.0, 0.0, 2.0, 4.0)}

        assert arrival_cv(trace(*[((1,), 100)] * 4, **looped, closed_loop=True)) == 0.0
        assert arrival_cv(trace(*[((1,), 100)] * 4, **looped)) > 0.5

    def test_input_tokens_per_output_token_is_computed(self):
        assert input_per_output(trace(((1,), 100), ((2, 3), 200))) == 15.0


class TestCompare:
    def test_facts_list_requested_values_first_and_once(self):
        one = trace(((1,), 100))

        facts = compare(one, [Asked("input tokens, mean", 99, lambda _: 100.0), Asked("answers", 1, lambda _: 2.0)])

        assert facts[:2] == (
            Fact(name="input tokens, mean", asked=99, produced=100.0),
            Fact(name="answers", asked=1, produced=2.0),
        )
        assert len({fact.name for fact in facts}) == len(facts)
        assert all(fact.asked is None for fact in facts[2:])

    def test_workload_fact_lines_are_aligned(self):
        facts = (
            Fact(name="long name", asked=8596, produced=8483.4),
            Fact(name="rate", asked=0.59, produced=0.5871),
            Fact(name="none", asked=None, produced=math.nan),
        )

        assert [line.split() for line in fact_lines(facts)] == [
            ["asked", "produced"],
            ["long", "name", "8,596", "8,483"],
            ["rate", "0.590", "0.587"],
            ["none", "-"],
        ]


class TestDraws:
    def test_stratified_deck_draws_each_stratum_once_per_round(self):
        deck = Deck(Random(1), strata=10)
        rounds = [[int(deck.draw() * 10) for _ in range(10)] for _ in range(3)]

        assert all(sorted(one) == list(range(10)) for one in rounds)
        assert rounds[0] != rounds[1]
        assert Deck(Random(2), strata=10).draw() == Deck(Random(2), strata=10).draw()

    def test_quantiles_are_interpolated_linearly(self):
        table = Quantiles((0, 0.5, 1), (0, 10, 110))

        assert [table.at(level) for level in (0.0, 0.25, 0.5, 0.75)] == [0.0, 5.0, 10.0, 60.0]
        assert table.scaled(2).at(0.25) == 10.0

    def test_log_normal_draws_are_truncated_at_both_ends(self):
        lengths = LogNormal(median=100, sigma=1.0)

        assert lengths.at(0.5) == pytest.approx(100)
        assert lengths.at(0.8413447) == pytest.approx(100 * math.e, rel=1e-5)
        assert 0 < lengths.at(0.0) < lengths.at(1.0) < 100 * math.exp(4)

    def test_random_length_is_at_least_one_token(self):
        assert Deck(Random(1), strata=10).tokens(Quantiles((0, 1), (0, 0.1))) == 1
