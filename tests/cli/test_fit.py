"""Tests of ``dualmap fit`` and ``--engine``: output, the engine's file, and recordings and files with faults."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

import simulated_recording
from dualmap.recordings.values import RecordedRequest
from dualmap_cli.engine_file import BYTES_MOST
from dualmap_cli.main import main
from dualmap_cli.simulate.engine_options import PARAMETERS
from dualmap_sim.experiment import Experiment
from dualmap_sim.presets import PRESETS, slowed
from dualmap_sim.workloads.catalog import Workload
from recorded import HEADER, write

RUN = ("simulate", "--requests", "120", "--qps", "4", "--instances", "2", "--policy", "dualmap", "--json")


@pytest.fixture(name="requests", scope="module")
def _requests() -> list[RecordedRequest]:
    slow = (("qwen-1", slowed(PRESETS["7b"], 2.0)),)
    return simulated_recording.recorded(
        Experiment(requests_per_s=1.0, workload=Workload(requests=500), instances=3, warmup=0, engines=slow)
    )


@pytest.fixture(name="recording")
def _recording(tmp_path: Path, requests: list[RecordedRequest]) -> Path:
    return write(tmp_path / "recording" / "requests.jsonl.gz", *requests).parent


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def simulated(*options: str | Path) -> Mapping[str, object]:
    result = invoke(*RUN, *options)
    assert result.exit_code == 0, result.stderr
    return {**json.loads(result.stdout)["runs"][0], "wall_s": None}


def engine_file(folder: Path, parameters: object, **fields: object) -> Path:
    path = folder / "engine.yaml"
    path.write_text(yaml.safe_dump({"parameters": parameters, **fields}))
    return path


def known(value: object, verdict: str = "known") -> dict[str, object]:
    return {"value": value, "low": value, "high": value, "verdict": verdict}


def test_fit_writes_an_engine_for_simulations(recording: Path, tmp_path: Path) -> None:
    output, plot = tmp_path / "engine.yaml", tmp_path / "engine.svg"
    result = invoke("fit", recording, "-o", output, "--plot", plot)
    assert result.exit_code == 0, result.stderr
    assert "new prompt tokens computed per second" in result.stdout
    assert "times as long as the median member" in result.stdout
    assert "predicts the TTFT of 250 requests of the second half with a median error of" in result.stdout
    for title in ("predicted above measured TTFT, %", "requests with at most this error, %"):
        assert f"<!-- {title} -->" in plot.read_text()
    written = yaml.safe_load(output.read_text())
    assert set(written["parameters"]) == set(PARAMETERS)
    assert written["parameters"]["r"]["verdict"] == "known"
    assert written["parameters"]["r"]["value"] == pytest.approx(7000, rel=0.02)
    (member,) = written["members"].values()
    assert member["parameters"]["r"]["value"] == pytest.approx(3500, rel=0.05)
    # The first simulated member is the one that differs.
    fitted = simulated("--engine", output)
    assert fitted == simulated("--engine", output, "--model", "7b")
    assert fitted != simulated()


def test_json_has_the_file_and_the_error_of_the_test(recording: Path, tmp_path: Path) -> None:
    (recording / "cut.jsonl").write_bytes(b'{"kind":"recording","version":7}\n')
    output = tmp_path / "engine.yaml"
    result = invoke("fit", recording, "-o", output, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document.keys() >= {"parameters", "members", "requests", "ttft_error"}
    assert document["requests"] == 500
    assert document["ttft_error"].keys() >= {"median", "p90"}
    assert document["ttft_error"]["median"] < 0.05
    assert [(each["file"], each["line"]) for each in document["damaged"]] == [(str(recording / "cut.jsonl"), 1)]
    written = yaml.safe_load(output.read_text())
    assert {name: written[name] for name in ("parameters", "members")} == {
        name: document[name] for name in ("parameters", "members")
    }
    for each in document["parameters"].values():
        assert each.keys() >= {"value", "low", "high", "verdict"}


def test_sampled_recording_makes_nothing_certain(requests: list[RecordedRequest], tmp_path: Path) -> None:
    path = write(tmp_path / "requests.jsonl", *requests, header=HEADER._replace(sample=0.5))
    result = invoke("fit", path, "-o", tmp_path / "engine.yaml", "--json")
    assert "known" not in {each["verdict"] for each in json.loads(result.stdout)["parameters"].values()}


def test_several_pools_need_a_name(requests: list[RecordedRequest], tmp_path: Path) -> None:
    others = [each._replace(pool="llm/other") for each in requests[:3]]
    path, output = write(tmp_path / "requests.jsonl", *requests, *others), tmp_path / "engine.yaml"
    several = invoke("fit", path, "-o", output)
    assert several.exit_code == 2
    assert "several pools; name one of simulation/qwen, llm/other" in " ".join(several.stderr.split())
    assert invoke("fit", path, "-o", output, "--pool-name", "llm/none").exit_code == 2
    assert invoke("fit", path, "-o", output, "--pool-name", simulated_recording.POOL).exit_code == 0
    few = invoke("fit", path, "-o", output, "--pool-name", "llm/other")
    assert few.exit_code == 1
    assert "streamed answers have a prefill of their own, 20 are needed" in few.stderr


def test_recording_that_is_none_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "absent"):
        result = invoke("fit", path, "-o", tmp_path / "engine.yaml")
        assert result.exit_code == 2
        assert "give the folder of `dualmap router --record`" in result.stderr
    none = invoke("fit", write(tmp_path / "none.jsonl"), "-o", tmp_path / "engine.yaml")
    assert none.exit_code == 2
    assert "the recording has no requests, so there is nothing to" in none.stderr
    assert not (tmp_path / "engine.yaml").exists()


def test_engine_is_not_written_over_the_recording(recording: Path) -> None:
    (file,) = recording.iterdir()
    before = file.read_bytes()
    assert invoke("fit", file, "-o", file).exit_code == 2
    assert invoke("fit", recording, "-o", recording / "engine.yaml").exit_code == 2
    assert file.read_bytes() == before


def test_link_to_the_recording_is_not_written(recording: Path, tmp_path: Path) -> None:
    (file,) = recording.iterdir()
    before, link = file.read_bytes(), tmp_path / "link.yaml"
    link.symlink_to(file)
    assert invoke("fit", recording, "-o", link).exit_code == 2
    assert file.read_bytes() == before


def test_engine_with_nothing_but_parameters_is_accepted(tmp_path: Path) -> None:
    parameters = {"r": known(3500), "o": known(0.1, "weak"), "c": known(None, "absent"), "chunk": known(2048)}
    path = engine_file(tmp_path, parameters)
    assert simulated("--engine", path) == simulated("--set", "r=3500", "--set", "o=0.1", "--set", "chunk=2048")
    assert simulated("--engine", path, "--set", "r=9000") != simulated("--engine", path)
    assert simulated("--engine", path, "--model", "14b") != simulated("--engine", path)


def test_members_of_an_engine_are_the_first_instances(tmp_path: Path) -> None:
    decode, prefill = PRESETS["7b"].decode, PRESETS["7b"].prefill
    assert decode is not None
    half = {
        "r": prefill.tokens_per_s / 2, "o": prefill.overhead_s * 2, "l": prefill.load_tokens_per_s / 2,
        "d0": decode.step_s * 2, "d1": decode.per_kv_token_s * 2, "d2": decode.per_request_s * 2,
    }  # fmt: skip
    members = {"pod-7": {"parameters": {name: known(value) for name, value in half.items()}}}
    path = engine_file(tmp_path, {"r": known(7000)}, members=members)
    assert simulated("--engine", path) == simulated("--slow", "qwen-0=0.5")
    bound = invoke(*RUN, "--engine", path, "--policy", "limit")
    assert bound.exit_code == 2
    assert "the bounds require equal engines" in bound.stderr


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"speed": known(1)}, "parameters.speed is not a parameter; give some of r, a, o"),
        ({"r": known("fast")}, "parameters.r.value: 'fast' is not accepted; give a number"),
        ({"r": known(True)}, "parameters.r.value: True is not accepted; give a number"),
        ({"r": known(0)}, "r=0 is not accepted; give a number from 1"),
        ({"c": known(0.5)}, "c=0.5 is not accepted; give a whole number"),
        ({"r": {**known(1), "verdict": "sure"}}, "parameters.r.verdict: 'sure' is not accepted; give known, weak"),
        ({"r": {**known(1), "unit": "s"}}, "parameters.r.unit is not a field; give value, low"),
        ({"r": {**known(5), "low": 9, "high": 3}}, "parameters.r: low 9 is above high 3; exchange them"),
        ({"r": 7000}, "parameters.r is no mapping"),
        (None, "parameters is missing"),
    ],
)
def test_engine_file_with_a_fault_is_rejected(parameters: object, told: str, tmp_path: Path) -> None:
    result = invoke(*RUN, "--engine", engine_file(tmp_path, parameters))
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"{", b"[" * 5000, b"!!python/object:os.system {}"),
        pytest.param(b"#" * (BYTES_MOST + 1), id="large"),
    ],
)
def test_file_that_is_no_engine_is_rejected(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_bytes(content)
    result = invoke(*RUN, "--engine", path)
    assert result.exit_code == 2
    assert "--engine" in result.stderr
    assert invoke(*RUN, "--engine", tmp_path / "absent.yaml").exit_code == 2
