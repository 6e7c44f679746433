"""Tests of ``--pool``: simulated runs take the settings of a pool's file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from dualmap_cli.main import main
from dualmap_cli.simulate.pool_option import of_pool
from dualmap_extproc.pools.file import load_pool_files
from dualmap_sim.experiment import Experiment

FEW = ("--requests", "120", "--warmup", "20", "--workload", "tool_agent")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def run(*arguments: str) -> dict[str, Any]:
    """Return the only run of `dualmap simulate`, without its duration."""
    result = invoke("simulate", *FEW, "--qps", "4", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    (only,) = json.loads(result.stdout)["runs"]
    return {**only, "wall_s": None}


def pool_object(spec: Mapping[str, object], members: int = 0) -> dict[str, object]:
    ring = [{"id": f"qwen-{number}", "address": f"10.0.0.{number}"} for number in range(members)]
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen", "namespace": "llm"},
        "spec": {"model": {"name": "qwen"}, **spec},
        "status": {"ring": {"version": 1, "members": ring}},
    }


def pool_file(folder: Path, *specs: Mapping[str, object], members: int = 0) -> str:
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump_all([pool_object(each, members) for each in specs]))
    return str(path)


@pytest.mark.parametrize(
    "spec",
    [
        {"routing": {"queue": {"dispatchWindow": "1ms"}}},
        {"routing": {"prefix": {"blockTokens": 2048}}},
        {"routing": {"policy": "round_robin"}},
        {"engine": {"prefillTokensPerSecond": 100}},
        {"slo": {"ttft": "400ms"}},
    ],
    ids=str,
)
def test_each_setting_of_a_pool_has_an_effect(spec: Mapping[str, object], tmp_path: Path) -> None:
    usual = run("--instances", "2", "--pool", pool_file(tmp_path, {}))
    assert run("--instances", "2", "--pool", pool_file(tmp_path, spec)) != usual


def test_options_take_precedence_over_the_pool(tmp_path: Path) -> None:
    spec = {"routing": {"policy": "round_robin"}, "slo": {"ttft": "400ms"}}
    file = pool_file(tmp_path, spec, members=3)
    own = run("--pool", file)
    assert (own["policy"], own["instances"]) == ("round_robin", 3)
    other = run("--pool", file, "--policy", "dualmap", "--instances", "2", "--slo", "5s")
    assert other == run("--pool", pool_file(tmp_path, {}), "--instances", "2")


def test_goodput_uses_the_objective_of_the_pool(tmp_path: Path) -> None:
    file = pool_file(tmp_path, {"slo": {"ttft": "2s", "attainment": 0.5}})
    result = invoke("goodput", *FEW, "--pool", file, "--tolerance", "0.5", "--json")
    assert result.exit_code == 0, result.stderr
    (only,) = json.loads(result.stdout)["results"]
    assert (only["policy"], only["slo_s"], only["attainment"], only["instances"]) == ("dualmap", 2.0, 0.5, 8)


def test_fields_without_effect_are_named(tmp_path: Path) -> None:
    spec = {
        "engine": {"kvEvents": {"enabled": True}, "tokenizer": {"source": "Files", "path": "/models/qwen"}},
        "kvStore": {"type": "Mooncake", "endpoint": "http://store:50051"},
        "prefillPool": "other",
        "routing": {"session": {"migration": {"pull": True}}, "shadow": ["min_ttft"]},
    }
    file = pool_file(tmp_path, spec)
    said = invoke("simulate", *FEW, "--pool", file).stderr
    assert (
        "settings of pool llm/qwen, 8 instances; without effect here: spec.engine.kvEvents, spec.engine.tokenizer, "
        "spec.routing.shadow (give the policies to --policy), "
        "spec.kvStore (without --kv-store), spec.routing.session.migration.pull (without --set pull=NUMBER), "
        "spec.prefillPool (without --prefill-instances)" in said
    )
    assert "spec.kvStore" not in invoke("simulate", *FEW, "--pool", file, "--kv-store", "100000").stderr


def test_shadow_policies_are_left_out(tmp_path: Path) -> None:
    (read,) = load_pool_files([Path(pool_file(tmp_path, {"routing": {"shadow": ["min_ttft"], "shadowSample": 1}}))])
    assert read.routing.shadow == ("min_ttft",)
    assert of_pool(Experiment(requests_per_s=1.0), read).routing.shadow == ()


def test_file_that_is_not_one_pool_is_rejected(tmp_path: Path) -> None:
    two = pool_object({})
    two["metadata"] = {"name": "second", "namespace": "llm"}
    two["spec"] = {"model": {"name": "second"}}
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump_all([pool_object({}), two]))
    for file, told in (
        (str(path), "contains 2 pools; give a file with one pool"),
        (str(tmp_path / "absent.yaml"), "absent.yaml"),
        (pool_file(tmp_path, {"slo": {"ttft": "soon"}}), "spec.slo.ttft: 'soon' is not accepted"),
    ):
        result = invoke("simulate", "--pool", file)
        assert result.exit_code == 2
        assert "Invalid value for '--pool'" in result.stderr
        assert told in " ".join(result.stderr.split())
