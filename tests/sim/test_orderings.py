"""Tests of the order of policies that makes ``dualmap`` the default, with generated workloads near capacity.

The runs are short and deterministic, so the comparisons are exact. docs/evaluation.md has figures from longer runs. At
the chosen rates, ``dualmap`` meets the SLO for 90 to 97 % of the requests. At much lower rates, every policy meets the
SLO for all requests. At much higher rates, attainment depends more on the choice of the late requests than on routing.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from dualmap_sim.experiment import Experiment, run_experiment
from dualmap_sim.presets import PRESETS, slowed
from dualmap_sim.workloads.catalog import Workload

Attainment = Callable[[Experiment], float]
"""The share of an experiment's counted requests with a TTFT within the SLO."""

REQUESTS = 1500
WARMUP = 300
SPEED = PRESETS["7b"].prefill.tokens_per_s

KNEES = [
    ("tool_agent", "7b", 0, 7.9),
    ("tool_agent", "7b", 1, 7.9),
    ("tool_agent", "pd", 0, 9.0),
    ("tool_agent", "14b", 0, 6.1),
    ("tool_agent", "14b", 1, 6.2),
    ("default", "14b", 0, 7.0),
]
"""Workload, preset, seed, requests per second.

The workload ``default`` on 7b and pd is not in the list, because Preble has a higher attainment at some rates and
seeds.
"""
KNEES_10_S = [("tool_agent", "7b", 0, 8.4), ("tool_agent", "pd", 0, 9.8), ("tool_agent", "14b", 0, 6.6)]


@pytest.fixture(scope="module", autouse=True)
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off, because runs create few reference cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def attainment() -> Attainment:
    """Run each experiment once, and keep only the compared values."""

    @cache
    def measured(experiment: Experiment) -> float:
        return run_experiment(experiment).summary.slo_attainment

    return measured


def setting(workload: str, model: str, seed: int, requests_per_s: float) -> Experiment:
    """Return a setting with eight instances, as in the paper, and without sessions, which the paper's router does not
    use.
    """
    return Experiment(
        workload=Workload(name=workload, requests=REQUESTS, seed=seed),
        engine=PRESETS[model],
        requests_per_s=requests_per_s,
        warmup=WARMUP,
        sessions=False,
        sample_s=None,
    )


def shares(attainment: Attainment, experiment: Experiment, policies: Iterable[str]) -> dict[str, float]:
    return {policy: attainment(replace(experiment, policy=policy)) for policy in policies}


@pytest.mark.parametrize(("workload", "model", "seed", "rate"), KNEES)
def test_dualmap_has_higher_attainment_than_the_best_other_policy(
    workload: str, model: str, seed: int, rate: float, attainment: Attainment
) -> None:
    found = shares(attainment, setting(workload, model, seed, rate), ("dualmap", "preble", "min_ttft", "round_robin"))
    assert found["dualmap"] > max(found["preble"], found["min_ttft"])
    assert found["dualmap"] > 1.5 * found["round_robin"], "a policy that knows nothing is no rival"


@pytest.mark.parametrize(("workload", "model", "seed", "rate"), KNEES_10_S)
def test_dualmap_has_higher_attainment_at_an_slo_of_10_s(
    workload: str, model: str, seed: int, rate: float, attainment: Attainment
) -> None:
    patient = replace(setting(workload, model, seed, rate), slo_ttft_s=10.0)
    found = shares(attainment, patient, ("dualmap", "preble", "min_ttft"))
    assert found["dualmap"] > max(found["preble"], found["min_ttft"])


MISTAKEN = {
    "one instance at half speed": replace(
        setting("tool_agent", "7b", 0, 7.2), engines=(("qwen-0", slowed(PRESETS["7b"], 2.0)),)
    ),
    "speed believed half": replace(setting("tool_agent", "7b", 0, 7.8), believed_tokens_per_s=SPEED / 2),
    "speed believed double": replace(setting("tool_agent", "7b", 0, 7.8), believed_tokens_per_s=SPEED * 2),
}


@pytest.mark.parametrize("condition", MISTAKEN)
def test_dualmap_has_higher_attainment_with_wrong_estimates(condition: str, attainment: Attainment) -> None:
    found = shares(attainment, MISTAKEN[condition], ("dualmap", "preble", "min_ttft", "least_loaded"))
    best_of_others = max(share for policy, share in found.items() if policy != "dualmap")
    assert found["dualmap"] > best_of_others


def test_deferring_late_requests_exceeds_attainment_of_the_limit(attainment: Attainment) -> None:
    """The bound serves requests in arrival order. Above capacity, late requests therefore delay requests that could
    meet the SLO.
    """
    found = shares(attainment, setting("tool_agent", "7b", 0, 9.5), ("dualmap", "limit"))
    assert found["dualmap"] > 2 * found["limit"]


@pytest.mark.parametrize(("seed", "rate"), [(0, 6.1), (1, 6.2)])
def test_published_rule_attains_more_than_load_or_affinity_only(seed: int, rate: float, attainment: Attainment) -> None:
    """The order is the published order, except that the SLO-aware choice has no clear advantage over Min TTFT in this
    setting.
    """
    whole = ("dualmap_min_ttft", "dualmap_no_rebalance", "dualmap_paper")
    found = shares(
        attainment,
        setting("tool_agent", "14b", seed, rate),
        ("dualmap_cache_affinity", "dualmap_least_loaded", *whole, "dualmap"),
    )
    best = [found[policy] for policy in whole]
    assert found["dualmap_cache_affinity"] < found["dualmap_least_loaded"] < min(best)
    assert max(best) < found["dualmap"]


@pytest.mark.parametrize(("requests_per_s", "kv_moves"), [(2.0, False), (3.0, False), (3.0, True)])
def test_dualmap_is_no_slower_than_ear_below_overload(requests_per_s: float, kv_moves: bool) -> None:
    """Compares the mean with a tolerance of 5 %, and the share of requests above the SLO."""
    engine = replace(PRESETS["agent"], pull_tokens_per_s=100_000.0 if kv_moves else None)
    usual = Experiment(
        workload=Workload(name="agentic", requests=REQUESTS),
        engine=engine,
        requests_per_s=requests_per_s,
        warmup=WARMUP,
        kv_moves=kv_moves,
        sample_s=None,
    )
    mean_s, kept = {}, {}
    for policy in ("dualmap", "ear"):
        outcome = run_experiment(replace(usual, policy=policy))
        counted = [record for record in outcome.records if int(record.arrival.request_id) >= WARMUP]
        mean_s[policy] = fmean(record.ttft_s for record in counted if record.ttft_s is not None)
        kept[policy] = outcome.summary.slo_attainment
    assert mean_s["dualmap"] <= 1.05 * mean_s["ear"]
    assert kept["dualmap"] >= kept["ear"]
