"""Tests of the simulation commands: reproducible results, printed output, and clean exits."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from dualmap_cli import running
from dualmap_cli.main import main
from dualmap_cli.simulate import runs as runs_module
from dualmap_cli.simulate.charts import draw_goodputs, draw_runs
from dualmap_cli.simulate.engines import Assumed
from dualmap_cli.simulate.plan import Plan
from dualmap_cli.simulate.runs import Run, simulate
from dualmap_cli.simulate.tables import goodputs_table, runs_table, short_windows, show
from dualmap_sim.experiment import Experiment
from dualmap_sim.goodput import Goodput, NeverOverloaded
from dualmap_sim.oracles import ORACLES
from dualmap_sim.records import LoadSample
from dualmap_sim.workloads.catalog import Workload

FEW = ("--requests", "120", "--warmup", "20", "--instances", "2")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def without_wall_times(document: str) -> list[dict[str, object]]:
    return [{**each, "wall_s": None} for each in json.loads(document)["runs"]]


def some_runs(policies: Sequence[str], rates: Sequence[float], *, instances: int = 2) -> list[Run]:
    base = Experiment(workload=Workload(requests=60), requests_per_s=1.0, instances=instances, warmup=10)
    return [
        simulate(replace(base, policy=policy, requests_per_s=rate), lambda _told: None, keep_samples=True)
        for policy in policies
        for rate in rates
    ]


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_simulate_result_is_equal_for_any_number_of_processes() -> None:
    options = ("simulate", *FEW, "--policy", "dualmap,ear,round_robin,limit", "--qps", "2", "--json")
    in_one = without_wall_times(run(*options, "--processes", "1"))
    assert in_one == without_wall_times(run(*options, "--processes", "2"))
    assert in_one != without_wall_times(run(*options, "--seed", "1"))


def test_goodput_result_is_equal_for_any_number_of_processes() -> None:
    options = ("goodput", *FEW, "--seeds", "0,1", "--tolerance", "0.05", "--json")
    assert run(*options, "--processes", "1") == run(*options, "--processes", "2")


@pytest.mark.parametrize("command", ["simulate", "goodput"])
@pytest.mark.parametrize(
    ("decide", "told"),
    [("owner", "3 routers: the pool's owner decides for all (owner)"), ("local", "3 routers: each decides by itself")],
)
def test_several_routers_and_their_mode_are_announced(command: str, decide: str, told: str) -> None:
    options = [command, *FEW, "--policy", "limit", "--processes", "1"]
    assert told in CliRunner().invoke(main, [*options, "--routers", "3", "--decide", decide]).stderr
    assert "routers:" not in CliRunner().invoke(main, options).stderr


def test_simulate_result_is_independent_of_python_hash_seed() -> None:
    command = [sys.executable, "-m", "dualmap_cli", "simulate", *FEW, "--qps", "2", "--routers", "2", "--json"]
    documents = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert without_wall_times(documents[0]) == without_wall_times(documents[1])


def test_every_simulate_option_has_an_effect() -> None:
    usual = ("simulate", *FEW, "--policy", "dualmap", "--qps", "4", "--json")
    results = [without_wall_times(run(*usual))]
    for options in (
        ("--model", "14b"),
        ("--set", "r=3500"),
        ("--set", "c=20000"),
        ("--slow", "qwen-1=0.5"),
        ("--slo", "1s"),
        ("--routers", "3"),
        ("--routers", "3", "--hop-delay", "200ms"),
        ("--routers", "3", "--decide", "local"),
        ("--routers", "3", "--decide", "local", "--view-delay", "2s"),
        ("--feedback-delay", "500ms"),
        ("--believed-speed", "1000"),
        ("--kv-store", "100000"),
        ("--warmup", "40"),
        ("--start", "10"),
        ("--workload", "tool_agent"),
        ("--workload", "tool_agent", "--policy", "ear"),
        ("--workload", "tool_agent", "--policy", "ear", "--no-sessions"),
    ):
        results.append(without_wall_times(run(*usual, *options)))
    assert all(results.count(each) == 1 for each in results)


def test_simulate_prints_requested_and_actual_workload() -> None:
    result = CliRunner().invoke(main, ["simulate", *FEW, "--workload", "tool_agent", "--qps", "1", "--json"])
    assert "120 requests, the first 20 of them for the warm-up" in result.stderr
    assert "asked    produced" in result.stderr
    assert "8,596" in result.stderr
    assert json.loads(result.stdout)


@pytest.mark.parametrize(
    ("cap", "said"),
    [
        (
            "cap=1000",
            ("warning: 30 of the prompts (50.0%)", "1,000 tokens", "leaves out 50.0% of all", "--set cap=..."),
        ),
        ("cap=3000", ()),
    ],
)
def test_simulate_warns_if_prompts_are_cut(cap: str, said: tuple[str, ...], tmp_path: Path) -> None:
    lines = [
        {
            "timestamp": 200 * n,
            "input_length": 1000 + 2000 * (n % 2),
            "output_length": 5,
            "hash_ids": [n] * (2 + 4 * (n % 2)),
        }
        for n in range(60)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ("--policy", "round_robin", "--qps", "1", "--set", cap)
    result = CliRunner().invoke(main, ["simulate", "--trace", str(trace), *options])
    assert all(each in result.stderr for each in said), result.stderr
    assert said or "longer than" not in result.stderr
    assert "sessions are not named" in result.stderr


def test_simulate_default_rate_separates_the_policies() -> None:
    first, second = json.loads(run("simulate", "--requests", "600", "--json"))["runs"]
    assert (first["policy"], second["policy"]) == ("round_robin", "dualmap")
    assert first["qps"] == second["qps"]
    assert first["slo_attainment"] < second["slo_attainment"] > 0.9


def test_simulate_table_has_one_row_per_run() -> None:
    lines = run("simulate", *FEW, "--policy", "round_robin,dualmap", "--qps", "1,2").splitlines()
    rows = [line.split()[:2] for line in lines if line.startswith((" round_robin", " dualmap"))]
    assert rows == [["round_robin", "1"], ["round_robin", "2"], ["dualmap", "1"], ["dualmap", "2"]]


def test_goodput_table_shows_mean_and_spread(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        ("round_robin", [Goodput(requests_per_s=rate, runs=5, bracket=(rate, rate)) for rate in (2.0, 4.0)]),
        ("dualmap", [Goodput(requests_per_s=rate, runs=4, bracket=(rate, rate)) for rate in (5.5, 6.5)]),
        ("random", [Goodput(requests_per_s=0.0, runs=3, bracket=(0.0, 1.0))] * 2),
    ]
    show(goodputs_table(found))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["round_robin", "3.00", "2.00", "4.00", "50.0%", "2", "10"] in rows
    assert ["dualmap", "6.00", "5.50", "6.50", "100.0%", "2", "8"] in rows
    assert ["random", "0.00", "0.00", "0.00", "0.0%", "2", "6"] in rows
    show(goodputs_table([*found[:1], ("all_cached", [found[0][1][0], NeverOverloaded("at any rate")])]))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["round_robin", "3.00", "2.00", "4.00", "100.0%", "2", "10"] in rows
    assert ["all_cached", "never", "overloaded", "-", "-", "-", "2", "-"] in rows
    show(goodputs_table(found[2:]))
    assert ["random", "0.00", "0.00", "0.00", "-", "2", "6"] in [
        s.split() for s in capsys.readouterr().out.splitlines()
    ]


def test_simulate_table_is_not_cut_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    show(runs_table(some_runs(["cache_affinity_global"], [1.0])))
    out = capsys.readouterr().out
    assert "cache_affinity_global" in out
    assert "refused" in out


def test_goodput_search_ends_if_no_rate_overloads_the_policy() -> None:
    options = ("--requests", "10", "--instances", "16", "--slo", "60s", "--policy", "round_robin")
    result = CliRunner().invoke(main, ["goodput", *options])
    assert result.exit_code == 1
    assert "dualmap goodput: round_robin: 90% of the 10 requests" in result.stderr
    assert "give more requests" in result.stderr


def test_goodput_keeps_other_results_if_a_policy_never_overloads(tmp_path: Path) -> None:
    options = ("--policy", "all_cached,round_robin", "--tolerance", "0.3", "--plot", str(tmp_path / "goodput.svg"))
    result = CliRunner().invoke(main, ["goodput", *FEW, *options, "--json"])
    assert result.exit_code == 0
    assert "dualmap goodput: all_cached: 90% of the 120 requests" in result.stderr
    endless, found = json.loads(result.stdout)["results"]
    assert (endless["goodput_qps"], endless["windows"][0]["goodput_qps"]) == (None, None)
    assert found["goodput_qps"] > 0
    assert (tmp_path / "goodput.svg").exists()


def test_goodput_warns_if_a_window_is_too_short() -> None:
    base = Experiment(workload=Workload(requests=60), requests_per_s=1.0, warmup=10)
    plan = Plan(
        policies=(),
        base=base,
        windows=(base.workload,),
        pool=None,
        traffic=None,
        differing={},
        assumed=Assumed.of("7b", None, ()),
        repeats_members=False,
        model="7b",
        processes=1,
        plot=None,
        as_json=False,
    )
    short, long = (Goodput(requests_per_s=rate, runs=1, bracket=(rate, rate)) for rate in (1.25, 1.2))
    found = [("dualmap", [short]), ("limit", [long]), ("random", [replace(long, requests_per_s=0.0)])]
    (line,) = short_windows(plan, [*found, ("all_cached", [NeverOverloaded("at any rate")])])
    assert line.startswith("dualmap: at the rate found a window lasts 48.0 s, less than 10 times the SLO")
    options = ("--policy", "round_robin", "--tolerance", "0.3", "--slo", "60s", "--set", "r=1000", "--json")
    result = CliRunner().invoke(main, ["goodput", *FEW, *options])
    assert "warning: round_robin: at the rate found" in result.stderr


@pytest.mark.parametrize("command", ["simulate", "goodput"])
def test_simulate_help_explains_counting_and_bounds(command: str) -> None:
    # The help text may be wrapped after a hyphen.
    told = " ".join(run(command, "--help").split()).replace("- ", "-")
    for each in (
        *(f"{info.name} {info.summary}" for info in ORACLES.values()),
        *(
            "By default, one router serves all requests",
            "--routers 4 --feedback-delay 20ms",
            "closed-loop workload agentic, the rate is nominal",
        ),
        *("rejected", "warm-up", "limit_deadline uses that order", "--no-sessions"),
    ):
        assert each in told


def test_goodput_of_recorded_trace_ignores_seeds(tmp_path: Path) -> None:
    lines = [{"timestamp": 200 * n, "input_length": 900, "output_length": 5, "hash_ids": [n, n]} for n in range(60)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ("--seeds", "1,2", "--instances", "1", "--policy", "round_robin", "--tolerance", "0.1", "--json")
    result = CliRunner().invoke(main, ["goodput", "--trace", str(trace), *options])
    assert "the same for all seeds" in result.stderr
    first, second = json.loads(result.stdout)["results"][0]["windows"]
    assert first["goodput_qps"] == second["goodput_qps"]


@pytest.mark.parametrize("rates", [(2.0,), (1.0, 2.0, 3.0)], ids=["one rate", "several rates"])
def test_simulate_chart_is_drawn(rates: tuple[float, ...], tmp_path: Path) -> None:
    draw_runs(tmp_path / "runs.png", some_runs(["round_robin", "dualmap"], rates))
    assert min(png_size(tmp_path / "runs.png")) > 500


def test_chart_load_panels_share_an_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_args, **_options: figures.append(figure))
    samples = (LoadSample(at_s=0.0, pending_tokens={"qwen-0": 1000}), LoadSample(at_s=1.0, pending_tokens={}))
    low = replace(some_runs(["dualmap"], [2.0])[0], samples=samples)
    high = replace(low, samples=(replace(samples[0], pending_tokens={"qwen-0": 90_000}), samples[1]))
    draw_runs(tmp_path / "runs.png", [low, high])
    panels = [axes for axes in figures[0].axes if "pending ktokens" in axes.get_title(loc="left")]
    assert [axes.get_ylim()[0] for axes in panels] == [0.0, 0.0]
    assert all(axes.get_ylim()[1] > 90 for axes in panels)


def test_chart_size_grows_with_number_of_members_and_policies(tmp_path: Path) -> None:
    draw_runs(tmp_path / "one.png", some_runs(["dualmap"], [2.0], instances=20))
    draw_runs(tmp_path / "seven.png", some_runs(["dualmap"], [2.0], instances=20) * 7)
    assert png_size(tmp_path / "seven.png")[1] > png_size(tmp_path / "one.png")[1]


def test_simulate_and_goodput_write_their_charts(tmp_path: Path) -> None:
    run(
        "simulate", *FEW, "--policy", "dualmap,all_cached", "--qps", "1", "--plot", str(tmp_path / "runs.svg"), "--json"
    )
    drawn = (tmp_path / "runs.svg").read_text()
    assert drawn.startswith("<?xml")
    run("goodput", *FEW, "--policy", "dualmap", "--tolerance", "0.3", "--plot", str(tmp_path / "goodput.png"), "--json")
    assert min(png_size(tmp_path / "goodput.png")) > 300


def test_goodput_chart_is_drawn(tmp_path: Path) -> None:
    found = [("round_robin", (1.0,)), ("dualmap", (2.0, 2.5)), ("random", (0.0, 0.0))]
    draw_goodputs(tmp_path / "goodputs.png", found, attainment=0.9, slo_ttft_s=5.0)
    assert min(png_size(tmp_path / "goodputs.png")) > 300


@pytest.mark.parametrize("command", [("simulate", "--qps", "1"), ("goodput", "--tolerance", "0.3")])
def test_unwritable_chart_keeps_the_printed_results(command: tuple[str, ...], tmp_path: Path) -> None:
    chart = tmp_path / "full.png"
    chart.symlink_to("/dev/full")
    result = CliRunner().invoke(main, [*command, *FEW, "--policy", "round_robin", "--plot", str(chart), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)
    assert result.stderr.endswith(f"dualmap {command[0]}: {chart} cannot be written: No space left on device\n")


def test_chart_in_unwritable_folder_is_rejected_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path)
    result = CliRunner().invoke(main, ["simulate", *FEW, "--plot", str(tmp_path / "chart.png")])
    assert result.exit_code == 2
    assert "chart.png' cannot be written" in result.stderr
    assert "workload" not in result.stderr


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["table", "JSON"])
def test_results_that_cannot_be_printed_give_a_one_line_error(form: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "dualmap_cli", "simulate", *FEW, "--qps", "1", "--policy", "round_robin", *form]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("dualmap simulate: the results cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["simulate", "goodput"])
def test_plot_option_without_matplotlib_fails_before_the_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "find_spec", lambda _name: None)
    result = CliRunner().invoke(main, [command, *FEW, "--plot", str(tmp_path / "chart.png")])
    assert result.exit_code == 1
    assert (
        result.stderr == f"dualmap {command}: --plot needs the package matplotlib; run: pip install 'dualmap[demo]'\n"
    )


def test_failed_run_exits_1_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_experiment: Experiment, **_options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(runs_module, "run_experiment", fail)
    result = CliRunner().invoke(main, ["simulate", *FEW])
    assert result.exit_code == 1
    assert "dualmap simulate: a run failed:" in result.stderr
    assert "ZeroDivisionError" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_command_and_its_workers(number: signal.Signals) -> None:
    """The workers inherit stderr, so stderr ends only when the last worker has ended."""
    rates = ",".join(f"{1 + number / 100}" for number in range(2000))
    command = [sys.executable, "-m", "dualmap_cli", "simulate", *FEW, "--qps", rates, "--processes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "reusable at best" in line:
                break
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 128 + number
    assert err.rstrip().endswith("interrupted; nothing is left running.")
    assert out == ""
