"""Tests of the table of benchmarks: every name runs something, and other names are refused."""

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.filterwarnings("ignore")
def test_every_benchmark_of_the_table_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    table = importlib.import_module("bench.__main__")
    assert all(callable(each.load()) for each in {**table.CORE, **table.COMMANDS}.values())
    assert all(f"  {name} " in table.usage() for name in {**table.CORE, **table.COMMANDS})


@pytest.mark.filterwarnings("ignore")
def test_decision_of_one_router_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    decided, picks = importlib.import_module("bench.decided"), importlib.import_module("bench.picks")

    async def decide() -> tuple[float, int]:
        router = decided.Deciding("alone-0123abcd")
        seconds = await router.decide(picks.bodies(1000)[0][0].body)
        return seconds, sum(each.in_flight for each in router.picker.statuses()[0].endpoints)

    seconds, in_flight = asyncio.run(decide())
    assert seconds > 0
    assert in_flight == 0


@pytest.mark.filterwarnings("ignore")
def test_decisions_at_once_leave_no_open_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    decided, picks = importlib.import_module("bench.decided"), importlib.import_module("bench.picks")

    async def decide() -> tuple[int, int]:
        router = decided.Deciding("alone-0123abcd")
        times_s = await decided._at_once(router, [each.body for each in picks.bodies(1000)[0]], 0.05)
        return len(times_s), sum(each.in_flight for each in router.picker.statuses()[0].endpoints)

    decisions, in_flight = asyncio.run(decide())
    assert decisions >= decided.AT_ONCE
    assert in_flight == 0


def test_unknown_benchmark_is_refused_with_all_names() -> None:
    done = bench("rings", "peer")
    assert done.returncode == 1
    assert "'peer' is not a benchmark; give some of rings, decisions" in done.stderr
    assert "peers, " in done.stderr
    assert "yardstick, paper" in done.stderr


def test_peers_refuses_measurements_of_no_duration() -> None:
    done = bench("peers", "--seconds", "0")
    assert done.returncode == 2
    assert "--seconds" in done.stderr
    assert "0.0 is not in the range 0.1<=x<=600" in done.stderr
