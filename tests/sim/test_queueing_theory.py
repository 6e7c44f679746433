"""Tests of the engine model against formulas of queueing theory.

Each figure is the mean over independent seeds. The tests first assert that the standard error is small. Then they
assert that the formula's value is within four standard errors of the mean. The seeds are fixed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import factorial, sqrt
from random import Random
from statistics import mean, stdev

import pytest

from dualmap.prompts.blocks import BlockChain
from dualmap_sim.arrivals import Arrival
from dualmap_sim.engine import Engine, EngineRequest, FirstToken
from dualmap_sim.oracles import run_oracle
from dualmap_sim.presets import PRESETS, EngineConfig, PrefillCost
from engines import finishes, run_out

TOKENS_PER_S = 10_000
SERVER = EngineConfig(
    prefill=PrefillCost(overhead_s=0.0, tokens_per_s=TOKENS_PER_S, attention=0.0, load_tokens_per_s=1.0),
    decode=None,
    kv_memory_tokens=10**9,
    cache_tokens=0,
    input_tokens_max=10**9,
)
"""A simple server: a prompt of n tokens takes n / 10 000 seconds."""


def work(number: int, service_s: float, *, priority: int = 0) -> EngineRequest:
    tokens = max(1, round(service_s * TOKENS_PER_S))
    return EngineRequest(request_id=str(number), prompt_tokens=tokens, output_tokens=1, priority=priority)


def started_s(config: EngineConfig, asked: Sequence[tuple[float, EngineRequest]]) -> dict[str, float]:
    """Run requests on one engine; return each request's wait until the begin of its prefill."""
    engine = Engine(config)
    for at_s, request in asked:
        engine.submit(at_s, request)
    firsts = [event for event in run_out(engine) if isinstance(event, FirstToken)]
    return {first.request_id: first.prefill_started_s - first.arrived_s for first in firsts}


def assert_meets(theory: float, measure: Callable[[int], float], *, seeds: int, error: float) -> None:
    """Assert that the mean over seeds equals the theory's value, and that its relative standard error is at most
    ``error``.
    """
    measured = [measure(seed) for seed in range(seeds)]
    standard_error = stdev(measured) / sqrt(seeds)
    assert standard_error <= error * theory, f"the error {standard_error} hides any difference from {theory}"
    assert mean(measured) == pytest.approx(theory, abs=4 * standard_error)


def poisson(rng: Random, rate: float, services_s: Sequence[float]) -> list[tuple[float, EngineRequest]]:
    now, asked = 0.0, []
    for number, service_s in enumerate(services_s):
        now += rng.expovariate(rate)
        asked.append((now, work(number, service_s)))
    return asked


@pytest.mark.slow
@pytest.mark.parametrize(("load", "requests", "error"), [(0.5, 4_000, 0.02), (0.7, 8_000, 0.03), (0.9, 20_000, 0.07)])
def test_equal_prefills_have_the_mean_wait_of_m_d_1(load: float, requests: int, error: float) -> None:
    """Pollaczek-Khinchine without variance of the service: rho * s / (2 * (1 - rho))."""

    def mean_wait_s(seed: int) -> float:
        asked = poisson(Random(seed), load, [1.0] * requests)
        return mean(list(started_s(SERVER, asked).values())[requests // 10 :])

    assert_meets(load / (2 * (1 - load)), mean_wait_s, seeds=6, error=error)


@pytest.mark.slow
def test_prefills_of_two_lengths_have_the_mean_wait_of_m_g_1() -> None:
    """Pollaczek-Khinchine: lambda * E[s^2] / (2 * (1 - rho))."""
    load, requests = 0.7, 8_000

    def mean_wait_s(seed: int) -> float:
        rng = Random(seed)
        asked = poisson(rng, load, [rng.choice([0.2, 1.8]) for _ in range(requests)])
        return mean(list(started_s(SERVER, asked).values())[requests // 10 :])

    assert_meets(load * (0.2**2 + 1.8**2) / 2 / (2 * (1 - load)), mean_wait_s, seeds=6, error=0.04)


@pytest.mark.slow
def test_two_priorities_have_the_mean_waits_of_cobhams_formula() -> None:
    """Without preemption: W0 / (1 - rho1) for the urgent, W0 / ((1 - rho1) * (1 - rho)) for the others."""
    load, urgent, requests = 0.8, 0.25, 10_000
    residual_s = load / 2

    def waits_s(seed: int) -> tuple[float, float]:
        rng = Random(seed)
        asked = [
            (at_s, replace(request, priority=int(rng.random() >= urgent)))
            for at_s, request in poisson(rng, load, [1.0] * requests)
        ]
        waits = started_s(SERVER, asked)
        first, second = (
            mean(waits[request.request_id] for _, request in asked[requests // 10 :] if request.priority == priority)
            for priority in (0, 1)
        )
        return first, second

    waited = [waits_s(seed) for seed in range(6)]
    urgent_load = urgent * load
    assert_meets(residual_s / (1 - urgent_load), lambda seed: waited[seed][0], seeds=6, error=0.02)
    assert_meets(residual_s / ((1 - urgent_load) * (1 - load)), lambda seed: waited[seed][1], seeds=6, error=0.05)


def erlang_c_wait_s(servers: int, load: float) -> float:
    """Return the mean wait of M/M/k for services of mean 1: C(k, a) / (k * (1 - rho))."""
    offered = servers * load
    busy = offered**servers / factorial(servers) / (1 - load)
    waits = busy / (sum(offered**n / factorial(n) for n in range(servers)) + busy)
    return waits / (servers * (1 - load))


@pytest.mark.slow
@pytest.mark.parametrize("servers", [2, 4])
def test_engines_with_a_single_queue_have_the_wait_of_erlang_c(servers: int) -> None:
    """Tests the oracle ``limit`` as M/M/k, without caching because no prompt has a complete block."""
    load, requests = 0.7, 8_000

    def mean_wait_s(seed: int) -> float:
        rng = Random(seed)
        asked = poisson(rng, servers * load, [rng.expovariate(1.0) for _ in range(requests)])
        arrivals = [
            Arrival(
                at_s=at_s,
                chain=BlockChain(hashes=(), block_tokens=512, tokens=request.prompt_tokens),
                session=None,
                work=request,
            )
            for at_s, request in asked
        ]
        records = run_oracle("limit", engine=SERVER, instances=servers, arrivals=arrivals).records
        waits = [
            record.first_token_s - record.arrival.at_s - record.arrival.work.prompt_tokens / TOKENS_PER_S
            for record in records[requests // 10 :]
            if record.first_token_s is not None
        ]
        assert len(waits) == requests - requests // 10
        return mean(waits)

    assert_meets(erlang_c_wait_s(servers, load), mean_wait_s, seeds=6, error=0.05)


def test_equal_batch_decode_time_is_an_arithmetic_series() -> None:
    """n requests of p and m tokens: m - 1 steps, the first of d0 + d1 n (p + 1) + d2 n, each longer by d1 n."""
    n, prompt, output = 20, 4000, 500
    decode = PRESETS["7b"].decode
    assert decode is not None
    engine = Engine(replace(PRESETS["7b"], prefill=replace(SERVER.prefill, tokens_per_s=1e30)))
    for number in range(n):
        engine.submit(0.0, EngineRequest(request_id=str(number), prompt_tokens=prompt, output_tokens=output))

    ended = finishes(run_out(engine))

    steps = output - 1
    first_step_s = decode.step_s + decode.per_kv_token_s * n * (prompt + 1) + decode.per_request_s * n
    expected_s = steps * first_step_s + decode.per_kv_token_s * n * steps * (steps - 1) / 2
    assert ended == pytest.approx({str(number): expected_s for number in range(n)})


def longest_without_a_prefill_s(config: EngineConfig, rate: float) -> tuple[float, float]:
    """Return the longest time without a first token while requests waited, and the share of time spent on prefills."""
    rng, engine, now = Random(7), Engine(config), 0.0
    prompt_s = config.prefill.seconds(new_tokens=4000, cached_tokens=0)
    longest_s, since_s, requests = 0.0, 0.0, 300
    for number in range(requests):
        now += rng.expovariate(rate)
        while (due_s := engine.next_event_s()) is not None and due_s <= now:
            waited = engine.waiting > 0
            firsts = [event for event in engine.advance(due_s) if isinstance(event, FirstToken)]
            if waited:
                longest_s = max(longest_s, due_s - since_s)
            if firsts or not engine.waiting:
                since_s = due_s
        if not engine.waiting:
            since_s = now
        engine.submit(now, EngineRequest(request_id=str(number), prompt_tokens=4000, output_tokens=1000))
    return longest_s, requests * prompt_s / now


def test_memory_used_by_decodes_delays_prefills() -> None:
    """Tests the paper's decode bottleneck (A.7): no prefill ends for more than 3 s while requests wait; more memory
    prevents this.
    """
    engine = PRESETS["7b"]

    starved_s, busy = longest_without_a_prefill_s(engine, rate=0.9)
    roomy_s, _ = longest_without_a_prefill_s(replace(engine, kv_memory_tokens=10**9), rate=0.9)

    assert busy < 0.6, "the prefills alone leave the engine time"
    assert starved_s > 3.0
    assert roomy_s < 3.0
