"""Tests of fits: recordings of simulated engines and of a real vLLM, whose parameters or second halves are known."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import simulated_recording
import vllm_recording
from dualmap.pools.pool import Engine
from dualmap.recordings.values import RecordedOutcome, RecordedRequest
from dualmap_sim.experiment import Experiment, pool_of
from dualmap_sim.fitting.estimates import EngineFit, Estimate, FitError, Verdict
from dualmap_sim.fitting.fit import fit_engine
from dualmap_sim.presets import PRESETS, EngineConfig, slowed
from dualmap_sim.workloads.catalog import Workload

LIGHT = Experiment(requests_per_s=0.5, workload=Workload(requests=600), instances=2, warmup=0)
BUSY = replace(LIGHT, requests_per_s=1.5, workload=Workload(requests=1200))
FEW_EVICTIONS = replace(LIGHT, instances=4, requests_per_s=2.5, workload=Workload(requests=500))
SPEEDS = ("o", "r", "a", "l", "d0", "d1", "d2")


def fit(requests: list[RecordedRequest], *, complete: bool = True) -> EngineFit:
    return fit_engine(simulated_recording.POOL, requests, known=None, base=PRESETS["7b"], complete=complete)


@cache
def light() -> list[RecordedRequest]:
    return simulated_recording.recorded(LIGHT)


def truth(engine: EngineConfig) -> dict[str, float]:
    assert engine.decode is not None
    return {
        "o": engine.prefill.overhead_s,
        "r": engine.prefill.tokens_per_s,
        "a": engine.prefill.attention,
        "l": engine.prefill.load_tokens_per_s,
        "d0": engine.decode.step_s,
        "d1": engine.decode.per_kv_token_s,
        "d2": engine.decode.per_request_s,
    }


@pytest.mark.parametrize("preset", ["7b", "14b", "agent"])
def test_fit_of_light_traffic_finds_every_speed(preset: str) -> None:
    found = fit(simulated_recording.recorded(replace(LIGHT, engine=PRESETS[preset])))
    for name, value in truth(PRESETS[preset]).items():
        assert found.parameters[name].value == pytest.approx(value, rel=0.1), name
    assert found.parameters["block"].value == 512
    assert found.error_quantile(0.5) == pytest.approx(0, abs=0.01)
    assert found.members == {}


@pytest.mark.parametrize("preset", list(PRESETS))
def test_fit_of_busy_engines_predicts_the_other_half(preset: str) -> None:
    found = fit(simulated_recording.recorded(replace(BUSY, engine=PRESETS[preset])))
    median = found.error_quantile(0.5)
    assert median is not None
    assert median < 0.1


def test_fit_of_engines_that_only_prefill_lacks_decode_steps() -> None:
    found = fit(simulated_recording.recorded(replace(LIGHT, engine=PRESETS["pd"])))
    assert {found.parameters[name].verdict for name in ("d0", "d1", "d2")} == {Verdict.ABSENT}
    assert found.parameters["r"].value == pytest.approx(5500, rel=0.01)


def test_slow_member_is_named_with_its_own_speeds() -> None:
    slow = (("qwen-1", slowed(PRESETS["7b"], 1.5)),)
    found = fit(simulated_recording.recorded(replace(BUSY, instances=3, engines=slow)))
    (member,) = found.members.values()
    assert member["r"].value == pytest.approx(7000 / 1.5, rel=0.05)
    assert member["o"].value == pytest.approx(0.02 * 1.5, rel=0.3)
    assert found.parameters["r"].value == pytest.approx(7000, rel=0.05)


def test_steps_of_chunked_prefills_are_found_in_queues() -> None:
    engine = replace(PRESETS["7b"], chunk_tokens=2048)
    found = fit(simulated_recording.recorded(replace(BUSY, engine=engine)))
    assert found.parameters["chunk"].value == 2048


def test_cache_size_is_found_when_prompts_are_evicted() -> None:
    engine = replace(PRESETS["7b"], cache_tokens=100_000)
    found = fit(simulated_recording.recorded(replace(LIGHT, engine=engine))).parameters["c"]
    assert found.value == pytest.approx(100_000, rel=0.2)


def test_cache_without_evictions_is_absent_with_its_least_size() -> None:
    found = fit(light()).parameters["c"]
    assert found.verdict is Verdict.ABSENT
    assert "evictions changed less than 1% of the prompt tokens: the cache holds at least" in found.reason


def test_least_size_of_a_cache_with_few_evictions_is_below_its_size() -> None:
    engine = replace(PRESETS["7b"], cache_tokens=175_000)
    found = fit(simulated_recording.recorded(replace(FEW_EVICTIONS, engine=engine))).parameters["c"]
    assert found.verdict is Verdict.ABSENT
    held = re.search(r"at least ([\d,]+) tokens", found.reason)
    assert held is not None
    assert 50_000 < int(held[1].replace(",", "")) <= 175_000


def test_requests_above_the_bounds_do_not_change_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replace(PRESETS["7b"], cache_tokens=100_000, chunk_tokens=2048)
    requests = simulated_recording.recorded(replace(BUSY, engine=engine))
    whole = fit(requests).parameters
    monkeypatch.setattr("dualmap_sim.fitting.cache.REQUESTS_MOST", 5)
    monkeypatch.setattr("dualmap_sim.fitting.fit.TRIED_MOST", 0)
    first = fit(requests).parameters
    for name in ("c", "chunk"):
        assert whole[name].verdict is not Verdict.ABSENT
        assert first[name].verdict is Verdict.ABSENT


def test_memory_is_that_of_the_pool() -> None:
    pool = replace(pool_of(LIGHT), engine=Engine(kv_tokens=190_000))
    found = fit_engine(pool.id, light(), known=pool, base=PRESETS["7b"]).parameters["m"]
    assert (found.value, found.verdict) == (190_000, Verdict.KNOWN)


@pytest.mark.parametrize(("name", "median", "step"), [("vllm_chunked", 0.13, 512), ("vllm_whole", 0.16, 8192)])
def test_fit_of_a_real_vllm_predicts_as_well_as_the_engine_repeats_itself(
    name: str, median: float, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal requests of two rounds differ by 10 to 13 % with chunks, and by 5 to 15 % without (bench/results)."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    found = fit_engine(vllm_recording.POOL, vllm_recording.recorded(name), known=None, base=PRESETS["7b"])
    assert len(found.predictions) == 402
    error = found.error_quantile(0.5)
    assert error is not None
    assert error < median
    assert found.parameters["chunk"].value == step
    assert found.parameters["block"].value == 32


def test_part_of_the_sessions_makes_nothing_certain() -> None:
    found = fit(light(), complete=False)
    assert Verdict.KNOWN not in {each.verdict for each in found.parameters.values()}
    assert "a part of the sessions" in found.parameters["r"].reason


def test_recording_without_cached_tokens_cannot_be_fitted() -> None:
    with pytest.raises(FitError, match="--enable-prompt-tokens-details"):
        fit([each._replace(cached_tokens=None) for each in light()])


def test_recording_without_streams_cannot_be_fitted() -> None:
    with pytest.raises(FitError, match="only 0 streamed answers have a prefill of their own, 20 are needed"):
        fit([each._replace(streamed=False, ttft_s=None) for each in light()])


def test_prompts_without_cached_tokens_leave_their_cost_absent() -> None:
    found = fit([each._replace(cached_tokens=0) for each in light() if each.cached_tokens == 0])
    assert found.parameters["l"].verdict is Verdict.ABSENT
    assert found.parameters["block"].verdict is Verdict.ABSENT


def test_failed_and_retried_requests_do_not_change_the_fit() -> None:
    sound = light()
    failed = [
        each._replace(arrived_s=each.arrived_s + 0.001, ttft_s=30.0, duration_s=30.0, **wrong)
        for each, wrong in zip(sound[::100], _wrongs(), strict=False)
    ]
    found = fit(sorted([*sound, *failed], key=lambda each: each.arrived_s))
    assert found.parameters["r"].value == pytest.approx(7000, rel=0.02)


@pytest.mark.parametrize(
    "counts",
    [
        {"engine_prompt_tokens": 10**9},
        {"engine_prompt_tokens": 10**6, "cached_tokens": 10**6 - 100},
        {"output_tokens": 10**6},
        {"engine_prompt_tokens": 1, "cached_tokens": 0},
    ],
)
def test_single_wrong_count_of_tokens_does_not_change_the_fit(counts: dict[str, int]) -> None:
    requests = light().copy()
    requests[200] = requests[200]._replace(**counts)
    found = fit(requests)
    for name, value in truth(PRESETS["7b"]).items():
        assert found.parameters[name].value == pytest.approx(value, rel=0.1), name
    assert found.parameters["c"].verdict is Verdict.ABSENT
    assert len(found.predictions) >= 299
    median = found.error_quantile(0.5)
    assert median is not None
    assert median < 0.01
    assert found.impossible == (max(counts.values()) > 1)


def test_many_wrong_counts_are_all_used() -> None:
    wrong = [
        each._replace(engine_prompt_tokens=10**8) if number % 10 == 0 else each
        for number, each in enumerate(light()[:300])
    ]
    assert fit(wrong).impossible == 0


def test_sound_recordings_have_no_impossible_counts() -> None:
    assert fit(light()).impossible == 0


def _wrongs() -> list[dict[str, object]]:
    return [
        {"outcome": RecordedOutcome.ENGINE_ERROR},
        {"outcome": RecordedOutcome.CLIENT_GONE},
        {"attempts": 2},
        {"sequences": 4},
        {"comparable": False},
    ]


def test_fit_is_reproducible() -> None:
    few = light()[:150]
    assert fit(few) == fit(few)


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (Estimate.of(10.0, 9.0, 11.0, reason="", missing=""), Verdict.KNOWN),
        (Estimate.of(10.0, 5.0, 11.0, reason="", missing=""), Verdict.WEAK),
        (Estimate.of(10.0, 9.0, None, reason="", missing=""), Verdict.WEAK),
        (Estimate.of(0.0, 0.0, 0.0, reason="", missing=""), Verdict.WEAK),
    ],
)
def test_verdict_follows_the_width_of_the_interval(estimate: Estimate, verdict: Verdict) -> None:
    assert estimate.verdict is verdict


def test_cache_content_of_before_the_recording_is_no_eviction() -> None:
    found = fit(light()[300:]).parameters["c"]
    assert found.verdict is Verdict.ABSENT


def test_single_odd_count_of_cached_tokens_leaves_the_block_length() -> None:
    odd = [each._replace(cached_tokens=(each.engine_prompt_tokens or 0) - 1) for each in light()[:1]]
    assert fit([*odd, *light()[1:]]).parameters["block"].value == 512


def test_times_that_do_not_grow_with_prompts_leave_a_weak_speed() -> None:
    flat = [each._replace(ttft_s=0.5, duration_s=0.6 + 0.001 * (each.output_tokens or 0)) for each in light()]
    found = fit(flat).parameters
    assert found["r"].verdict is Verdict.WEAK
    assert (found["r"].value or 0.0) > 0


def test_requests_that_overlap_on_one_prompt_are_no_eviction() -> None:
    twins = [
        [each, each._replace(arrived_s=each.arrived_s + 0.001, cached_tokens=0)]
        for each in light()
        if not each.cached_tokens
    ]
    found = fit(sorted((each for pair in twins for each in pair), key=lambda each: each.arrived_s))
    assert found.parameters["c"].verdict is Verdict.ABSENT
