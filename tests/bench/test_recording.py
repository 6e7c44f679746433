"""Tests that the benchmark of recordings records every request that it measures."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from dualmap.recordings.values import RecordedOutcome
from recorded_folder import requests_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="bench_recording")
def _bench_recording(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.recording")


async def test_recording_benchmark_records_every_call(bench_recording: ModuleType, tmp_path: Path) -> None:
    picking = bench_recording.RecordedPicking(tmp_path)
    calls = list(bench_recording.reads(replace(bench_recording.KINDS[0], calls=3)))

    bench_recording.loop_us(picking, calls)
    bench_recording.writing_us(picking, len(calls))

    assert [each.outcome for each in requests_of(tmp_path)] == [RecordedOutcome.OK] * 3
    assert all(each.ttft_s is not None for each in requests_of(tmp_path))
