"""Tests of a recording's figures: lengths, reuse, hit rate, attainment, sessions, hot prefixes and rates."""

from dataclasses import replace

import pytest

from dualmap.pools.pool import Slo
from dualmap.recordings.values import Missing, PoolChanged, RecordedOutcome
from dualmap_sim.recordings.figures import compute_figures
from dualmap_sim.recordings.reuse import HotPrefix
from recorded import CHANGED, POOL, START_S, receipt, request

REFUSED = {
    "outcome": RecordedOutcome.REFUSED,
    "receipt": None,
    "ttft_s": None,
    "engine_prompt_tokens": None,
    "output_tokens": None,
    "cached_tokens": None,
}


def test_figures_without_requests_are_absent() -> None:
    figures = compute_figures([CHANGED])
    assert (figures.requests, figures.qps, figures.duration_s) == (0, None, 0.0)
    assert (figures.reuse_at_best, figures.hit_rate, figures.slo_attainment) == (None, None, None)
    assert set(figures.outcomes.values()) == {0}
    assert list(figures.pools) == [POOL.id]


def test_figures_count_lengths_as_the_engines_report_them() -> None:
    figures = compute_figures(
        [
            request(0, blocks=(1,), engine_prompt_tokens=100, output_tokens=7),
            request(1, blocks=(2,), engine_prompt_tokens=None, output_tokens=None, receipt=receipt(prompt_tokens=90)),
            request(4, blocks=(3,), **REFUSED),
        ]
    )
    assert list(figures.prompt_tokens) == [90, 100, 128]
    assert list(figures.output_tokens) == [7]
    assert (figures.requests, figures.duration_s, figures.qps) == (3, 4.0, 0.75)


def test_reuse_at_best_counts_full_blocks_of_earlier_prompts() -> None:
    figures = compute_figures(
        [
            request(0, blocks=(1, 2, 3)),
            request(1, blocks=(1, 2, 4)),
            # The last block is partial, so no engine caches it.
            request(2, blocks=(1, 2, 3, 5), prompt_tokens=400, engine_prompt_tokens=400),
            request(3, blocks=(1, 2, 3, 5), prompt_tokens=400, engine_prompt_tokens=400),
        ]
    )
    assert figures.reuse_at_best == (2 * 128 + 3 * 128 + 3 * 128) / (2 * 384 + 2 * 400)


def test_hit_rate_covers_requests_with_measured_cached_tokens() -> None:
    figures = compute_figures(
        [
            request(0, cached_tokens=256),
            request(1, cached_tokens=None),
            request(2, cached_tokens=0, served="qwen-1"),
            request(3, **REFUSED),
        ]
    )
    assert figures.hit_rate == 256 / 1024
    assert [(each.member, each.requests, each.hit_rate) for each in figures.members] == [
        ("qwen-0", 2, 0.5),
        ("qwen-1", 1, 0.0),
    ]


def test_attainment_covers_streamed_and_refused_requests() -> None:
    figures = compute_figures(
        [
            CHANGED,
            request(0, ttft_s=2.0),
            request(1, ttft_s=2.1),
            request(2, ttft_s=None, outcome=RecordedOutcome.ENGINE_ERROR),
            request(3, ttft_s=None, streamed=False),
            request(4, streamed=False, **REFUSED),
        ]
    )
    assert figures.slo_attainment == 1 / 4
    assert list(figures.ttft_s) == [2.0, 2.1]
    assert figures.outcomes == {"ok": 3, "engine_error": 1, "client_gone": 0, "refused": 1}
    assert sum(figures.outcomes.values()) == figures.requests


def test_attainment_uses_the_slo_at_the_arrival() -> None:
    lower = PoolChanged(at_s=START_S + 2, pool=replace(POOL, slo=Slo(ttft_s=0.1)))
    early, late = request(-1, ttft_s=1.0), request(3, ttft_s=1.0)
    assert compute_figures([early, CHANGED, lower, late]).slo_attainment == 0.5
    assert compute_figures([early, late]).slo_attainment is None


def test_sessions_are_the_distinct_named_ones() -> None:
    figures = compute_figures([request(0, session=5), request(1, session=5), request(2, session=6), request(3)])
    assert (figures.sessions, figures.requests_with_session) == (2, 3)


def test_missing_requests_are_summed() -> None:
    figures = compute_figures([Missing(at_s=0.0, unrouted=2, dropped=1), Missing(at_s=1.0, unrouted=1)])
    assert (figures.unrouted, figures.dropped) == (3, 1)


def test_hot_prefixes_end_where_their_requests_part() -> None:
    system = (1, 2, 3)
    chats = [request(number, blocks=(*system, 1000 + number)) for number in range(20)]
    agent = [request(30 + number, blocks=(7, 8)) for number in range(4)]
    figures = compute_figures([*chats, *agent, request(40, blocks=(50, 51))])
    assert list(figures.hot_prefixes) == [
        HotPrefix(last_block=3, blocks=3, tokens=384, requests=20),
        HotPrefix(last_block=8, blocks=2, tokens=256, requests=4),
    ]


def test_rates_count_each_request_in_its_interval() -> None:
    figures = compute_figures([request(at_s) for at_s in (0.0, 0.5, 30.0, 59.9, 60.0)])
    width_s, counts = figures.rates()
    assert width_s == pytest.approx(1.0)
    assert (sum(counts), counts[0], counts[30], counts[-1]) == (5, 2, 1, 2)
    assert compute_figures([request(0), request(0)]).rates() == (0.0, [2])
