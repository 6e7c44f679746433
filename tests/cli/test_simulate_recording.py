"""Tests of ``--recording``: simulations of recorded traffic, as it was and otherwise."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import simulated_recording
from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.recordings.values import PoolChanged, RecordedOutcome, RecordedRequest
from dualmap_cli.main import main
from dualmap_sim.events import PoolChange
from dualmap_sim.experiment import Experiment, pool_of
from dualmap_sim.prefill_decode import split_pools
from dualmap_sim.presets import PRESETS
from dualmap_sim.workloads.catalog import Workload
from recorded import HEADER, write

AS_RECORDED = Experiment(requests_per_s=1.5, workload=Workload(requests=400), instances=3, warmup=0, slo_ttft_s=2.0)

REPEATED = "the simulation repeats what was measured, and the share within the SLO in 7 of 7 windows (30 s)"


@pytest.fixture(name="requests", scope="module")
def _requests() -> list[RecordedRequest]:
    return simulated_recording.recorded(AS_RECORDED)


def recording(folder: Path, requests: list[RecordedRequest]) -> Path:
    line = simulated_recording.pool_line(AS_RECORDED)
    return write(folder / "recording" / "requests.jsonl.gz", line, *requests).parent


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def simulated(path: Path, *options: str) -> dict[str, Any]:
    result = invoke("simulate", "--recording", path, "--json", *options)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_recording_of_the_modelled_engine_is_repeated(requests: list[RecordedRequest], tmp_path: Path) -> None:
    document = simulated(recording(tmp_path, requests))
    was = document["as_it_was"]
    assert (was["believable"], was["reason"]) == (True, REPEATED)
    for name in ("ttft_p50_s", "ttft_p90_s", "hit_rate", "slo_attainment"):
        assert was[name]["simulated"] == pytest.approx(was[name]["measured"], rel=0.05), name
    (run,) = document["runs"]
    assert (run["policy"], run["instances"], run["requests"]) == ("dualmap", 3, 400)
    assert run["qps"] == pytest.approx(1.5, rel=0.01)
    assert run["ttft_p90_s"] == was["ttft_p90_s"]["simulated"]


def hand_written(folder: Path, **values: float) -> Path:
    path = folder / "engine.yaml"
    known = {name: {"value": value, "low": value, "high": value, "verdict": "known"} for name, value in values.items()}
    path.write_text(yaml.safe_dump({"parameters": known}))
    return path


def test_parameters_that_are_not_in_the_fit_are_named(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path, engine = recording(tmp_path, requests), hand_written(tmp_path, r=7000, a=3.0e-5, m=190_000, c=1_000_000)
    result = invoke("simulate", "--recording", path, "--engine", engine, "--set", "d0=0.028")
    assert "warning: not in the fit, from preset 7b: o, l, d1, d2, block, chunk\n" in result.stderr
    assert "The simulation may be believed, but o, l are not from a recording: the simulation repeats" in result.stdout
    was = simulated(path, "--engine", str(engine))["as_it_was"]
    assert (was["believable"], was["assumed"]) == (True, ["o", "l"])
    assert simulated(path)["as_it_was"]["assumed"] == []


def test_windows_have_the_share_within_the_slo_side_by_side(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path = recording(tmp_path, requests)
    was = simulated(path, "--warmup", "0")["as_it_was"]
    assert was["window_s"] == 30.0
    assert sum(each["requests"] for each in was["windows"]) == 400
    first = was["windows"][0]
    within = [each.ttft_s is not None and each.ttft_s <= 2.0 for each in requests if each.arrived_s < 30.0]
    assert (first["start_s"], first["requests"]) == (0.0, len(within))
    assert first["slo_attainment"]["measured"] == pytest.approx(sum(within) / len(within))
    assert first["slo_attainment"]["simulated"] == pytest.approx(first["slo_attainment"]["measured"], abs=0.05)
    assert first["differs"] is False
    shown = invoke("simulate", "--recording", path, "--warmup", "0").stdout
    assert "windows (30 s)" in shown
    assert ["from", "0", "s", "on", str(len(within))] in [line.split()[:5] for line in shown.splitlines()]


def test_equal_means_with_other_windows_are_not_believed(requests: list[RecordedRequest], tmp_path: Path) -> None:
    # The same times in ascending order have the same percentiles and the same share within the SLO.
    ttft_s = sorted(each.ttft_s or 0.0 for each in requests)
    sorted_ones = [each._replace(ttft_s=own_s) for each, own_s in zip(requests, ttft_s, strict=True)]
    strict = replace(AS_RECORDED, slo_ttft_s=ttft_s[200])
    path = write(tmp_path / "sorted.jsonl", simulated_recording.pool_line(strict), *sorted_ones)
    was = simulated(path, "--warmup", "0")["as_it_was"]
    for name in ("ttft_p50_s", "ttft_p90_s", "slo_attainment"):
        assert was[name]["simulated"] == pytest.approx(was[name]["measured"], rel=0.05), name
    assert was["believable"] is False
    assert was["reason"].startswith("the share within the SLO differs in ")
    assert " windows (30 s), most from " in was["reason"]


def test_recording_of_a_prefill_pool_is_repeated_with_its_members(tmp_path: Path) -> None:
    engine = replace(PRESETS["7b"], pull_tokens_per_s=100_000.0)
    apart = replace(AS_RECORDED, engine=engine, instances=4, prefillers=2, sessions=False)
    decode, prefill = split_pools(pool_of(apart), prefillers=2)
    lines = [PoolChanged(at_s=0.0, pool=each) for each in (decode, prefill)]
    path = write(tmp_path / "requests.jsonl.gz", *lines, *simulated_recording.recorded(apart))
    was = simulated(path)["as_it_was"]
    assert was["believable"] is True, was["reason"]
    assert was["ttft_p50_s"]["simulated"] == pytest.approx(was["ttft_p50_s"]["measured"], rel=0.05)


def changing() -> Experiment:
    """Return an experiment in which two members are too few for a minute; then two join, and the policy changes."""
    base = replace(AS_RECORDED, requests_per_s=3.0, instances=2, policy="round_robin")
    four = pool_of(replace(base, instances=4, policy="dualmap"))
    return replace(base, events=(PoolChange(at_s=60.0, pool=four),))


def test_pool_that_changed_is_repeated_with_its_changes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", *simulated_recording.pool_lines(changing()), *simulated_recording.recorded(changing())
    )
    was = simulated(path)["as_it_was"]
    assert was["believable"] is True, was["reason"]
    assert (was["pool_changes"], was["not_repeated"]) == (1, [])
    assert len({each["slo_attainment"]["measured"] < 0.9 for each in was["windows"]}) == 2
    shown = invoke("simulate", "--recording", path, "--policy", "dualmap,round_robin")
    assert "round_robin then dualmap, 2 to 4 instances" in shown.stdout
    assert "4 instances, at most, as members joined and left" in shown.stderr
    # With all members from the beginning, the first minute would be fast.
    (kept,), (constant,) = (simulated(path, *options)["runs"] for options in ((), ("--instances", "4")))
    assert constant["slo_attainment"] > kept["slo_attainment"] + 0.05


def test_change_that_is_not_repeated_is_a_reason_to_doubt(requests: list[RecordedRequest], tmp_path: Path) -> None:
    line = simulated_recording.pool_line(AS_RECORDED)
    stored = PoolChanged(at_s=100.0, pool=replace(line.pool, kv_store=KvStore(type=StoreType.MOONCAKE)))
    path = write(tmp_path / "a.jsonl", line, stored, *requests)
    result = invoke("simulate", "--recording", path)
    assert "It does not repeat: spec.kvStore changed at 1970-01-01 00:01:40 UTC." in result.stdout
    assert "warning: the simulation does not repeat: spec.kvStore changed at" in result.stderr
    (found,) = simulated(path)["as_it_was"]["not_repeated"]
    assert found == {"what": "spec.kvStore changed", "at_s": 100.0}


def test_another_engine_is_not_believed(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path = recording(tmp_path, requests)
    was = simulated(path, "--set", "r=2000")["as_it_was"]
    assert was["believable"] is False
    assert "the TTFT p50 is" in was["reason"]
    shown = invoke("simulate", "--recording", path, "--set", "r=2000")
    assert "warning: the simulation does not repeat the recording: the TTFT p50 is" in shown.stderr
    assert "The simulation may not be believed: the TTFT p50 is" in shown.stdout


def test_what_if_leaves_the_recording_as_it_was(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path = recording(tmp_path, requests)
    other = simulated(path, "--policy", "round_robin", "--instances", "6", "--slo", "1s", "--qps", "3")
    assert other["as_it_was"] == simulated(path)["as_it_was"]
    (run,) = other["runs"]
    assert (run["policy"], run["instances"], run["qps"]) == ("round_robin", 6, 3.0)


@pytest.mark.parametrize(("scale", "share"), [("2x", 2.0), ("0.5x", 0.5), ("1.5", 1.5)])
def test_scale_changes_the_number_of_sessions(
    requests: list[RecordedRequest], tmp_path: Path, scale: str, share: float
) -> None:
    path = recording(tmp_path, requests)
    once, scaled = simulated(path), simulated(path, "--scale", scale, "--instances", "8")
    (run,), (before,) = scaled["runs"], once["runs"]
    assert run["requests"] == pytest.approx(share * 400, rel=0.3)
    assert run["qps"] == pytest.approx(share * before["qps"], rel=0.3)
    # Its sessions are as before, so nearly as much of their prompts is cached.
    assert run["hit_rate"] == pytest.approx(before["hit_rate"], abs=0.05)
    assert scaled["as_it_was"]["ttft_p90_s"]["measured"] == once["as_it_was"]["ttft_p90_s"]["measured"]


def test_window_is_compared_with_the_same_requests(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path = recording(tmp_path, requests)
    whole = simulated(path, "--warmup", "0")["as_it_was"]["ttft_p90_s"]["measured"]
    window = simulated(path, "--start", "100", "--requests", "50", "--warmup", "10")["as_it_was"]
    ttft_s = sorted(each.ttft_s or 0.0 for each in requests[110:150])
    assert window["ttft_p90_s"]["measured"] == ttft_s[35] != whole


def test_sampled_recording_is_not_believed(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", simulated_recording.pool_line(AS_RECORDED), *requests, header=HEADER._replace(sample=0.5)
    )
    was = simulated(path)["as_it_was"]
    assert (was["believable"], was["reason"]) == (False, "the recording has only 0.5 of the sessions")


def test_import_without_measurements_is_simulated_with_defaults(
    requests: list[RecordedRequest], tmp_path: Path
) -> None:
    bare = [
        each._replace(receipt=None, ttft_s=None, duration_s=None, cached_tokens=None, attempts=None)
        for each in requests
    ]
    document = simulated(write(tmp_path / "a.jsonl", *bare))
    was = document["as_it_was"]
    assert (was["believable"], was["reason"]) == (None, "the recording has no measurements")
    assert was["ttft_p50_s"]["measured"] is None
    assert [run["policy"] for run in document["runs"]] == ["round_robin", "dualmap"]
    assert {run["instances"] for run in document["runs"]} == {8}


def test_refused_requests_miss_the_slo(requests: list[RecordedRequest], tmp_path: Path) -> None:
    refused = [
        each._replace(outcome=RecordedOutcome.REFUSED, ttft_s=None, duration_s=None, receipt=None)
        for each in requests[:200]
    ]
    was = simulated(recording(tmp_path, [*refused, *requests[200:]]), "--warmup", "0")["as_it_was"]
    assert was["slo_attainment"]["measured"] == pytest.approx(0.5, abs=0.02)
    assert was["believable"] is False


def test_goodput_takes_the_pool_of_a_recording(requests: list[RecordedRequest], tmp_path: Path) -> None:
    result = invoke("goodput", "--recording", recording(tmp_path, requests), "--tolerance", "0.5", "--json")
    assert result.exit_code == 0, result.stderr
    (only,) = json.loads(result.stdout)["results"]
    assert (only["policy"], only["instances"], only["slo_s"]) == ("dualmap", 3, 2.0)


def test_goodput_first_repeats_the_recording(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path, engine = recording(tmp_path, requests), hand_written(tmp_path, r=2000)
    common = ("goodput", "--recording", path, "--tolerance", "0.5")
    repeated = invoke(*common, "--json")
    assert json.loads(repeated.stdout)["as_it_was"] == simulated(path)["as_it_was"]
    assert "does not repeat" not in repeated.stderr
    slow = invoke(*common, "--engine", engine)
    assert slow.exit_code == 0, slow.stderr
    assert "warning: not in the fit, from preset 7b: a, o, l, m, c, d0, d1, d2, block, chunk\n" in slow.stderr
    assert "warning: the simulation does not repeat the recording: the TTFT p50 is " in slow.stderr
    assert "The simulation may not be believed: the TTFT p50 is " in slow.stdout
    assert "TTFT p50" in slow.stdout


def test_recording_that_cannot_be_replayed_is_rejected(requests: list[RecordedRequest], tmp_path: Path) -> None:
    others = [each._replace(pool="llm/other") for each in requests[:3]]
    several = write(tmp_path / "several.jsonl", *requests, *others)
    empty = write(tmp_path / "empty.jsonl")
    for arguments, told in (
        (("--recording", several), "several pools; name one of simulation/qwen, llm/other"),
        (("--recording", several, "--pool-name", "llm/none"), "pool llm/none has no requests in the recording"),
        (("--recording", empty), "there is nothing to"),
        (("--recording", tmp_path / "absent"), "give the folder of"),
        (("--recording", several, "--workload", "default"), "exclude each other"),
        (("--pool-name", "llm/qwen"), "--pool-name needs --recording"),
        (("--scale", "2x"), "--scale needs --recording"),
        (("--scale", "twice"), "'twice' is not accepted; give numbers from 0.001 to 1,000"),
    ):
        result = invoke("simulate", *arguments)
        assert result.exit_code == 2, result.stderr
        assert told in " ".join(result.stderr.split())
    named = invoke("simulate", "--recording", several, "--pool-name", simulated_recording.POOL, "--json")
    assert json.loads(named.stdout)["runs"][0]["requests"] == 400


def test_another_pool_of_the_recording_changes_nothing(requests: list[RecordedRequest], tmp_path: Path) -> None:
    alone = simulated(recording(tmp_path / "alone", requests))
    others = [
        each._replace(pool="llm/other", block_tokens=300, prompt_tokens=100 * each.prompt_tokens)
        for each in requests[:30]
    ]
    both = recording(tmp_path / "both", [*requests, *others])
    named = simulated(both, "--pool-name", simulated_recording.POOL)
    assert named["as_it_was"] == alone["as_it_was"]


def test_what_if_options_do_not_change_how_it_was(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path = recording(tmp_path, requests)
    once = simulated(path)["as_it_was"]
    options = ("--kv-store", "100000", "--feedback-delay", "2s", "--slow", "qwen-0=0.3", "--routers", "2")
    assert simulated(path, *options)["as_it_was"] == once


def test_answers_of_unknown_length_get_the_mean_length(requests: list[RecordedRequest], tmp_path: Path) -> None:
    unknown = [each._replace(output_tokens=None) if number % 2 else each for number, each in enumerate(requests)]
    result = invoke("simulate", "--recording", recording(tmp_path, unknown), "--json")
    assert "warning: 200 of 400 answers have no recorded length" in " ".join(result.stderr.split())
    (run,) = json.loads(result.stdout)["runs"]
    assert run["e2e_p50_s"] > 1.5


def test_damaged_lines_of_a_recording_are_named(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path = recording(tmp_path, requests)
    (path / "cut.jsonl").write_bytes(b'{"kind":"recording","version":7}\n')
    assert f"warning: {path / 'cut.jsonl'}:1: left out" in invoke("simulate", "--recording", path).stderr


@pytest.mark.parametrize("command", ["simulate", "fit", "plan", "export"])
def test_recording_of_damaged_lines_only_names_them(command: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() + b'{"arrived_s": NaN}\n{"kind":"request"}\n')
    engine = tmp_path / "engine.yaml"
    engine.write_text("parameters: {}")
    arguments = {
        "simulate": ("simulate", "--recording", path),
        "fit": ("fit", path, "-o", tmp_path / "out.yaml"),
        "plan": ("plan", "--recording", path, "--engine", engine),
        "export": ("trace", "export", path, "--format", "mooncake", "-o", tmp_path / "out.jsonl"),
    }
    result = invoke(*arguments[command])
    assert result.exit_code == 2
    assert f"warning: {path}:2: left out: the line is no JSON: NaN is no number of JSON" in result.stderr
    assert f"warning: {path}:3: left out: arrived_s: nothing is not accepted" in result.stderr
    assert "the recording has no requests" in " ".join(result.stderr.split())


def test_request_too_long_for_the_memory_names_the_option_that_gave_it(
    requests: list[RecordedRequest], tmp_path: Path
) -> None:
    path = recording(tmp_path, requests)
    engine = tmp_path / "engine.yaml"
    engine.write_text("parameters: {m: {value: 1000, low: 1000, high: 1000, verdict: known}}")
    for options, hint in ((("--set", "m=1000"), "--set"), (("--engine", engine), "--engine")):
        told = " ".join(invoke("simulate", "--recording", path, *options).stderr.split())
        assert f"Invalid value for {hint}: the engine has m=1000 tokens of KV memory" in told
    longer = [each._replace(output_tokens=10**6) for each in requests[:3]]
    told = " ".join(invoke("simulate", "--recording", recording(tmp_path / "b", longer)).stderr.split())
    assert "Invalid value for --model: the engine has m=" in told


def test_idle_days_count_as_an_hour(requests: list[RecordedRequest], tmp_path: Path) -> None:
    week_s = 7 * 86_400.0
    later = [each._replace(arrived_s=each.arrived_s + week_s) for each in requests[200:]]
    (run,) = simulated(recording(tmp_path, [*requests[:200], *later]))["runs"]
    assert 400 / run["qps"] == pytest.approx(3600 + 400 / 1.5, rel=0.05)
