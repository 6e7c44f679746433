"""Tests of ``dualmap plan``: its document, text and chart, and what it rejects."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import simulated_recording
from dualmap_cli.main import main
from dualmap_sim.experiment import Experiment
from dualmap_sim.workloads.catalog import Workload
from recorded import write

AS_RECORDED = Experiment(
    requests_per_s=2.5, workload=Workload(requests=300), instances=3, warmup=0, slo_ttft_s=4.0, policy="round_robin"
)
SPEEDS = {"o": 0.02, "r": 7000, "a": 3.0e-5, "l": 350_000}


@pytest.fixture(name="recording", scope="module")
def _recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    requests = simulated_recording.recorded(AS_RECORDED)
    return write(folder / "requests.jsonl.gz", simulated_recording.pool_line(AS_RECORDED), *requests).parent


@pytest.fixture(name="engine")
def _engine(tmp_path: Path) -> Path:
    return engine_file(tmp_path, spread=0.1)


def engine_file(folder: Path, *, spread: float, speed: float = 1.0) -> Path:
    values = {name: value * (speed if name in ("r", "l") else 1) for name, value in SPEEDS.items()}
    path = folder / "engine.yaml"
    parameters = {
        name: {"value": value, "low": value * (1 - spread), "high": value * (1 + spread), "verdict": "known"}
        for name, value in values.items()
    }
    path.write_text(yaml.safe_dump({"parameters": parameters}))
    return path


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *(str(each) for each in arguments)])


def planned(*arguments: str | Path) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_plan_has_the_least_size_with_its_neighbours(recording: Path, engine: Path) -> None:
    document = planned("--recording", recording, "--engine", engine)
    instances = document["instances"]
    assert document["instances_low"] <= instances <= document["instances_high"]
    share = document["slo_attainment"]
    assert share["low"] <= share["value"] <= share["high"]
    assert share["value"] >= 0.9
    assert [each["instances"] for each in document["next"]] == [n for n in (instances - 1, instances - 2) if n > 0]
    assert document["next"][0]["slo_attainment"]["value"] < 0.9
    assert (document["believable"], document["warnings"]) == (
        True,
        ["the workload has only 300 requests, too few for a reliable figure"],
    )
    assert document["cache_doubled"]["instances"] <= instances
    assert 0 <= document["autoscaling"]["saved_share"] < 1
    # Round robin was recorded.
    best = document["settings"][0]
    assert (best["field"], best["now"], best["proposed"]) == ("spec.routing.policy", "round_robin", "dualmap")
    assert best["gain"] > 0


def test_growth_and_objective_change_the_size(recording: Path, engine: Path) -> None:
    usual = planned("--recording", recording, "--engine", engine)["instances"]
    assert planned("--recording", recording, "--engine", engine, "--growth", "2x")["instances"] > usual
    assert planned("--recording", recording, "--engine", engine, "--slo", "30s")["instances"] < usual
    assert planned("--recording", recording, "--engine", engine, "--attainment", "0.95")["instances"] >= usual


def test_text_and_chart_have_the_sizes(recording: Path, engine: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    result = invoke("--recording", recording, "--engine", engine, "--plot", plot)
    assert result.exit_code == 0, result.stderr
    assert "instances serve 90.0% of the requests within 4 s" in result.stdout
    assert "spec.routing.policy: round_robin -> dualmap" in result.stdout
    assert "With caches twice as large:" in result.stdout
    assert "warning: the workload has only 300 requests" in result.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_engine_that_does_not_repeat_the_recording_causes_a_warning(recording: Path, tmp_path: Path) -> None:
    document = planned("--recording", recording, "--engine", engine_file(tmp_path, spread=0.0, speed=3.0))
    assert document["believable"] is False
    assert document["warnings"][0].startswith("the simulation does not repeat the recording: the TTFT p50 is")


def test_unattainable_objective_exits_1_with_the_reason(recording: Path, engine: Path) -> None:
    result = invoke("--recording", recording, "--engine", engine, "--slo", "10ms")
    assert result.exit_code == 1
    assert (
        "no number of instances serves 90.0% of the requests within 0.01 s, because the prefill alone" in result.stderr
    )


def test_missing_options_and_files_are_usage_errors(recording: Path, engine: Path, tmp_path: Path) -> None:
    for arguments, told in (
        (("--engine", engine), "Missing option '--recording'"),
        (("--recording", recording), "Missing option '--engine'"),
        (("--recording", tmp_path / "absent", "--engine", engine), "give the folder of `dualmap router --record`"),
        (("--recording", recording, "--engine", tmp_path / "absent"), "give a file of `dualmap fit`"),
        (("--recording", recording, "--engine", engine, "--growth", "much"), "'much' is not accepted"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert told in " ".join(result.stderr.split())
