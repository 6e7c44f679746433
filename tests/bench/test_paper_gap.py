"""Tests of the section of the evaluation that compares ``dualmap`` with the bounds.

``bench`` is only in the source tree.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from dualmap_sim.experiment import Experiment
from dualmap_sim.workloads.catalog import Workload
from dualmap_sim.workloads.trace import Trace, TraceRequest

ROOT = Path(__file__).parents[2]
VARIANTS = 16
Bench = Callable[[str], ModuleType]


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.paper.{name}")


def test_no_recorded_goodput_passes_limit_deadline(bench: Bench) -> None:
    results, extent, goodput = (
        bench("results").Results(ROOT / "bench" / "results" / "paper"),
        bench("settings").Extent(trace=ROOT / "pyproject.toml"),
        bench("sections.goodput"),
    )
    cells = goodput.SECTION.cells(extent)
    rates = {each.name: kept["goodput_qps"] for each in cells if (kept := results.figures(each)) is not None}
    bounds = {name: rates[f"{name.rsplit(' ', 1)[0]} limit_deadline"] for name in rates}
    assert len(rates) > 100
    assert [name for name, rate in rates.items() if rate > bounds[name]] == []


def test_every_gap_variant_runs(bench: Bench) -> None:
    gap = bench("sections.gap")
    small = Experiment(
        workload=Workload(name="tool_agent", requests=150), requests_per_s=6.0, instances=2, warmup=50, sample_s=None
    )
    shares = {
        name: gap.attainment(replace(small, policy=variant.policy), name)["slo_attainment"]
        for name, (variant, _) in gap.VARIANTS.items()
    }
    assert len(shares) == VARIANTS
    assert all(0.0 <= share <= 1.0 for share in shares.values())
    # Two instances cannot serve 6 requests/s, so each of these differences changes the result.
    for changed in ("no deferring", "late requests count in T_q", "prefill times known"):
        assert shares[f"`dualmap`, {changed}"] != shares["`dualmap`"], changed


def test_gap_variants_leave_no_change_behind(bench: Bench) -> None:
    gap = bench("sections.gap")
    small = Experiment(workload=Workload(name="tool_agent", requests=150), requests_per_s=6.0, instances=2, warmup=50)
    before = gap.attainment(small, "`dualmap`")
    gap.attainment(small, "`dualmap`, prefill times known")
    gap.attainment(small, "`dualmap`, late requests count in T_q")
    assert gap.attainment(small, "`dualmap`") == before


def test_spread_evenly_keeps_order_and_spreads_equal_arrival_times(bench: Bench) -> None:
    at_s = (0.0, 0.0, 0.0, 3.0, 3.0, 6.0)
    requests = tuple(
        TraceRequest(arrival_s=each, blocks=(n,), input_tokens=1, output_tokens=1) for n, each in enumerate(at_s)
    )
    spread = bench("sections.gap").spread_evenly(Trace(name="batches", block_tokens=1, requests=requests))
    assert [each.arrival_s for each in spread.requests] == [0.0, 1.0, 2.0, 3.0, 4.5, 6.0]
    assert [each.blocks for each in spread.requests] == [(n,) for n in range(6)]
