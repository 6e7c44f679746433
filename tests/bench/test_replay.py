"""Tests that the replay benchmark measures routed requests, not rejections."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from dualmap_extproc.request.observations import Ended, FirstTokenSeen, Rejected, Routed
from extproc.envoy_messages import Recorder

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="bench_replay")
def _bench_replay(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.replay")


async def test_replay_benchmark_routes_and_ends_every_call(bench_replay: ModuleType) -> None:
    for kind in bench_replay.KINDS:
        picking, seen = bench_replay.Picking(), Recorder()
        for observation in (Routed, FirstTokenSeen, Ended, Rejected):
            picking.observers.observations.subscribe(observation, seen.report)

        bench_replay.cpu_us(picking, list(bench_replay.reads(replace(kind, calls=3))))

        assert seen.names() == ["routed", "first_token", "finished"] * 3
