"""Tests of ``dualmap simulate --notice``: members that must stop during a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import simulated_recording
from dualmap_cli.main import main
from dualmap_sim.events import PoolChange
from dualmap_sim.experiment import Experiment, pool_of
from dualmap_sim.workloads.catalog import Workload
from recorded import write

AS_RECORDED = Experiment(requests_per_s=3.0, workload=Workload(requests=150), instances=3, warmup=0)
FEW = ("--requests", "60", "--instances", "2", "--policy", "dualmap", "--qps", "2")


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["simulate", *(str(each) for each in arguments)])


def simulated(*arguments: str | Path) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture(name="recording", scope="module")
def _recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording in which a third member joins after 20 s."""
    two = pool_of(replace(AS_RECORDED, instances=2))
    joining = replace(AS_RECORDED, members=two.members, events=(PoolChange(at_s=20.0, pool=pool_of(AS_RECORDED)),))
    lines = (*simulated_recording.pool_lines(joining), *simulated_recording.recorded(joining))
    return write(tmp_path_factory.mktemp("recording") / "a.jsonl", *lines)


def test_losses_of_a_notice_are_beside_the_recording_as_it_was(recording: Path) -> None:
    told, at_once = (simulated("--recording", recording, "--notice", f"qwen-0=25s+{lasts}s") for lasts in (60, 0))
    was = told["as_it_was"]
    assert (was["believable"], was["pool_changes"]) == (True, 1)
    assert (was["losses"]["failed"], was["losses"]["cut"]) == (0, 0)
    (run,) = told["runs"]
    assert run["losses"]["failed"] == 0
    assert run["losses"]["recomputed_tokens"] != was["losses"]["recomputed_tokens"] > 0
    (run,) = at_once["runs"]
    assert run["losses"]["failed"] >= run["losses"]["cut"] > 0
    assert at_once["as_it_was"]["losses"] == was["losses"]
    assert simulated("--recording", recording)["runs"][0]["losses"] is None


def test_text_has_the_losses_of_every_run(recording: Path) -> None:
    text = invoke("--recording", recording, "--notice", "qwen-0=25s+0s", "--policy", "dualmap,round_robin").stdout
    assert "recomputed tokens" in text
    losses = text[text.index("with the notices") :].splitlines()
    assert [line.split()[0] for line in losses[2:5]] == ["as", "dualmap", "round_robin"]


def test_generated_workload_takes_notices() -> None:
    (run,) = simulated(*FEW, "--notice", "qwen-1=15s+0s")["runs"]
    assert run["losses"]["failed"] > 0


def test_notice_that_the_run_cannot_have_is_a_usage_error(recording: Path) -> None:
    for options, told in (
        ((*FEW, "--notice", "qwen-1"), "'qwen-1' is not accepted; give MEMBER=TIME+DURATION, such as qwen-2=10m+30s"),
        ((*FEW, "--notice", "qwen-1=10s"), "'qwen-1=10s' is not accepted; give MEMBER=TIME+DURATION"),
        ((*FEW, "--notice", "=10s+1s"), "'=10s+1s' is not accepted; give MEMBER=TIME+DURATION"),
        ((*FEW, "--notice", "qwen-1=soon+30s"), "'qwen-1=soon+30s' is not accepted; 'soon' should be"),
        ((*FEW, "--notice", "qwen-1=10s+-1s"), "'qwen-1=10s+-1s' is not accepted; '-1s' should be"),
        ((*FEW, "--notice", "qwen-7=10s+1s"), "'qwen-7' is no member at 10 s; give one of qwen-0, qwen-1"),
        ((*FEW, "--notice", "qwen-1=10m+1s"), "600s is not accepted; the last request arrives 30 s after the first"),
        ((*FEW, "--notice", "qwen-1=1s+1s", "--notice", "qwen-1=2s+1s"), "qwen-1 has several notices"),
        ((*FEW, "--policy", "limit", "--notice", "qwen-1=1s+1s"), "the bound limit has no members that go"),
        ((*FEW, "--prefill-instances", "1", "--notice", "qwen-1=1s+1s"), "a pool with a prefill pool stay"),
        (("--recording", recording, "--notice", "qwen-2=10s+1s"), "'qwen-2' is no member at 10 s"),
    ):
        result = invoke(*options)
        assert result.exit_code == 2, options
        assert told in " ".join(result.stderr.split()), result.stderr
