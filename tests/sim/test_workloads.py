"""Tests of traces: transformations, statistics, prompts, and the default workload."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.prompts.blocks import BYTES_PER_TOKEN, chain_blocks
from dualmap_sim.presets import PRESETS, DecodeCost, PrefillCost
from dualmap_sim.workloads.statistics import decode_work_s, ideal_cached_tokens, measure, prefill_work_s
from dualmap_sim.workloads.synthetic import default_workload
from dualmap_sim.workloads.text import block_text, prompt_text
from dualmap_sim.workloads.trace import Trace, TraceRequest


def request(arrival_s=0.0, blocks=(1, 2), input_tokens=200, output_tokens=10, **more) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s, blocks=blocks, input_tokens=input_tokens, output_tokens=output_tokens, **more
    )


def trace(*requests: TraceRequest, block_tokens: int = 100) -> Trace:
    return Trace(name="t", block_tokens=block_tokens, requests=requests)


class TestTrace:
    def test_trace_at_rate_scales_arrivals_and_keeps_bursts(self):
        scaled = trace(request(10.0), request(10.0), request(12.0), request(14.0)).at_rate(8.0)

        assert [r.arrival_s for r in scaled.requests] == [0.0, 0.0, 0.25, 0.5]
        assert len(scaled.requests) / scaled.duration_s == 8.0

    def test_trace_at_rate_keeps_simultaneous_requests_together(self):
        assert [r.arrival_s for r in trace(request(3.0), request(3.0)).at_rate(8.0).requests] == [0.0, 0.0]

    def test_trace_sped_up_divides_every_arrival_time(self):
        assert [r.arrival_s for r in trace(request(1.0), request(6.0)).sped_up(4).requests] == [0.25, 1.5]

    @pytest.mark.parametrize(
        ("cap", "blocks", "tokens"), [(200, (1, 2), 200), (199, (1, 2), 199), (100, (1,), 100), (101, (1, 2), 101)]
    )
    def test_trace_cap_cuts_prompts_and_their_blocks(self, cap, blocks, tokens):
        (capped,) = trace(request()).capped(cap).requests

        assert (capped.blocks, capped.input_tokens) == (blocks, tokens)

    @pytest.mark.parametrize(("cap", "longer"), [(request().input_tokens, 0), (request().input_tokens - 1, 1)])
    def test_trace_longer_than_counts_prompts_over_the_cap(self, cap, longer):
        assert trace(request()).longer_than(cap) == longer


class TestClosedLoop:
    """Three sessions; the second session pauses, and the third session has only one request."""

    def closed(self) -> Trace:
        return Trace(
            name="t",
            block_tokens=100,
            closed_loop=True,
            requests=(
                request(10.0, session=1),
                request(10.0, session=1, turn=1),
                request(12.0, session=2),
                request(13.0, session=2, turn=1, pause_s=1.0),
                request(20.0, session=3),
            ),
        )

    def test_closed_loop_at_rate_scales_session_starts_but_not_pauses(self):
        scaled = self.closed().at_rate(1.0)

        assert [r.arrival_s for r in scaled.requests] == [0.0, 0.0, 1.0, 2.0, 5.0]
        assert scaled.requests[3].pause_s == 1.0
        assert scaled.closed_loop

    def test_closed_loop_at_rate_keeps_requests_ordered(self):
        scaled = self.closed().at_rate(5.0)

        assert [(r.arrival_s, r.session, r.turn) for r in scaled.requests] == [
            (0.0, 1, 0),
            (0.0, 1, 1),
            (0.0, 2, 0),
            (0.0, 3, 0),
            (1.0, 2, 1),
        ], "the pause of a second alone takes the time of five requests"

    def test_closed_loop_at_unreachable_rate_starts_sessions_at_once(self):
        assert [r.arrival_s for r in self.closed().at_rate(100.0).requests] == [0.0, 0.0, 0.0, 0.0, 1.0]

    def test_closed_loop_sped_up_keeps_pauses(self):
        assert [r.arrival_s for r in self.closed().sped_up(2).requests] == [5.0, 5.0, 6.0, 7.0, 10.0]


class TestText:
    def test_equal_block_ids_give_equal_text_of_estimated_length(self):
        assert block_text(7, tokens=128) == block_text(7, tokens=128)
        assert block_text(7, tokens=128) != block_text(8, tokens=128)
        assert len(block_text(7, tokens=128)) == 128 * BYTES_PER_TOKEN

    def test_partial_block_text_is_a_prefix_of_the_block_text(self):
        assert block_text(7, tokens=128).startswith(block_text(7, tokens=33))

    @given(st.integers(1, 1000))
    def test_prompt_has_exactly_the_input_tokens(self, tokens):
        blocks = tuple(range(-(-tokens // 100)))

        text = prompt_text(request(blocks=blocks, input_tokens=tokens), block_tokens=100)

        assert len(text) == tokens * BYTES_PER_TOKEN

    def test_prompts_share_as_many_router_blocks_as_block_ids(self):
        one = prompt_text(request(blocks=(1, 2, 3), input_tokens=300), block_tokens=100)
        two = prompt_text(request(blocks=(1, 2, 4), input_tokens=300), block_tokens=100)

        chains = [chain_blocks(text.encode(), root=0, block_tokens=100).hashes for text in (one, two)]

        assert [a == b for a, b in zip(*chains, strict=True)] == [True, True, False]


class TestStatistics:
    def test_ideal_cache_counts_leading_blocks(self):
        same = trace(
            request(blocks=(1, 2), input_tokens=200),
            request(blocks=(1, 3), input_tokens=200),
            request(blocks=(9, 2), input_tokens=200),
            request(blocks=(1, 3), input_tokens=150),
        )

        assert ideal_cached_tokens(same) == (0, 100, 0, 150)

    def test_ideal_cache_counts_partial_blocks(self):
        grown = trace(
            request(blocks=(1, 2), input_tokens=130),
            request(blocks=(1, 2, 3), input_tokens=250),
            request(blocks=(1, 2, 3), input_tokens=250),
        )

        assert ideal_cached_tokens(grown) == (0, 130, 250)

    def test_trace_facts_have_means_and_ideal_hit_rate(self):
        facts = measure(
            trace(
                request(blocks=(1,), input_tokens=100, output_tokens=10, session=4),
                request(blocks=(1, 2), input_tokens=200, output_tokens=30, session=4),
            )
        )

        assert (facts.requests, facts.sessions, facts.input_tokens_longest) == (2, 1, 200)
        assert (facts.input_tokens_mean, facts.output_tokens_mean) == (150.0, 20.0)
        assert facts.ideal_hit_rate == pytest.approx(100 / 300)

    def test_trace_without_sessions_has_zero_sessions(self):
        assert measure(trace(request(session=1), request())).sessions is None

    def test_prefill_work_is_computed_with_and_without_reuse(self):
        cost = PrefillCost(overhead_s=1.0, tokens_per_s=100.0, attention=0.0, load_tokens_per_s=1000.0)
        twice = trace(request(blocks=(1,), input_tokens=100), request(blocks=(1,), input_tokens=100))

        assert prefill_work_s(twice, cost, ideally_cached=False) == pytest.approx(4.0)
        assert prefill_work_s(twice, cost, ideally_cached=True) == pytest.approx(2.0 + 1.1)

    def test_decode_work_assumes_the_largest_batch_that_fits(self):
        engine = replace(
            PRESETS["7b"],
            decode=DecodeCost(step_s=0.03, per_kv_token_s=0.0, per_request_s=0.0),
            kv_memory_tokens=450,
        )
        three_fit = trace(*(request(blocks=(1, 2), input_tokens=139, output_tokens=11) for _ in range(5)))

        assert decode_work_s(three_fit, engine) == pytest.approx(5 * 10 * 0.03 / 3)
        assert decode_work_s(three_fit, PRESETS["pd"]) == 0.0


class TestDefaultWorkload:
    def test_workload_seed_is_independent_of_hash_seed(self):
        code = (
            "from dualmap_sim.workloads.synthetic import default_workload;"
            "import hashlib; print(hashlib.sha256(repr(default_workload(300, seed=5)).encode()).hexdigest())"
        )
        digests = {
            subprocess.run(
                [sys.executable, "-c", code],
                env=os.environ | {"PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for hash_seed in ("0", "1", "4242")
        }

        assert len(digests) == 1
        assert default_workload(300, seed=5) != default_workload(300, seed=6)

    def test_shorter_workload_equals_the_start_of_a_longer_workload(self):
        assert default_workload(50).requests == default_workload(200).requests[:50]

    @pytest.mark.parametrize("seed", range(3))
    def test_generated_statistics_are_close_to_the_papers_traces(self, seed):
        """Paper section A.2.1: inputs of 8.6 k and 12 k tokens, 59 % and 40 % reusable. The answers are short, so that
        the demo is fast.
        """
        facts = measure(default_workload(1500, seed=seed))

        assert 6_500 < facts.input_tokens_mean < 8_800
        assert 90 < facts.output_tokens_mean < 130
        assert 0.55 < facts.ideal_hit_rate < 0.70
        assert facts.sessions is not None
        assert facts.sessions > 500

    def test_session_turn_extends_the_previous_prompt(self):
        last: dict[int, TraceRequest] = {}
        continued = 0
        for turn in default_workload(600).requests:
            before = last.get(turn.session)
            if before is not None:
                assert turn.turn == before.turn + 1
                assert turn.blocks[: len(before.blocks)] == before.blocks
                assert turn.input_tokens > before.input_tokens + before.output_tokens
                continued += 1
            last[turn.session] = turn

        assert continued > 100

    def test_prompt_lengths_fit_their_blocks_and_arrivals_are_ordered(self):
        workload = default_workload(600)

        for one in workload.requests:
            assert len(one.blocks) == -(-one.input_tokens // workload.block_tokens)
        assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(workload.requests))

    def test_workload_has_few_hot_shared_prefixes(self):
        """With this skew, routing only by prefix overloads an engine."""
        firsts = Counter(one.blocks[0] for one in default_workload(1500).requests)
        shares = [count / 1500 for _, count in firsts.most_common()]

        assert len(firsts) == 30, "every request begins with one of the shared prefixes"
        assert shares[0] > 1.5 / 8, "the hottest alone is more than an engine's share of eight"

    def test_default_workload_fits_the_demos_engines(self):
        preset = PRESETS["7b"]
        longest = max(
            one.input_tokens + one.output_tokens
            for one in default_workload(1500).capped(preset.input_tokens_max).requests
        )

        assert longest < preset.kv_memory_tokens / 4
