"""Tests of ``dualmap plan``: its document, text and chart, and what it rejects."""

import json
from collections.abc import Callable
from dataclasses import replace
from operator import ge, gt, lt
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import simulated_recording
from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.recordings.values import PoolChanged
from dualmap_cli.main import main
from dualmap_sim.experiment import Experiment
from dualmap_sim.prefill_decode import split_pools
from dualmap_sim.workloads.catalog import WORKLOADS, Workload
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


@pytest.fixture(name="usual", scope="module")
def _usual(recording: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the plan without further options."""
    return planned("--recording", recording, "--engine", engine_file(tmp_path_factory.mktemp("usual"), spread=0.1))


def test_plan_has_the_least_size_with_its_neighbours(usual: dict[str, Any]) -> None:
    document = usual
    instances = document["instances"]
    assert document["instances_low"] <= instances <= document["instances_high"]
    share = document["slo_attainment"]
    assert share["low"] <= share["value"] <= share["high"]
    assert share["value"] >= 0.9
    assert [each["instances"] for each in document["next"]] == [n for n in (instances - 1, instances - 2) if n > 0]
    assert document["next"][0]["slo_attainment"]["value"] < 0.9
    assert (document["believable"], document["warnings"]) == (
        True,
        [
            "not in the fit, from preset 7b: m, c, d0, d1, d2, block, chunk; the ranges do not cover their errors",
            "the workload has only 300 requests, too few for a reliable figure",
        ],
    )
    for saving in (document["cache_doubled"], document["kv_store"]):
        assert saving["instances_low"] <= saving["instances"] <= min(instances, saving["instances_high"])
    hours = document["autoscaling"]
    assert 0 <= hours["saved_share_low"] <= hours["saved_share"] <= hours["saved_share_high"] < 1
    assert (document["prefill"], document["decode"], document["peak"]) == (None, None, None)
    # Round robin was recorded.
    best = document["settings"][0]
    assert (best["field"], best["now"], best["proposed"]) == ("spec.routing.policy", "round_robin", "dualmap")
    assert best["gain_low"] <= best["gain"] <= best["gain_high"]
    assert best["gain"] > 0


def test_parameters_without_an_interval_cause_a_warning(recording: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(engine_file(tmp_path, spread=0.1).read_text())
    document["parameters"]["r"] |= {"low": None, "high": None}
    document["parameters"]["l"] |= {"high": None}
    del document["parameters"]["a"]
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(document))
    assert planned("--recording", recording, "--engine", path, "--requests", "60")["warnings"][0] == (
        "not in the fit, from preset 7b: a, m, c, d0, d1, d2, block, chunk; no interval: l, r; "
        "the ranges do not cover their errors"
    )


@pytest.mark.parametrize(
    ("option", "value", "is_other"), [("--growth", "2x", gt), ("--slo", "30s", lt), ("--attainment", "0.95", ge)]
)
def test_growth_and_objective_change_the_size(
    recording: Path, engine: Path, usual: dict[str, Any], option: str, value: str, is_other: Callable[[int, int], bool]
) -> None:
    changed = planned("--recording", recording, "--engine", engine, option, value)
    assert is_other(changed["instances"], usual["instances"])


def test_text_and_chart_have_the_sizes(recording: Path, engine: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    result = invoke("--recording", recording, "--engine", engine, "--plot", plot)
    assert result.exit_code == 0, result.stderr
    assert "instances serve 90.0% of the requests within 4 s" in result.stdout
    assert "spec.routing.policy: round_robin -> dualmap" in result.stdout
    assert "With caches twice as large:" in result.stdout
    assert "With a KV store that forgets nothing (200,000 tokens/s):" in result.stdout
    assert "warning: the workload has only 300 requests" in result.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_peak_needs_more_instances_and_names_the_worst_windows(recording: Path, engine: Path) -> None:
    arguments = ("--recording", recording, "--engine", engine, "--growth", "2x")
    usual, document = planned(*arguments), planned(*arguments, "--peak", "p100-10s")
    assert document["instances"] > usual["instances"]
    assert document["peak"] == {"percentile": 1.0, "window_s": 10.0, "windows_may_miss": 0}
    shares = [each["slo_attainment"]["value"] for each in document["windows"]]
    assert min(shares) == document["slo_attainment_at_peak"]["value"] >= 0.9
    assert all(each["requests"] >= 20 for each in document["windows"])
    assert document["next"][0]["slo_attainment_at_peak"]["value"] < 0.9


def test_text_with_a_peak_has_the_worst_windows(recording: Path, engine: Path) -> None:
    text = invoke("--recording", recording, "--engine", engine, "--peak", "p80-20s").stdout
    assert "The worst of 4 windows (20 s, 0 of which may miss the goal):" in text
    assert "at the peak" in text


def test_peak_of_windows_without_requests_is_a_usage_error(recording: Path, engine: Path) -> None:
    result = invoke("--recording", recording, "--engine", engine, "--peak", "p99-1s")
    assert result.exit_code == 2
    assert "no window has the 20 requests that it needs; give a longer window" in " ".join(result.stderr.split())


def test_windows_longer_than_the_recording_cause_a_warning(recording: Path, engine: Path) -> None:
    arguments = ("--recording", recording, "--engine", engine, "--requests", "30", "--slo", "10m", "--peak", "p99-day")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "warning: the windows of --peak (day) are longer than the recording, which lasts " in result.stderr
    assert result.stdout.startswith("1 instance serves 90.0% of the requests within 600 s")


def test_request_too_long_for_the_memory_names_the_option_that_gave_it(recording: Path, engine: Path) -> None:
    document = yaml.safe_load(engine.read_text())
    document["parameters"]["m"] = {"value": 1000, "low": 1000, "high": 1000, "verdict": "known"}
    small = engine.with_name("small.yaml")
    small.write_text(yaml.safe_dump(document))
    told = " ".join(invoke("--recording", recording, "--engine", small).stderr.split())
    assert "Invalid value for --engine: the engine has m=1000 tokens of KV memory" in told
    assert "give a file of --engine with m=" in told
    assert "--set" not in told


@pytest.mark.parametrize("peak", ["p99", "99-hour", "p101-hour", "p0-day", "p99-week", "p99-0s", "p99.12345-day"])
def test_peak_in_another_form_is_a_usage_error(recording: Path, engine: Path, peak: str) -> None:
    result = invoke("--recording", recording, "--engine", engine, "--peak", peak)
    assert result.exit_code == 2
    assert f"'{peak}' is not accepted; give a percentile above p0 up to p100 with at most three decimals" in " ".join(
        result.stderr.split()
    )


def test_mean_that_hides_a_bad_hour_causes_a_warning(engine: Path, tmp_path: Path) -> None:
    trace = WORKLOADS["default"](200)
    # One request every 22 s, but the last 20 of the second hour at once.
    requests = [replace(each, arrival_s=22.0 * min(number, 180)) for number, each in enumerate(trace.requests)]
    path = write(tmp_path / "hours.jsonl", *simulated_recording.imported(replace(trace, requests=tuple(requests))))
    document = planned("--recording", path, "--engine", engine)
    assert [round(each["start_s"]) for each in document["windows"]] == [0, 3600]
    assert document["warnings"][-1].startswith("1 of 2 windows (hour) attain less than 90.0%, the worst ")
    assert document["warnings"][-1].endswith("; to plan for them, give --peak p100-hour")


def apart(*, prefillers: int, decoders: int) -> list[PoolChanged]:
    """Return the lines about a recorded pool and its prefill pool."""
    pool = simulated_recording.pool_line(replace(AS_RECORDED, instances=prefillers + decoders)).pool
    decode, prefill = split_pools(pool, prefillers=prefillers)
    return [PoolChanged(at_s=0.0, pool=each) for each in (decode, prefill)]


def test_pool_with_a_prefill_pool_gets_the_least_of_both_kinds(engine: Path, tmp_path: Path) -> None:
    requests = simulated_recording.recorded(AS_RECORDED)
    path = write(tmp_path / "apart.jsonl", *apart(prefillers=2, decoders=2), *requests)
    document = planned("--recording", path, "--engine", engine)
    prefill, decode = document["prefill"], document["decode"]
    assert prefill["instances"] >= 1
    assert decode["instances"] >= 1
    assert prefill["instances"] + decode["instances"] == document["instances"]
    for each in (prefill, decode):
        assert each["instances_low"] <= each["instances"] <= each["instances_high"]
    assert [each["prefill"] + each["decode"] for each in document["next"]] == [
        document["instances"] - 1 for _ in document["next"]
    ]
    assert all(each["slo_attainment"]["value"] < 0.9 for each in document["next"])
    assert document["kv_store"] is None
    text = invoke("--recording", path, "--engine", engine).stdout
    assert f"({prefill['instances']} prefill and {decode['instances']} decode)" in text
    assert f"{prefill['instances']}P+{decode['instances']}D" in text


def test_engines_that_cannot_decode_are_rejected_for_a_prefill_pool(engine: Path, tmp_path: Path) -> None:
    requests = simulated_recording.recorded(AS_RECORDED)
    path = write(tmp_path / "apart.jsonl", *apart(prefillers=2, decoders=2), *requests)
    result = invoke("--recording", path, "--engine", engine, "--model", "pd")
    assert result.exit_code == 2
    assert "the engines do not decode, which a pool with prefillPool requires" in " ".join(result.stderr.split())


def test_pool_with_a_store_is_planned_with_it(engine: Path, tmp_path: Path) -> None:
    requests = simulated_recording.recorded(AS_RECORDED)
    line = simulated_recording.pool_line(AS_RECORDED)
    stored = PoolChanged(at_s=0.0, pool=replace(line.pool, kv_store=KvStore(type=StoreType.MOONCAKE)))
    without, with_it = (
        planned("--recording", write(tmp_path / name, each, *requests), "--engine", engine, "--growth", "2x")
        for name, each in (("without.jsonl", line), ("stored.jsonl", stored))
    )
    assert with_it["kv_store"] is None
    assert with_it["instances"] == without["kv_store"]["instances"] < without["instances"]


def test_members_that_differ_in_the_file_of_the_engine_are_planned_as_equal(recording: Path, tmp_path: Path) -> None:
    path = engine_file(tmp_path, spread=0.1)
    usual = planned("--recording", recording, "--engine", path)
    document = yaml.safe_load(path.read_text())
    slow = {"r": {"value": 700, "low": 650, "high": 750, "verdict": "known"}}
    path.write_text(yaml.safe_dump({**document, "members": {"qwen-0": {"parameters": slow}}}))
    differing = planned("--recording", recording, "--engine", path)
    assert differing["instances"] == usual["instances"]
    assert "1 member of the engine's file differs; the plan has equal engines" in differing["warnings"]


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
