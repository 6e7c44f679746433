"""Tests of the agentic closed loop: EAR's skew and reuse for each seed, and the shape of the sessions."""

import hashlib
from functools import cache
from itertools import groupby, pairwise

import pytest

from dualmap_sim.workloads.agentic import ASKED, CONTEXT_TOKENS, agentic_workload
from dualmap_sim.workloads.statistics import compare
from dualmap_sim.workloads.trace import Trace, TraceRequest

TOLERANCES = {
    "input tokens of the top 1 % of sessions": 0.01,
    "input tokens of the top 5 % of sessions": 0.005,
    "input tokens of the top 10 % of sessions": 0.005,
    "input tokens of the top 25 % of sessions": 0.005,
    "input tokens of the top 50 % of sessions": 0.005,
    "input tokens, mean": 0.01 * 33_600,
    "input tokens per output token": 0.02 * 75,
    "ideal hit rate, whole blocks": 0.01,
    "ideal hit rate, each session by itself": 0.01,
    "reused from the same session, of all reused": 0.015,
    "coefficient of variation of arrivals": 0.1,
}


@cache
def workload(seed: int, requests: int = 4000) -> Trace:
    return agentic_workload(requests, seed=seed)


def sessions(trace: Trace) -> list[list[TraceRequest]]:
    return [list(turns) for _, turns in groupby(trace.requests, key=lambda request: request.session)]


@pytest.mark.parametrize("seed", range(5))
def test_agentic_workload_matches_statistics_of_the_ear_paper(seed):
    facts = {fact.name: fact for fact in compare(workload(seed), ASKED)}

    assert set(TOLERANCES) <= set(facts)
    for name, tolerance in TOLERANCES.items():
        assert facts[name].produced == pytest.approx(facts[name].asked, abs=tolerance), name


@pytest.mark.parametrize("requests", [1, 2, 7, 300, 1000])
def test_agentic_workload_of_any_size_has_the_same_session_skew(requests):
    trace = workload(0, requests)

    assert len(trace.requests) == requests
    if requests >= 300:
        facts = {fact.name: fact for fact in compare(trace, ASKED)}
        assert facts["input tokens, mean"].produced == pytest.approx(33_600, rel=0.01)
        assert facts["input tokens of the top 1 % of sessions"].produced == pytest.approx(0.465, abs=0.06)
        assert facts["input tokens of the top 10 % of sessions"].produced == pytest.approx(0.746, abs=0.01)


def test_workload_is_fixed_by_its_seed_on_any_machine():
    assert workload(0, 200) != workload(1, 200)
    digest = hashlib.sha256(repr(workload(0, 200).requests).encode()).hexdigest()
    assert digest == "61c16e9322c6529376ce9a03e95c6f1d2d395c0cbb0c9c7e0dc363e4d48c1727"


def test_closed_loop_turns_have_session_start_times_and_no_pauses():
    trace = workload(0)
    begun_s = [turns[0].arrival_s for turns in sessions(trace)]

    assert trace.closed_loop
    assert all(r.pause_s == 0.0 for r in trace.requests)
    assert all({r.arrival_s for r in turns} == {turns[0].arrival_s} for turns in sessions(trace))
    assert all(a < b for a, b in pairwise(begun_s))
    assert trace.at_rate(4.0).duration_s == pytest.approx(1000.0)


def test_turn_extends_previous_prompt_and_output_within_context():
    longest = 0
    for turns in sessions(workload(0)):
        assert [r.turn for r in turns] == list(range(len(turns)))
        for before, after in pairwise(turns):
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.blocks[: len(before.blocks)] == before.blocks
        for one in turns:
            assert len(one.blocks) == -(-one.input_tokens // 512)
            assert one.output_tokens >= 1
            assert one.input_tokens + one.output_tokens <= CONTEXT_TOKENS
        longest = max(longest, len(turns))

    assert longest > 60


@pytest.mark.parametrize(("zipf", "top_share"), [(0.0, 0.1), (0.4, 0.24), (0.8, 0.51), (1.2, 0.85)])
def test_zipf_exponent_changes_skew_but_not_mean_or_reuse(zipf, top_share):
    trace = agentic_workload(4000, zipf=zipf)
    facts = {fact.name: fact.produced for fact in compare(trace, ASKED)}

    assert len(trace.requests) == 4000
    assert facts["input tokens of the top 10 % of sessions"] == pytest.approx(top_share, abs=0.01)
    assert facts["input tokens, mean"] == pytest.approx(33_600, rel=0.01)
    assert facts["ideal hit rate, whole blocks"] == pytest.approx(0.803, abs=0.04)


@pytest.mark.parametrize("requests", [1, 24, 29, 54])
def test_small_workload_of_equal_sessions_has_all_requests(requests):
    assert len(agentic_workload(requests, zipf=0.0).requests) == requests
