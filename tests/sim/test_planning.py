"""Tests of capacity plans: the search for sizes, and plans by fitted engines beside full searches with the true one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import simulated_recording
from dualmap_cli.engine_file import engine_lines, read_engine
from dualmap_cli.main import main
from dualmap_cli.simulate.engine_options import changed
from dualmap_cli.simulate.plan import default_warmup
from dualmap_sim.experiment import Experiment, load_trace
from dualmap_sim.fitting.fit import fit_engine
from dualmap_sim.planning.capacity import Capacity, Engines, Sizes
from dualmap_sim.planning.intervals import Share
from dualmap_sim.planning.sizes import LARGEST, Fleet, Unattainable, fewest_up_to, least_instances, least_split
from dualmap_sim.planning.windows import WINDOW_REQUESTS, NoWindow, Peak, windows_of
from dualmap_sim.presets import PRESETS, EngineConfig
from dualmap_sim.workloads.catalog import WORKLOADS, Workload
from dualmap_sim.workloads.pacing import Phase, paced, wave
from recorded import write

SEVEN_B = PRESETS["7b"]
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
DAY_SLO_S = 6.0
"""With a shorter one, the longest prompts alone miss it, and more instances hardly attain more."""
STEADY = (Phase(seconds=DAY_S, rate=1.0),)
DAYS = {
    "steady": ("default", STEADY),
    "daily cycle": ("default", wave(period_s=DAY_S, low=0.3, high=1.7)),
    "launch spike": ("poisson_chats", (Phase(seconds=200.0, rate=0.7), Phase(seconds=40.0, rate=3.0))),
    "agentic": ("tool_agent", STEADY),
}


TRUE = replace(
    PRESETS["7b"],
    prefill=replace(PRESETS["7b"].prefill, tokens_per_s=6000.0, attention=4.0e-5),
    kv_memory_tokens=150_000,
    input_tokens_max=32_768,
    cache_tokens=60_000,
)
"""The engine of the days. It is none of the presets, so that a plan cannot have its numbers from one."""


@pytest.fixture(name="engine_file", scope="module")
def _engine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of an engine that is fitted to a recording of other traffic, as `dualmap fit` writes it."""
    other = replace(BASE, requests_per_s=2.0, warmup=0, engine=TRUE)
    requests, pool = simulated_recording.recorded(other), simulated_recording.pool_line(other).pool
    path = tmp_path_factory.mktemp("fit") / "engine.yaml"
    path.write_text("".join(engine_lines(fit_engine(simulated_recording.POOL, requests, known=pool, base=SEVEN_B))))
    return path


def recorded_day(day: str, folder: Path) -> Experiment:
    name, phases = DAYS[day]
    trace = paced(WORKLOADS[name](600).at_rate(2.0), phases)
    path = write(folder / "day.jsonl", *simulated_recording.imported(trace))
    return replace(
        BASE,
        workload=Workload(recording=path),
        requests_per_s=len(trace.requests) / trace.duration_s,
        slo_ttft_s=DAY_SLO_S,
    )


def fully_searched(base: Experiment) -> int:
    """Return the least number of true engines that attains the goal, by trying every number."""
    full = capacity(base, TRUE)
    return next(n for n in range(1, 30) if full.size(Fleet(n)).slo_attainment.value >= 0.9)


@pytest.mark.parametrize("day", DAYS)
def test_plan_by_a_fitted_engine_is_the_least_size_or_one_more(day: str, engine_file: Path, tmp_path: Path) -> None:
    base = recorded_day(day, tmp_path)
    least = fully_searched(base)
    # As the command does, because the true engine accepted every prompt.
    fitted = replace(changed(SEVEN_B, read_engine(engine_file).parameters), input_tokens_max=TRUE.input_tokens_max)
    planned = capacity(base, fitted).least().instances
    assert least <= planned <= least + 1


def test_command_plans_a_day_with_the_least_size_or_one_more(engine_file: Path, tmp_path: Path) -> None:
    base = recorded_day("daily cycle", tmp_path)
    arguments = (
        "plan",
        "--recording",
        base.workload.recording,
        "--engine",
        engine_file,
        "--slo",
        f"{DAY_SLO_S}s",
        "--json",
    )
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == 0, result.stderr
    least = fully_searched(replace(base, warmup=default_warmup(len(load_trace(base).requests))))
    assert least <= json.loads(result.stdout)["instances"] <= least + 1


def test_size_has_an_interval_of_the_traffic_and_of_the_engines() -> None:
    usual = PRESETS["7b"]
    slow, fast = (replace(usual, prefill=replace(usual.prefill, tokens_per_s=speed)) for speed in (6000.0, 8000.0))
    narrow = capacity(BASE, usual).size(Fleet(3)).slo_attainment
    wide = Capacity(BASE, Engines(usual=usual, slowest=slow, fastest=fast), 0.9).size(Fleet(3)).slo_attainment
    assert narrow.low < narrow.value < narrow.high
    assert wide.value == narrow.value
    assert wide.low < narrow.low
    assert wide.high > narrow.high


def test_slower_engines_need_more_instances() -> None:
    usual = PRESETS["7b"]
    slow = replace(usual, prefill=replace(usual.prefill, tokens_per_s=3000.0))
    fast = replace(usual, prefill=replace(usual.prefill, tokens_per_s=15_000.0))
    planning = Capacity(BASE, Engines(usual=usual, slowest=slow, fastest=fast), 0.9)
    sizes = planning.sizes(planning.least())
    assert sizes.high is not None
    assert sizes.low.instances < sizes.usual.instances < sizes.high.instances


def test_gain_that_may_be_chance_is_none() -> None:
    planning = capacity(replace(BASE, policy="round_robin"), PRESETS["7b"])
    assert planning.gain(replace(BASE, policy="round_robin"), Fleet(3)) is None
    gain = planning.gain(BASE, Fleet(3))
    assert gain is not None
    assert gain.low < gain.value < gain.high
    assert gain.value > 0.1


def test_gain_with_engines_that_are_uncertain_has_a_wider_interval() -> None:
    usual, base = PRESETS["7b"], replace(BASE, policy="round_robin")
    slow, fast = (replace(usual, prefill=replace(usual.prefill, tokens_per_s=speed)) for speed in (5000.0, 12_000.0))
    narrow = capacity(base, usual).gain(BASE, Fleet(3))
    wide = Capacity(base, Engines(usual=usual, slowest=slow, fastest=fast), 0.9).gain(BASE, Fleet(3))
    assert narrow is not None
    assert wide is not None
    assert wide.value == narrow.value
    assert wide.high - wide.low > narrow.high - narrow.low


def test_prompts_that_alone_miss_the_slo_are_unattainable() -> None:
    planning = capacity(replace(BASE, slo_ttft_s=0.05), PRESETS["7b"])
    with pytest.raises(Unattainable) as raised:
        planning.check()
    assert raised.value.instances is None
    capacity(BASE, PRESETS["7b"]).check()


def autoscaled(base: Experiment, instances: int, *, fewer: int = 0) -> Share:
    sizes = Sizes(usual=Fleet(instances), low=Fleet(instances - fewer), high=Fleet(instances + fewer))
    return capacity(base, PRESETS["7b"]).busy_share(sizes, windows=6)


def test_autoscaler_saves_little_on_steady_traffic_and_much_on_a_spike(tmp_path: Path) -> None:
    def share(day: str) -> Share:
        name, phases = DAYS[day]
        trace = paced(WORKLOADS[name](600).at_rate(2.0), phases)
        path = write(tmp_path / f"{day}.jsonl", *simulated_recording.imported(trace))
        return autoscaled(replace(BASE, workload=Workload(recording=path)), 20)

    steady, spike = share("steady"), share("launch spike")
    assert steady.value > 0.75
    assert spike.value < 0.6
    assert spike.low < spike.value < spike.high


def test_autoscaler_of_requests_at_one_time_saves_nothing(tmp_path: Path) -> None:
    (first, *_) = simulated_recording.imported(WORKLOADS["default"](3))
    path = write(tmp_path / "one.jsonl", first)
    base = replace(BASE, workload=Workload(recording=path), warmup=0)
    assert autoscaled(base, 3) == Share(value=1.0, low=1.0, high=1.0)


SPIKE = (Phase(seconds=200.0, rate=0.7), Phase(seconds=40.0, rate=3.0), Phase(seconds=60.0, rate=0.7))
"""The traffic of a launch: 3 of 15 windows of 20 s are busy."""


def spiky(folder: Path) -> Experiment:
    trace = paced(WORKLOADS["poisson_chats"](600).at_rate(2.0), SPIKE)
    path = write(folder / "spike.jsonl", *simulated_recording.imported(trace))
    rate = len(trace.requests) / trace.duration_s
    return replace(BASE, workload=Workload(recording=path), requests_per_s=rate)


def test_plan_of_the_peak_attains_the_goal_in_every_window_and_the_mean_does_not(tmp_path: Path) -> None:
    base, engine = spiky(tmp_path), PRESETS["7b"]
    engines = Engines(usual=engine, slowest=engine, fastest=engine)
    mean, whole, most = (
        Capacity(base, engines, 0.9, peak=peak)
        for peak in (None, Peak(percentile=1.0, window_s=20.0), Peak(percentile=0.7, window_s=20.0))
    )
    on_average, always, mostly = mean.least(), whole.least(), most.least()
    assert min(share.value for share in whole.in_windows(always)) >= 0.9
    assert min(share.value for share in whole.in_windows(on_average)) < 0.9
    assert on_average.instances <= mostly.instances < always.instances
    at_peak = whole.size(always).at_peak
    assert at_peak is not None
    assert at_peak.low <= at_peak.value <= at_peak.high
    assert at_peak.value == min(share.value for share in whole.in_windows(always))


def test_windows_of_few_requests_have_no_attainment_of_their_own() -> None:
    quiet = [1.0 * number for number in range(WINDOW_REQUESTS - 1)]
    busy = [100.0 + number for number in range(WINDOW_REQUESTS)]
    assert [(each.start_s, each.part) for each in windows_of([*quiet, *busy], 100.0)] == [
        (100.0, slice(len(quiet), len(quiet) + len(busy)))
    ]


def test_peak_without_a_window_of_enough_requests_is_rejected() -> None:
    engine = PRESETS["7b"]
    with pytest.raises(NoWindow):
        Capacity(
            BASE,
            Engines(usual=engine, slowest=engine, fastest=engine),
            0.9,
            peak=Peak(percentile=1.0, window_s=0.1),
        )


@pytest.mark.parametrize(("percentile", "windows", "missed"), [(0.99, 24, 0), (0.95, 24, 1), (1.0, 7, 0), (0.01, 1, 0)])
def test_percentile_of_windows_says_how_many_may_miss(percentile: float, windows: int, missed: int) -> None:
    assert Peak(percentile=percentile, window_s=1.0).may_miss(windows) == missed


@pytest.mark.parametrize("first", [1, 2, 5, 40])
def test_split_search_finds_the_least_sum_from_any_first_size(first: int) -> None:
    def attains(prefillers: int, decoders: int) -> float:
        return 1.0 - 0.3 / prefillers - 0.5 / decoders

    least = min(
        (p + d for p in range(1, 40) for d in range(1, 40) if attains(p, d) >= 0.8),
    )
    found = least_split(attains, 0.8, first=first)
    assert found.instances == least
    assert attains(found.prefillers, found.decoders) >= 0.8


def test_split_search_result_has_no_sufficient_smaller_fleet_if_more_instances_attain_less() -> None:
    def attains(prefillers: int, decoders: int) -> float:
        # Beside many prefill instances, two decode instances do not suffice.
        return 1.0 if prefillers >= 2 and decoders >= (2 if prefillers < 6 else 4) else 0.0

    assert least_split(attains, 0.9, first=8) == Fleet(4, 2)


def test_split_search_without_a_result_names_the_largest_size() -> None:
    with pytest.raises(Unattainable) as raised:
        least_split(lambda _prefillers, _decoders: 0.5, 0.9, first=3)
    assert raised.value.instances == LARGEST


def test_search_downwards_ends_at_the_least_size() -> None:
    for least in (1, 2, 7, 20):
        assert fewest_up_to(lambda number, least=least: float(number >= least), 1.0, 20) == least


APART = replace(
    BASE,
    requests_per_s=3.0,
    workload=Workload(name="tool_agent", requests=200),
    prefillers=1,
    sessions=False,
)


def test_plan_of_a_prefill_pool_is_the_least_of_a_full_search() -> None:
    engine = replace(PRESETS["7b"], pull_tokens_per_s=100_000.0)
    planning = capacity(APART, engine)
    found = planning.least()
    attaining = [
        total
        for total in range(2, found.instances + 1)
        for prefillers in range(1, total)
        if planning.size(Fleet(total, prefillers)).slo_attainment.value >= 0.9
    ]
    assert min(attaining) == found.instances
    assert planning.size(found).slo_attainment.value >= 0.9
    assert all(planning.size(fewer).slo_attainment.value < 0.9 for fewer in found.smaller())


def test_store_and_larger_cache_never_need_more_instances() -> None:
    usual = replace(PRESETS["7b"], cache_tokens=20_000)
    slow, fast = (replace(usual, prefill=replace(usual.prefill, tokens_per_s=speed)) for speed in (6000.0, 8000.0))
    planning = Capacity(replace(BASE, policy="round_robin"), Engines(usual=usual, slowest=slow, fastest=fast), 0.9)
    sizes = planning.sizes(planning.least())
    stored, doubled = planning.with_store(sizes, tokens_per_s=200_000.0), planning.with_double_cache(sizes)
    assert stored.usual.instances < sizes.usual.instances
    assert doubled.usual.instances <= sizes.usual.instances
    for each in (stored, doubled):
        assert each.high is not None
        assert each.low.instances <= each.usual.instances <= each.high.instances
