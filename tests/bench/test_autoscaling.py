"""Tests of the autoscaling benchmark's harness: its settings, pages and charts. tests/sim tests the simulated runs."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
Bench = Callable[[str], ModuleType]
FIGURES = {
    "slo_attainment": 0.987,
    "worst_minute": 0.5,
    "refused": 3,
    "failed": 0,
    "ttft_p99_s": 4.2,
    "hit_rate": 0.333,
    "instance_hours": 10.25,
    "replicas_mean": 9.1,
    "replicas_max": 12,
    "changes": 4,
    "turns": 1,
    "cut": 0,
    "asked_after_s": 45.0,
    "serving_after_s": None,
    "series": {"at_s": [30.0, 60.0], "asked": [7, 9], "serving": [7, 7], "attainment": [[0.0, 1.0], [60.0, 0.9]]},
}


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.{name}")


def test_autoscaling_measurements_have_distinct_names(bench: Bench, tmp_path: Path) -> None:
    extent = bench("autoscaling.settings").Extent(quick=False, trace=tmp_path / "none")
    names = [cell.name for cell in bench("autoscaling.measures").cells(extent)]
    assert len(set(names)) == len(names)
    assert all(name.startswith("tool_agent ") for name in names)


def test_autoscaling_bench_uses_recorded_trace_if_present(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "trace").touch()
    assert bench("autoscaling.settings").Extent(quick=True, trace=tmp_path / "trace").workload == "conversation"


def test_autoscaling_page_shows_only_measured_values(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, measures, command = (bench(f"autoscaling.{name}") for name in ("settings", "measures", "command"))
    monkeypatch.setattr(command, "_RECORDED", tmp_path)
    extent = settings.Extent(quick=False, trace=tmp_path / "none")
    measured = bench("paper.results").Measured(figures=FIGURES, cost_s=60.0, commit="abc")
    bench("paper.results").Results(tmp_path).put(measures.cell(extent, "step", settings.SLO, 0), measured)
    done = CliRunner().invoke(command.autoscaling, ["--draw", "--trace", str(tmp_path / "none")])
    assert done.exit_code == 0, done.output
    assert "1.0 minutes of processor time; code as of abc" in done.output
    (row,) = (line for line in done.output.splitlines() if line.startswith("| SLO |"))
    assert row == "| SLO | 98.7 | 50 | 3 | 4.2 | 10.2 | 9.1 | 12 | 4 | 1 | 33.3 | 45 | - |"
    assert (tmp_path / "autoscaling.md").read_text() in done.output
    assert (tmp_path / "autoscaling.png").read_bytes().startswith(b"\x89PNG")


def test_autoscaling_run_measures_missing_and_stale_results(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, asked = bench("autoscaling.command"), []
    monkeypatch.setattr(command, "_QUICK", tmp_path)
    monkeypatch.setattr(command, "commit_of_code", lambda: "abc")

    def measure(cells: list[object], results: object, processes: int, *, commit: str) -> None:
        asked.append(len(cells))
        for each in cells:
            kept = bench("paper.results").Measured(figures=FIGURES, cost_s=1.0, commit=commit)
            results.put(each, kept)  # type: ignore[attr-defined]  # bench has no stubs

    monkeypatch.setattr(command, "measure_cells", measure)
    for arguments in ([], [], ["--stale"]):
        assert CliRunner().invoke(command.autoscaling, ["--quick", *arguments]).exit_code == 0
    monkeypatch.setattr(command, "commit_of_code", lambda: "abd")
    assert CliRunner().invoke(command.autoscaling, ["--quick", "--stale"]).exit_code == 0
    assert asked[0] > 0
    assert asked == [asked[0], 0, 0, asked[0]]
