"""Tests of the engine with complete workloads: tokens are conserved, no cache exceeds the ideal, and more resources
never reduce results.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap_sim.arrivals import Arrival, arrivals
from dualmap_sim.engine import Engine, EngineEvent, EngineRequest, Finished, FirstToken
from dualmap_sim.oracles import run_oracle
from dualmap_sim.prefix_cache import PrefixCache
from dualmap_sim.presets import PRESETS, EngineConfig
from dualmap_sim.workloads.statistics import ideal_cached_tokens
from dualmap_sim.workloads.synthetic import default_workload
from dualmap_sim.workloads.trace import Trace
from engines import ROUND, ask, finishes, first_tokens, run_out

WHOLE = PRESETS["7b"]
CHUNKED = replace(WHOLE, chunk_tokens=2048)
PREFILL_ONLY = PRESETS["pd"]
ENGINES = pytest.mark.parametrize("config", [WHOLE, CHUNKED, PREFILL_ONLY], ids=["whole", "chunked", "prefill only"])


@cache
def workload(rate: float) -> Trace:
    return default_workload(600, seed=4).capped(WHOLE.input_tokens_max).at_rate(rate)


@cache
def asked(rate: float) -> tuple[Arrival, ...]:
    tokens = WHOLE.block_tokens
    return arrivals(workload(rate), router_block_tokens=tokens, engine_block_tokens=tokens)


def play(config: EngineConfig, rate: float, *, aborted: Sequence[str] = ()) -> tuple[Engine, list[EngineEvent]]:
    """Run the workload on one engine, and abort some requests some time after their arrival; check the memory at every
    event.
    """
    engine, events = Engine(config), list[EngineEvent]()
    happenings = [(arrival.at_s, arrival.work, "") for arrival in asked(rate)]
    happenings += [
        (arrival.at_s + 7.0, arrival.work, "abort") for arrival in asked(rate) if arrival.request_id in aborted
    ]
    for at_s, work, abort in sorted(happenings, key=lambda happening: happening[0]):
        while (due_s := engine.next_event_s()) is not None and due_s <= at_s:
            events += engine.advance(due_s)
            assert 0 <= engine.kv_tokens_held <= engine.kv_tokens_reserved <= config.kv_memory_tokens
        if abort:
            assert engine.abort(at_s, work.request_id) == (work.request_id not in finishes(events))
        else:
            engine.submit(at_s, work)
    return engine, events + run_out(engine)


@ENGINES
@pytest.mark.parametrize("aborts", [False, True])
def test_requests_end_once_and_token_totals_add_up(config: EngineConfig, aborts: bool) -> None:
    rate = 1.0
    aborted = [arrival.request_id for arrival in asked(rate)[::7]] if aborts else []

    engine, events = play(config, rate, aborted=aborted)

    firsts = [event for event in events if isinstance(event, FirstToken)]
    ends = [event for event in events if isinstance(event, Finished)]
    kept = {arrival.request_id for arrival in asked(rate)} - set(aborted)
    assert len(ends) == len(finishes(events))
    assert kept <= set(finishes(events))
    assert len(firsts) == len(first_tokens(events))
    assert all(first_tokens(events)[end.request_id] <= end.at_s for end in ends)
    work = {arrival.request_id: arrival.work for arrival in asked(rate)}
    decodes = config.decode is not None
    assert all(end.output_tokens == (work[end.request_id].output_tokens if decodes else 1) for end in ends)
    assert (engine.waiting, engine.running, engine.kv_tokens_held, engine.kv_tokens_reserved) == (0, 0, 0, 0)
    if not aborts:
        assert engine.generated_tokens_total == sum(end.output_tokens for end in ends)
        assert engine.prompt_tokens_total == sum(each.prompt_tokens for each in work.values())
        assert engine.cached_tokens_total == sum(first.cached_tokens for first in firsts)


@cache
def ideal() -> dict[str, int]:
    return {str(number): tokens for number, tokens in enumerate(ideal_cached_tokens(workload(1.0)))}


@ENGINES
@pytest.mark.parametrize("rate", [0.3, 3.0])
def test_cache_hits_never_exceed_the_ideal_cache(config: EngineConfig, rate: float) -> None:
    unlimited = replace(config, cache_tokens=10**9)

    for each in (config, unlimited):
        found = {
            event.request_id: event.cached_tokens for event in play(each, rate)[1] if isinstance(event, FirstToken)
        }
        assert all(cached <= ideal()[request_id] for request_id, cached in found.items())
        assert sum(found.values()) > sum(ideal().values()) / 2


@pytest.mark.parametrize("instances", [1, 4])
def test_shared_cache_never_exceeds_the_ideal_cache(instances: int) -> None:
    records = run_oracle("limit", engine=WHOLE, instances=instances, arrivals=asked(3.0)).records

    assert all(record.cached_tokens <= ideal()[record.arrival.request_id] for record in records)


@ENGINES
def test_larger_cache_never_has_fewer_hits(config: EngineConfig) -> None:
    sizes = [0, 10_000, 50_000, 200_000, 1_000_000, 10**8]
    hits = [
        {
            event.request_id: event.cached_tokens
            for event in play(replace(config, cache_tokens=size), 0.5)[1]
            if isinstance(event, FirstToken)
        }
        for size in sizes
    ]

    for smaller, larger in pairwise(hits):
        assert all(smaller[request_id] <= larger[request_id] for request_id in smaller)
    assert sum(hits[0].values()) == 0
    assert sum(hits[1].values()) < sum(hits[3].values()) < sum(hits[-1].values())


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=60)


@given(paths=PATHS, capacity=st.integers(0, 12), more=st.integers(1, 6))
def test_larger_cache_contains_all_blocks_of_the_smaller_cache(
    paths: list[list[int]], capacity: int, more: int
) -> None:
    small, large, unlimited = PrefixCache(capacity), PrefixCache(capacity + more), PrefixCache(None)
    for path in paths:
        chain = list(accumulate(path, lambda block, step: block * 3 + step + 1, initial=0))[1:]
        assert small.match(chain) <= large.match(chain) <= unlimited.match(chain)
        for each in (small, large, unlimited):
            each.insert(chain)


def waits_s(config: EngineConfig, at_s: Sequence[float], requests: Sequence[EngineRequest]) -> list[float]:
    engine = Engine(config)
    for each_s, request in zip(at_s, requests, strict=True):
        engine.submit(each_s, request)
    firsts = [event for event in run_out(engine) if isinstance(event, FirstToken)]
    return [first.prefill_started_s - first.arrived_s for first in firsts]


GAPS = st.lists(st.tuples(st.floats(0, 4), st.integers(1, 400), st.integers(1, 9)), min_size=1, max_size=40)


@given(asked=GAPS, faster=st.floats(1, 10))
@settings(max_examples=200)
def test_prefill_waits_equal_lindleys_recursion_and_grow_with_rate(
    asked: list[tuple[float, int, int]], faster: float
) -> None:
    """Lindley's equation: a request's wait is the previous request's wait plus service time, minus the time between the
    arrivals.
    """
    config = replace(ROUND, decode=None)
    times_s = list(accumulate(gap_s for gap_s, _, _ in asked))
    requests = [ask(str(n), prompt=prompt, blocks=range(blocks)) for n, (_, prompt, blocks) in enumerate(asked)]

    waits = waits_s(config, times_s, requests)
    hurried = waits_s(config, [at_s / faster for at_s in times_s], requests)

    took = 0.0
    engine = Engine(config)
    for wait_s, (gap_s, _, _), request, hurried_s in zip(waits, asked, requests, hurried, strict=True):
        took = max(0.0, took - gap_s)
        assert wait_s == pytest.approx(took, abs=1e-6)
        assert hurried_s >= wait_s - 1e-6
        cached = engine.cached_tokens(request)
        took += config.prefill.seconds(new_tokens=request.prompt_tokens - cached, cached_tokens=cached)
        engine.cache.insert(request.blocks[: request.prompt_tokens // config.block_tokens])


@ENGINES
def test_mean_wait_grows_with_the_rate(config: EngineConfig) -> None:
    ttfts_s = []
    for rate in (0.2, 0.5, 1.0, 2.0, 4.0):
        firsts = [event for event in play(config, rate)[1] if isinstance(event, FirstToken)]
        ttfts_s.append(sum(first.at_s - first.arrived_s for first in firsts) / len(firsts))

    assert ttfts_s == sorted(ttfts_s)
    assert ttfts_s[-1] > 10 * ttfts_s[0]


def test_engines_with_equal_config_and_input_behave_equally() -> None:
    rng = Random(5)
    aborted = [arrival.request_id for arrival in asked(1.0) if rng.random() < 0.1]

    assert play(CHUNKED, 1.0, aborted=aborted)[1] == play(CHUNKED, 1.0, aborted=aborted)[1]
