"""Tests of the cost formulas of docs/engine-model.md with calculated numbers."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap_sim.presets import PRESETS, DecodeCost, slowed

DECODE = DecodeCost(step_s=0.03, per_kv_token_s=1e-7, per_request_s=2e-4)


def test_cold_prefill_costs_overhead_compute_and_attention() -> None:
    seconds = PRESETS["7b"].prefill.seconds(new_tokens=10_000, cached_tokens=0)

    # 0.02 + (10000 + 1.5e-5 * 1e8) / 7000
    assert seconds == pytest.approx(0.02 + 11_500 / 7000)


def test_cached_tokens_cost_loading_and_attention() -> None:
    seconds = PRESETS["14b"].prefill.seconds(new_tokens=1000, cached_tokens=9000)

    # (10000^2 - 9000^2) = 19e6; a/2 = 1.65e-5
    assert seconds == pytest.approx(0.02 + (1000 + 1.65e-5 * 19e6) / 4000 + 9000 / 100_000)


def test_decode_step_costs_weights_kv_and_requests() -> None:
    assert DECODE.steps_s(1, requests=3, kv_tokens=50_000) == pytest.approx(0.03 + 0.005 + 0.0006)


@given(steps=st.integers(0, 300), requests=st.integers(1, 50), kv_tokens=st.integers(1, 200_000))
def test_several_decode_steps_cost_the_sum_of_single_steps(steps: int, requests: int, kv_tokens: int) -> None:
    one_by_one = sum(
        DECODE.steps_s(1, requests=requests, kv_tokens=kv_tokens + step * requests) for step in range(steps)
    )

    assert DECODE.steps_s(steps, requests=requests, kv_tokens=kv_tokens) == pytest.approx(one_by_one)


@given(
    steps=st.integers(0, 100_000),
    requests=st.integers(1, 50),
    kv_tokens=st.integers(1, 200_000),
    per_kv_token_s=st.sampled_from([0.0, 1e-12, 1e-7, 1e-3]),
)
def test_steps_within_is_the_inverse_of_the_step_duration(
    steps: int, requests: int, kv_tokens: int, per_kv_token_s: float
) -> None:
    cost = DecodeCost(step_s=0.03, per_kv_token_s=per_kv_token_s, per_request_s=2e-4)
    seconds = cost.steps_s(steps, requests=requests, kv_tokens=kv_tokens)

    assert abs(cost.steps_within(seconds, requests=requests, kv_tokens=kv_tokens) - steps) <= 1


def test_engine_presets_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        PRESETS["7b"].cache_tokens = 1  # type: ignore[misc]  # the assignment under test
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["7b"]  # type: ignore[index]  # the assignment under test


@given(factor=st.floats(0.1, 10), new=st.integers(1, 20_000), cached=st.integers(0, 20_000))
def test_slowed_engine_takes_proportionally_longer(factor: float, new: int, cached: int) -> None:
    engine = PRESETS["14b"]
    slow = slowed(engine, factor)

    prefill_s = engine.prefill.seconds(new_tokens=new, cached_tokens=cached)
    assert slow.prefill.seconds(new_tokens=new, cached_tokens=cached) == pytest.approx(factor * prefill_s)
    assert engine.decode is not None
    assert slow.decode is not None
    step_s = engine.decode.steps_s(7, requests=3, kv_tokens=new)
    assert slow.decode.steps_s(7, requests=3, kv_tokens=new) == pytest.approx(factor * step_s)
    assert (slow.kv_memory_tokens, slow.cache_tokens) == (engine.kv_memory_tokens, engine.cache_tokens)


def test_slowed_prefill_only_engine_does_not_decode() -> None:
    assert slowed(PRESETS["pd"], 2.0).decode is None
