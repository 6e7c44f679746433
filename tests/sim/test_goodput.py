"""Tests of the goodput search: against queueing theory, against an exhaustive search, and with constructed cases."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from math import exp, factorial
from pathlib import Path

import pytest

from dualmap_sim import goodput as goodput_module
from dualmap_sim.experiment import Experiment, Outcome, run_experiment
from dualmap_sim.goodput import NeverOverloaded, goodput, ideal_capacity
from dualmap_sim.presets import EngineConfig, PrefillCost
from dualmap_sim.workloads.catalog import Workload

SERVICE_S = 0.5
CONSTANT = EngineConfig(
    prefill=PrefillCost(overhead_s=SERVICE_S, tokens_per_s=1e12, attention=0.0, load_tokens_per_s=1e12),
    decode=None,
    kv_memory_tokens=10_000,
    cache_tokens=0,
    input_tokens_max=1000,
)
"""An engine with the same service time for every request."""
SMALL = Experiment(workload=Workload(requests=200), requests_per_s=1.0, instances=2, warmup=40, policy="round_robin")


def share_waiting_at_most(wait_s: float, *, rate: float) -> float:
    """Return the share of Poisson arrivals with at most this wait for a server of constant speed: M/D/1 (Crommelin
    1932).
    """
    if rate * SERVICE_S >= 1:
        return 0.0
    terms = (rate * (number * SERVICE_S - wait_s) for number in range(int(wait_s / SERVICE_S) + 1))
    return (1 - rate * SERVICE_S) * sum(
        term**number / factorial(number) * exp(-term) for number, term in enumerate(terms)
    )


def poisson_trace(path: Path, requests: int) -> Path:
    """Return requests without shared blocks, at exponential intervals."""
    chance, at_ms, lines = random.Random(7), 0.0, []
    for number in range(requests):
        at_ms += chance.expovariate(1.0) * 1000
        lines.append(json.dumps({"timestamp": at_ms, "input_length": 1, "output_length": 1, "hash_ids": [number]}))
    path.write_text("\n".join(lines))
    return path


def attained_by(share: Callable[[float], float]) -> Callable[..., Outcome]:
    """Return a fake run of an experiment, with an attainment that depends only on the rate."""
    outcome = run_experiment(replace(SMALL, workload=Workload(requests=60)))

    def run(experiment: Experiment, *, stop_below: float) -> Outcome:
        attainment = share(experiment.requests_per_s)
        return replace(
            outcome,
            gave_up=attainment < stop_below,
            summary=replace(outcome.summary, slo_attainment=attainment),
        )

    return run


def test_goodput_of_constant_service_matches_theory(tmp_path: Path) -> None:
    wait_s = 1.2
    experiment = Experiment(
        workload=Workload(trace=poisson_trace(tmp_path / "poisson.jsonl", 5_000), requests=5_000),
        requests_per_s=1.0,
        policy="round_robin",
        instances=1,
        engine=CONSTANT,
        slo_ttft_s=SERVICE_S + wait_s,
        warmup=100,
    )
    low, high = 0.0, 1 / SERVICE_S
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if share_waiting_at_most(wait_s, rate=middle) >= 0.9 else (low, middle)
    assert 0.5 < low * SERVICE_S < 0.8, "neither idle nor overloaded, where theory has something to say"
    assert goodput(experiment, tolerance=0.02).requests_per_s == pytest.approx(low, rel=0.04)


@pytest.mark.parametrize("policy", ["round_robin", "dualmap", "limit"])
def test_goodput_result_is_equal_with_and_without_early_stop(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = replace(SMALL, policy=policy)
    answered: list[int] = []

    def counted(experiment: Experiment, *, stop_below: float | None) -> Outcome:
        outcome = run_experiment(experiment, stop_below=stop_below)
        answered.append(sum(record.first_token_s is not None for record in outcome.records))
        return outcome

    monkeypatch.setattr(goodput_module, "run_experiment", counted)
    early = goodput(experiment)
    early_answers, answered = answered, []
    monkeypatch.setattr(goodput_module, "run_experiment", lambda each, stop_below: counted(each, stop_below=None))
    assert goodput(experiment) == early
    assert sum(early_answers) < sum(answered)


def test_goodput_rate_meets_the_slo_but_the_next_rate_does_not() -> None:
    found = goodput(SMALL, attainment=0.8, tolerance=0.05)
    attainments = [
        run_experiment(replace(SMALL, requests_per_s=rate, sample_s=None)).summary.slo_attainment
        for rate in found.bracket
    ]
    assert attainments[0] >= 0.8 > attainments[1]
    assert found.requests_per_s == found.bracket[0]
    assert found.bracket[1] / found.bracket[0] == pytest.approx(1.05)


@pytest.mark.parametrize("guess", [0.1, 1.0, 3.0, 5.0, 80.0, None])
def test_goodput_is_independent_of_the_first_guess(guess: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput_module, "run_experiment", attained_by(lambda rate: 1.0 if rate <= 3.0 else 0.5))
    tried: list[float] = []
    found = goodput(SMALL, guess=guess, on_try=tried.append)
    assert found.bracket[0] <= 3.0 < found.bracket[1]
    assert found.runs == len(tried) == len(set(tried))
    assert found.runs <= 16
    assert set(found.bracket) <= set(tried)


@pytest.mark.parametrize("guess", [1.0, 2.95, 3.3, 6.0])
def test_goodput_search_handles_non_monotonic_attainment(guess: float, monkeypatch: pytest.MonkeyPatch) -> None:
    attained = attained_by(lambda rate: 0.92 if rate <= 3.0 or 3.2 <= rate <= 3.4 else 0.88)
    monkeypatch.setattr(goodput_module, "run_experiment", attained)
    low, high = goodput(SMALL, guess=guess).bracket
    assert low <= 3.0 < high or low <= 3.4 < high
    assert high / low == pytest.approx(1.01)


def test_goodput_search_uses_the_same_rates_for_all_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput_module, "run_experiment", attained_by(lambda rate: 1.0 if rate <= 3.0 else 0.5))
    rates: tuple[list[float], list[float]] = [], []
    for tried, guess in zip(rates, (2.0, 4.0), strict=True):
        goodput(SMALL, guess=guess, on_try=tried.append)
    assert set(rates[0]) & set(rates[1])


def test_goodput_of_policy_that_never_meets_slo_is_zero() -> None:
    found = goodput(replace(SMALL, slo_ttft_s=0.001))
    assert found.requests_per_s == 0.0
    assert found.bracket[0] == 0.0 < found.bracket[1]


def test_goodput_without_overload_is_an_error_with_advice() -> None:
    few = replace(SMALL, workload=Workload(requests=10), warmup=0, instances=10, slo_ttft_s=60.0)
    with pytest.raises(NeverOverloaded, match=r"round_robin: 90% of the 10 requests .* give more requests"):
        goodput(few)


def test_ideal_capacity_is_engine_throughput() -> None:
    experiment = replace(SMALL, engine=CONSTANT)
    assert ideal_capacity(experiment) == pytest.approx(2 / SERVICE_S)
