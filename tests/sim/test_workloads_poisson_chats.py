"""Tests of chats with Poisson arrivals: the target figures for each seed, growing prompts, and the knee."""

import hashlib
from functools import cache
from itertools import pairwise

import pytest

from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.catalog import Workload
from dualmap_sim.workloads.poisson_chats import ASKED, poisson_chats_workload
from dualmap_sim.workloads.statistics import compare
from dualmap_sim.workloads.trace import Trace

TOLERANCES = {
    "input tokens, mean": 0.02 * 11_300,
    "output tokens, mean": 0.02 * 190,
    "requests per session, mean": 0.1,
    "ideal hit rate, whole blocks": 0.01,
    "ideal hit rate, each session by itself": 0.015,
    "coefficient of variation of arrivals": 0.05,
}


@cache
def workload(seed: int) -> Trace:
    return poisson_chats_workload(4000, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_poisson_chats_match_the_target_figures(seed):
    facts = {fact.name: fact for fact in compare(workload(seed), ASKED)}

    assert set(TOLERANCES) == {one.name for one in ASKED}
    for name, tolerance in TOLERANCES.items():
        assert facts[name].produced == pytest.approx(facts[name].asked, abs=tolerance), name


def test_workload_is_fixed_by_its_seed_on_any_machine():
    assert workload(0) != workload(1)
    digest = hashlib.sha256(repr(poisson_chats_workload(200).requests).encode()).hexdigest()
    assert digest == "befa11654653b2071a7f86064d8f108781b9fed955270afbb5fdbfcb474d4d17"


def test_shorter_workload_equals_the_start_of_a_longer_workload():
    assert poisson_chats_workload(200).requests == workload(0).requests[:200]


def test_arrivals_of_poisson_chats_never_coincide():
    assert all(a.arrival_s < b.arrival_s for a, b in pairwise(workload(0).requests))


def test_poisson_chat_turn_extends_the_last_prompt_within_the_context():
    last = {}
    for request in workload(0).requests:
        before = last.get(request.session)
        assert len(request.blocks) == -(-request.input_tokens // 512)
        assert request.input_tokens <= PRESETS["7b"].input_tokens_max
        if before is not None:
            assert request.turn == before.turn + 1
            assert request.blocks[: len(before.blocks)] == before.blocks
            assert request.input_tokens > before.input_tokens + before.output_tokens
        last[request.session] = request

    assert max(request.turn for request in last.values()) > 8


def test_one_router_has_its_knee_near_5_6_requests_per_second():
    chats = Workload(name="poisson_chats", requests=3000)
    below, above = (run_experiment(Experiment(requests_per_s=rate, workload=chats)).summary for rate in (5.2, 6.0))

    assert below.slo_attainment > 0.93
    assert above.slo_attainment < 0.87
    assert below.hit_rate == pytest.approx(0.64, abs=0.02)
