"""Tests of a run's figures with calculated values."""

from math import isnan

import pytest

from clusters import one_block_prompts
from dualmap.requests import Reason
from dualmap_sim.records import LoadSample, Record
from dualmap_sim.summary import percentile, summarise


def record(
    number: int, *, ttft_s: float | None = None, e2e_s: float | None = None, failed: bool = False, refused: bool = False
) -> Record:
    """Return a request of 100 tokens with its number as the arrival time in seconds."""
    arrival = one_block_prompts(*map(float, range(number + 1)))[number]
    return Record(
        arrival=arrival,
        router=0,
        first_token_s=None if ttft_s is None else number + ttft_s,
        finished_s=None if e2e_s is None else number + e2e_s,
        cached_tokens=0 if ttft_s is None else 30,
        failed=failed,
        refused=Reason.QUEUE_FULL if refused else None,
    )


def test_summary_counts_requests_not_served_as_slo_misses() -> None:
    records = [
        record(0, ttft_s=1.0, e2e_s=2.0),
        record(1, ttft_s=3.0, e2e_s=5.0),
        record(2, ttft_s=0.5, failed=True),
        record(3, refused=True),
        record(4, ttft_s=8.0, e2e_s=9.0),
    ]
    summary = summarise(records, slo_ttft_s=3.0)
    assert (summary.requests, summary.refused, summary.failed) == (5, 1, 1)
    assert summary.slo_attainment == pytest.approx(2 / 5)
    assert (summary.ttft_p50_s, summary.ttft_p90_s, summary.ttft_p999_s) == (3.0, 8.0, 8.0)
    assert (summary.e2e_p50_s, summary.e2e_p90_s) == (5.0, 9.0)
    assert summary.hit_rate == pytest.approx(0.3)


def test_summary_without_data_gives_nan() -> None:
    summary = summarise([record(0, refused=True)], slo_ttft_s=1.0)
    assert summary.slo_attainment == 0.0
    assert all(map(isnan, (summary.ttft_p50_s, summary.e2e_p90_s, summary.hit_rate, summary.pending_cv)))


def test_pending_token_cv_is_the_mean_over_samples_with_load() -> None:
    samples = [
        LoadSample(at_s=0.0, pending_tokens={"a": 0, "b": 0}),
        LoadSample(at_s=1.0, pending_tokens={"a": 5, "b": 5}),
        LoadSample(at_s=2.0, pending_tokens={"a": 10, "b": 0}),
        LoadSample(at_s=3.0, pending_tokens={"a": 3, "b": 1}),
    ]
    summary = summarise([record(0, ttft_s=1.0, e2e_s=1.0)], slo_ttft_s=1.0, samples=samples)
    assert summary.pending_cv == pytest.approx((0.0 + 1.0 + 0.5) / 3)
    assert isnan(summarise([record(0, ttft_s=1.0, e2e_s=1.0)], slo_ttft_s=1.0, samples=samples[:1]).pending_cv)


def test_percentile_is_always_an_observed_value() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.25, 0.26, 0.5, 0.99, 1.0)] == [
        1,
        1,
        2,
        2,
        4,
        4,
    ]
