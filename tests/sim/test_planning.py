"""Tests of capacity plans: the search for sizes, and plans by fitted engines beside full searches with the true one."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import simulated_recording
from dualmap_sim.experiment import Experiment
from dualmap_sim.fitting.fit import fit_engine
from dualmap_sim.planning.capacity import Capacity, Engines
from dualmap_sim.planning.sizes import LARGEST, Unattainable, least_instances
from dualmap_sim.presets import PRESETS, DecodeCost, EngineConfig, PrefillCost
from dualmap_sim.workloads.catalog import WORKLOADS, Workload
from dualmap_sim.workloads.pacing import Phase, paced, wave
from recorded import write

BASE = Experiment(requests_per_s=4.0, workload=Workload(requests=500), instances=4, warmup=50, slo_ttft_s=4.0)


def capacity(base: Experiment, engine: EngineConfig, target: float = 0.9) -> Capacity:
    return Capacity(base, Engines(usual=engine, slowest=engine, fastest=engine), target)


@pytest.mark.parametrize("first", [1, 3, 7, 8, 200])
def test_search_finds_the_least_size_from_any_first_one(first: int) -> None:
    tried: list[int] = []

    def attains(instances: int) -> float:
        tried.append(instances)
        return min(1.0, instances / 10)

    assert least_instances(attains, 0.71, first=first) == 8
    assert len(tried) < 12


def test_search_without_a_result_names_the_largest_size() -> None:
    with pytest.raises(Unattainable) as raised:
        least_instances(lambda _: 0.5, 0.9, first=3)
    assert (raised.value.instances, raised.value.share) == (LARGEST, 0.5)


DAY_S = 300.0
STEADY = (Phase(seconds=DAY_S, rate=1.0),)
DAYS = {
    "steady": ("default", STEADY),
    "daily cycle": ("default", wave(period_s=DAY_S, low=0.3, high=1.7)),
    "launch spike": ("poisson_chats", (Phase(seconds=200.0, rate=0.7), Phase(seconds=40.0, rate=3.0))),
    "agentic": ("tool_agent", STEADY),
}


@cache
def fitted_engine() -> EngineConfig:
    """Return the engine 7b as fitted to a recording of other traffic."""
    recorded = simulated_recording.recorded(replace(BASE, instances=6, requests_per_s=2.0, warmup=0))
    found = fit_engine(simulated_recording.POOL, recorded, known=None, base=PRESETS["7b"]).parameters
    values = [found[name].value for name in ("o", "r", "a", "l", "d0", "d1", "d2")]
    overhead_s, tokens_per_s, attention, load, step_s, per_kv_token_s, per_request_s = (
        value or 0.0 for value in values
    )
    return replace(
        PRESETS["7b"],
        prefill=PrefillCost(
            overhead_s=overhead_s, tokens_per_s=tokens_per_s, attention=attention, load_tokens_per_s=load
        ),
        decode=DecodeCost(step_s=step_s, per_kv_token_s=per_kv_token_s, per_request_s=per_request_s),
    )


@pytest.mark.parametrize("day", DAYS)
def test_plan_by_a_fitted_engine_is_the_least_size_or_one_more(day: str, tmp_path: Path) -> None:
    name, phases = DAYS[day]
    trace = paced(WORKLOADS[name](600).at_rate(2.0), phases)
    path = write(tmp_path / "day.jsonl", *simulated_recording.imported(trace))
    base = replace(BASE, workload=Workload(recording=path), requests_per_s=len(trace.requests) / trace.duration_s)
    planned, full = capacity(base, fitted_engine()).least(), capacity(base, PRESETS["7b"])
    least = next(n for n in range(1, 20) if full.size(n).slo_attainment.value >= 0.9)
    assert least <= planned <= least + 1


def test_size_has_an_interval_of_the_traffic_and_of_the_engines() -> None:
    usual = PRESETS["7b"]
    slow, fast = (replace(usual, prefill=replace(usual.prefill, tokens_per_s=speed)) for speed in (6000.0, 8000.0))
    narrow = capacity(BASE, usual).size(3).slo_attainment
    wide = Capacity(BASE, Engines(usual=usual, slowest=slow, fastest=fast), 0.9).size(3).slo_attainment
    assert narrow.low < narrow.value < narrow.high
    assert wide.value == narrow.value
    assert wide.low < narrow.low
    assert wide.high > narrow.high


def test_slower_engines_need_more_instances() -> None:
    usual = PRESETS["7b"]
    slow = replace(usual, prefill=replace(usual.prefill, tokens_per_s=3000.0))
    fast = replace(usual, prefill=replace(usual.prefill, tokens_per_s=15_000.0))
    planning = Capacity(BASE, Engines(usual=usual, slowest=slow, fastest=fast), 0.9)
    least = planning.least()
    low, high = planning.least_range(least)
    assert low < least < high


def test_gain_that_may_be_chance_is_none() -> None:
    planning = capacity(replace(BASE, policy="round_robin"), PRESETS["7b"])
    assert planning.gain(replace(BASE, policy="round_robin"), 3) is None
    gain = planning.gain(BASE, 3)
    assert gain is not None
    assert gain > 0.1


def test_prompts_that_alone_miss_the_slo_are_unattainable() -> None:
    planning = capacity(replace(BASE, slo_ttft_s=0.05), PRESETS["7b"])
    with pytest.raises(Unattainable) as raised:
        planning.check()
    assert raised.value.instances is None
    capacity(BASE, PRESETS["7b"]).check()


def test_autoscaler_saves_little_on_steady_traffic_and_much_on_a_spike(tmp_path: Path) -> None:
    def share(day: str) -> float:
        name, phases = DAYS[day]
        trace = paced(WORKLOADS[name](600).at_rate(2.0), phases)
        path = write(tmp_path / f"{day}.jsonl", *simulated_recording.imported(trace))
        return capacity(replace(BASE, workload=Workload(recording=path)), PRESETS["7b"]).busy_share(20, windows=6)

    assert share("steady") > 0.75
    assert share("launch spike") < 0.6


def test_autoscaler_of_requests_at_one_time_saves_nothing(tmp_path: Path) -> None:
    (first, *_) = simulated_recording.imported(WORKLOADS["default"](3))
    path = write(tmp_path / "one.jsonl", first)
    base = replace(BASE, workload=Workload(recording=path), warmup=0)
    assert capacity(base, PRESETS["7b"]).busy_share(3, windows=6) == 1.0
