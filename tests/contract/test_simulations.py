"""Tests of the JSON output of ``dualmap simulate`` and ``dualmap goodput``, and of their exit status for bad input."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dualmap_cli.main import main

FEW = ("--requests", "120", "--warmup", "20", "--instances", "2")
RUN_FIELDS = (
    *("policy", "qps", "instances", "requests", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "e2e_p50_s", "e2e_p90_s"),
    *("slo_attainment", "hit_rate", "pending_cv", "rejected", "wall_s"),
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def document(*arguments: str) -> dict[str, list[dict[str, object]]]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def trace_file(folder: Path, requests: int) -> Path:
    lines = [
        json.dumps({"timestamp": 250 * n, "input_length": 1500, "output_length": 9, "hash_ids": [n % 7, 2 * n, n + 9]})
        for n in range(requests)
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_simulate_json_has_a_run_per_policy_and_rate() -> None:
    runs = document("simulate", *FEW, "--policy", "round_robin,dualmap,limit", "--qps", "1,1.5")["runs"]
    asked = [(policy, qps) for policy in ("round_robin", "dualmap", "limit") for qps in (1.0, 1.5)]
    assert [(each["policy"], each["qps"]) for each in runs] == asked
    for each in runs:
        assert set(RUN_FIELDS) <= set(each)
        assert (each["instances"], each["requests"], each["rejected"]) == (2, 120, 0)
        numbers = [each[field] for field in RUN_FIELDS[2:]]
        assert all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        assert 0 <= each["slo_attainment"] <= 1
        assert 0 <= each["hit_rate"] <= 1
        assert each["ttft_p50_s"] <= each["ttft_p90_s"] <= each["ttft_p99_s"]
        assert each["e2e_p50_s"] <= each["e2e_p90_s"]


def test_missing_value_is_null_in_json() -> None:
    """In the bound without queues, the engines never have pending load."""
    (only,) = document("simulate", *FEW, "--policy", "all_cached", "--qps", "1")["runs"]
    assert only["pending_cv"] is None


def test_goodput_json_has_windows_and_mean_per_policy() -> None:
    options = ("--starts", "0,50", "--seeds", "3,4", "--tolerance", "0.1", "--policy", "round_robin,dualmap")
    results = document("goodput", *FEW, *options)["results"]
    assert [each["policy"] for each in results] == ["round_robin", "dualmap"]
    for each in results:
        assert set(each) == {"policy", "goodput_qps", "instances", "model", "slo_s", "attainment", "windows"}
        assert (each["instances"], each["model"], each["slo_s"], each["attainment"]) == (2, "7b", 5.0, 0.9)
        assert [window["requests"] for window in each["windows"]] == [120] * 4
        assert [(window["start"], window["seed"]) for window in each["windows"]] == [(0, 3), (0, 4), (50, 3), (50, 4)]
        rates = [window["goodput_qps"] for window in each["windows"]]
        assert all(rate > 0 for rate in rates)
        assert each["goodput_qps"] == pytest.approx(sum(rates) / 4)


def test_simulation_window_is_the_requested_part_of_the_trace(tmp_path: Path) -> None:
    whole, part = trace_file(tmp_path, 100), tmp_path / "part.jsonl"
    part.write_text("\n".join(whole.read_text().split("\n")[40:70]))
    options = ("--warmup", "5", "--instances", "1", "--qps", "4", "--policy", "round_robin")
    (window,) = document("simulate", "--trace", str(whole), "--start", "40", "--requests", "30", *options)["runs"]
    (alone,) = document("simulate", "--trace", str(part), *options)["runs"]
    assert {**window, "wall_s": 0} == {**alone, "wall_s": 0}
    assert window["requests"] == 30


@pytest.mark.parametrize("command", ["simulate", "goodput"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policy", "dualmap,fastest"), ("--policy", "'fastest'", "round_robin", "limit_pooled")),
        (("--trace", "nowhere.jsonl"), ("--trace", "nowhere.jsonl", "readable")),
        (("--workload", "nobody's"), ("--workload", "nobody's", "tool_agent")),
        (("--trace", "x", "--workload", "default"), ("--trace", "--workload", "one of them")),
        (("--model", "70b"), ("--model", "70b", "14b")),
        (("--instances", "0"), ("--instances", "0", "x<=4096")),
        (("--requests", "0"), ("--requests", "0", "1<=x")),
        (("--requests", "10", "--warmup", "10"), ("--warmup", "10", "less than 10")),
        (("--slo", "5"), ("--slo", "'5'", "such as 5s")),
        (("--view-delay", "0s"), ("--view-delay", "'0s'", "1ms")),
        (("--set", "r"), ("--set", "'r'", "NAME=NUMBER")),
        (("--set", "speed=2"), ("--set", "'speed'", "r, a, o, l, m, c")),
        (("--set", "r=0"), ("--set", "r=0", "from 1 to 1e+12")),
        (("--set", "o=1e6"), ("--set", "o=1e+06", "from 0 to 10000")),
        (("--requests", "10000001"), ("--requests", "1<=x<=10000000")),
        (("--set", "m=100"), ("--set", "m=100", "KV memory")),
        (("--model", "pd", "--set", "d0=1"), ("--set", "d0", "prefill-only")),
        (("--slow", "qwen-9=0.5"), ("--slow", "'qwen-9'", "qwen-0 to qwen-7")),
        (("--slow", "qwen-0=0"), ("--slow", "qwen-0=0", "0.001")),
        (("--slow", "qwen-0=0.5", "--policy", "limit"), ("--slow", "limit", "equal engines")),
        (("--plot", "chart.pdf"), ("--plot", "chart.pdf", ".png or .svg")),
        (("--plot", "no/such/folder/a.png"), ("--plot", "no/such/folder")),
        (("--processes", "0"), ("--processes", "0", "1<=x")),
    ],
)
def test_invalid_input_exits_2_and_names_accepted_values(
    command: str, arguments: tuple[str, ...], told: tuple[str, ...]
) -> None:
    result = run(command, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert all(each in result.stderr for each in told), result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("simulate", "--qps", "2,fast"), ("--qps", "'fast'", "0.001")),
        (("simulate", "--qps", "nan"), ("--qps", "'nan'")),
        (("simulate", "--start", "-1"), ("--start", "-1", "x>=0")),
        (("simulate", "--start", "9999999"), ("--start and --requests", "10003999")),
        (("goodput", "--starts", "0,9999999"), ("--start and --requests", "10003999")),
        (("goodput", "--starts", "0,-1"), ("--starts", "'-1'", "whole numbers from 0")),
        (("goodput", "--seeds", "1.5"), ("--seeds", "'1.5'", "whole numbers")),
        (("goodput", "--attainment", "90"), ("--attainment", "90", "x<=1")),
        (("goodput", "--tolerance", "0"), ("--tolerance", "0")),
        (("goodput", "--qps", "2"), ("--qps",)),
    ],
)
def test_invalid_input_of_a_single_command_exits_2(arguments: tuple[str, ...], told: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert all(each in result.stderr for each in told), result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("simulate", "--start", "60"), ("--trace", "number 60")),
        (("simulate", "--start", "30", "--requests", "21"), ("--requests", "21", "has 20 requests")),
        (("goodput", "--starts", "0,60"), ("--trace", "number 60")),
        (("goodput", "--starts", "0,45", "--requests", "6"), ("--requests", "6", "has 5 requests")),
    ],
)
def test_window_beyond_the_end_of_trace_is_rejected(
    arguments: tuple[str, ...], told: tuple[str, ...], tmp_path: Path
) -> None:
    result = run(*arguments, "--trace", str(trace_file(tmp_path, 50)))
    assert result.exit_code == 2
    assert all(each in result.stderr for each in told), result.stderr
