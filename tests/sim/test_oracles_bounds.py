"""Tests of the oracles with complete workloads: queueing theory, conservation, and bounds for all routers."""

from dataclasses import replace
from functools import cache
from heapq import heapreplace
from math import inf
from random import Random

import pytest

from dualmap.pools.pool import Queue, Routing
from dualmap.prompts.blocks import BlockChain
from dualmap_sim.arrivals import Arrival
from dualmap_sim.experiment import Experiment, Outcome, load_trace, run_experiment
from dualmap_sim.oracles import ORACLES, run_oracle
from dualmap_sim.presets import PRESETS
from dualmap_sim.records import Record
from dualmap_sim.workloads.catalog import Workload
from dualmap_sim.workloads.statistics import measure
from engines import ROUND, ask

SMALL = Experiment(workload=Workload(requests=600), requests_per_s=11.0, warmup=100, sample_s=None)
ROUTERS = ("dualmap", "min_ttft", "preble", "least_loaded")
KNEE = (10.0, 11.0, 11.5)
"""Request rates slightly below the capacity of eight 7B engines with the default workload.

At much higher rates a shared queue is not a bound, because all its requests are late. With separate queues, some
requests still meet the SLO.
"""


@cache
def outcome(policy: str, requests_per_s: float = 11.0, *, chunk_tokens: int | None = None) -> Outcome:
    engine = replace(SMALL.engine, chunk_tokens=chunk_tokens)
    return run_experiment(replace(SMALL, policy=policy, requests_per_s=requests_per_s, engine=engine))


def seconds(time_s: float | None) -> float:
    assert time_s is not None
    return time_s


def poisson_arrivals(number: int, *, requests_per_s: float) -> list[Arrival]:
    """Return prompts without shared blocks, which take one second each on a ROUND engine."""
    rng, now = Random(5), 0.0
    nothing = BlockChain(hashes=(), block_tokens=10, tokens=0)
    arrivals = []
    for request in range(number):
        now += rng.expovariate(requests_per_s)
        arrivals.append(Arrival(at_s=now, chain=nothing, session=None, work=ask(str(request), prompt=50)))
    return arrivals


@pytest.mark.parametrize("instances", [1, 2, 5])
def test_single_queue_equals_fifo_with_k_servers(instances: int) -> None:
    """Return the waits in M/D/k, by the recursion of Kiefer and Wolfowitz over the first free server."""
    arrivals = poisson_arrivals(2000, requests_per_s=0.9 * instances)
    run = run_oracle("limit", engine=replace(ROUND, decode=None), instances=instances, arrivals=arrivals)

    free_s = [0.0] * instances
    for arrival, record in zip(arrivals, run.records, strict=True):
        end_s = max(arrival.at_s, free_s[0]) + 1.0
        heapreplace(free_s, end_s)
        assert record.first_token_s == record.finished_s == end_s


def test_single_queue_mean_wait_matches_theory() -> None:
    """M/D/1 at load rho: rho / (2 (1 - rho)) service times (Pollaczek and Khinchine)."""
    run = run_oracle(
        "limit", engine=replace(ROUND, decode=None), instances=1, arrivals=poisson_arrivals(20_000, requests_per_s=0.7)
    )
    waits_s = [seconds(record.ttft_s) - 1.0 for record in run.records]
    assert sum(waits_s) / len(waits_s) == pytest.approx(0.7 / (2 * 0.3), rel=0.05)


def test_limit_oracle_with_one_engine_equals_that_engine() -> None:
    """The oracle's queue adds no time, so a queue before the engine equals a queue in the engine."""
    boundless = replace(PRESETS["7b"], cache_tokens=10**9)
    alone = replace(
        SMALL,
        instances=1,
        engine=boundless,
        requests_per_s=1.5,
        routing=Routing(queue=Queue(dispatch_window_s=inf)),
        kv_tokens_known=False,
    )
    in_engine = run_experiment(replace(alone, policy="round_robin")).records
    before_it = run_experiment(replace(alone, policy="limit")).records

    def course(record: Record) -> tuple[int, float | None, float | None]:
        return record.cached_tokens, record.first_token_s, record.finished_s

    assert [course(record) for record in before_it] == [course(record) for record in in_engine]
    assert any(record.held for record in before_it)


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("chunk_tokens", [None, 2048])
def test_oracle_ends_each_request_once_and_reuses_only_seen_tokens(oracle: str, chunk_tokens: int | None) -> None:
    records = outcome(oracle, chunk_tokens=chunk_tokens).records

    assert [record.arrival.request_id for record in records] == [str(number) for number in range(600)]
    for record in records:
        times_s = (record.arrival.at_s, record.dispatched_s, record.first_token_s, record.finished_s)
        assert sorted(map(seconds, times_s)) == list(times_s)
        assert 0 <= record.cached_tokens < record.arrival.work.prompt_tokens
    ideal = measure(load_trace(SMALL))
    reused = sum(record.cached_tokens for record in records) / (ideal.input_tokens_mean * ideal.requests)
    assert (reused <= ideal.ideal_hit_rate) is (oracle != "all_cached")


@pytest.mark.parametrize("oracle", ORACLES)
def test_oracle_with_equal_arrivals_gives_equal_records(oracle: str) -> None:
    again = run_experiment(replace(SMALL, policy=oracle))
    assert again.records == outcome(oracle).records


@pytest.mark.parametrize("policy", [*(name for name in ORACLES if name != "all_cached"), *ROUTERS])
def test_all_cached_bounds_every_first_token(policy: str) -> None:
    floor_s = {record.arrival.request_id: seconds(record.ttft_s) for record in outcome("all_cached").records}
    for record in outcome(policy).records:
        if record.ttft_s is not None:
            assert record.ttft_s >= floor_s[record.arrival.request_id] - 1e-9


@pytest.mark.parametrize("requests_per_s", KNEE)
@pytest.mark.parametrize("policy", [*(name for name in ORACLES if name != "all_cached"), *ROUTERS])
def test_limit_ideal_bounds_attainment_near_saturation(policy: str, requests_per_s: float) -> None:
    ideal = outcome("limit_ideal", requests_per_s).summary
    assert outcome(policy, requests_per_s).summary.slo_attainment <= ideal.slo_attainment
    assert outcome(policy, requests_per_s).summary.hit_rate <= ideal.hit_rate


@pytest.mark.parametrize("requests_per_s", KNEE)
@pytest.mark.parametrize("policy", ["min_ttft", "least_loaded", "full_scan_oracle", "limit_pooled"])
def test_load_only_and_full_scan_stay_below_the_limit_oracle(policy: str, requests_per_s: float) -> None:
    limit = outcome("limit", requests_per_s).summary.slo_attainment
    assert outcome(policy, requests_per_s).summary.slo_attainment <= limit


def test_limit_oracle_is_no_bound_with_many_common_prefixes() -> None:
    """Several instances that compute the same prefix cost more than a wait for the first instance."""
    assert outcome("preble", 11.5).summary.hit_rate > outcome("limit", 11.5).summary.hit_rate


@pytest.mark.parametrize("requests_per_s", [11.5, 12.0])
def test_limit_deadline_attains_more_than_limit_in_overload(requests_per_s: float) -> None:
    limit = outcome("limit", requests_per_s).summary.slo_attainment
    assert outcome("limit_deadline", requests_per_s).summary.slo_attainment > limit + 0.02


@pytest.mark.parametrize("requests_per_s", [*KNEE, 12.0, 13.0])
@pytest.mark.parametrize("policy", [*ROUTERS, "limit", "pooled_deadline"])
def test_limit_deadline_bounds_attainment_in_overload(policy: str, requests_per_s: float) -> None:
    bound = outcome("limit_deadline", requests_per_s).summary.slo_attainment
    assert outcome(policy, requests_per_s).summary.slo_attainment <= bound
