"""Tests of the table with the runs in which another policy is ahead."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
Bench = Callable[[str], ModuleType]


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.paper.{name}")


def times(**p50_s: float | None) -> dict[str, dict[str, float | None]]:
    return {policy: {"ttft_p50_s": time_s} for policy, time_s in p50_s.items()}


def test_behind_rows_counts_runs_and_names_the_largest_difference(bench: Bench) -> None:
    runs = {
        "first": times(dualmap=1.2, min_ttft=1.0, preble=1.1),
        "second": times(dualmap=1.0, min_ttft=1.0),
        "third": times(dualmap=3.0, min_ttft=2.5, dualmap_paper=2.0),
        "fourth": times(dualmap=1.1, min_ttft=1.0, preble=None),
        "not compared": times(min_ttft=1.0),
    }
    (row,) = bench("behind")._rows("ttft", runs, "ttft_p50_s")
    assert row == [
        "ttft",
        "TTFT p50",
        "3 of 4",
        "`min_ttft` (2)",
        "50 %: 3.000 and 2.000 s with `dualmap_paper` (third)",
    ]


def test_behind_rows_counts_attainment_in_points(bench: Bench) -> None:
    runs = {"first": {"dualmap": {"slo_attainment": 0.9}, "preble": {"slo_attainment": 0.95}}}
    (row,) = bench("behind")._rows("ttft", runs, "slo_attainment")
    assert row[-1] == "5.0 points: 90.0 and 95.0 % with `preble` (first)"


def test_behind_rows_of_a_default_that_is_ahead_is_empty(bench: Bench) -> None:
    runs = {"first": times(dualmap=1.0, min_ttft=1.0, preble=1.1)}
    assert list(bench("behind")._rows("ttft", runs, "ttft_p50_s")) == []
