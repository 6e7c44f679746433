"""Tests `dualmap demo` with real engines, routers and Envoy: its results, and its end by a signal."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from gone import GONE_WITHIN_S, wait_until_gone

DONE_WITHIN_S = 200.0
POLICIES = ("round_robin", "dualmap")

pytestmark = pytest.mark.timeout(DONE_WITHIN_S + 100)


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "dualmap_cli", "demo", "--engines", "2", "--out", str(out), *arguments]


def children_of(pid: int) -> list[int]:
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):  # the process ended during this loop
                continue
            if parent == pid:
                children.append(int(entry.name))
    return children


def writing_end(pipe: Path) -> int | None:
    """Open a named pipe for writing; return None while it has no reader."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


@pytest.mark.slow
def test_demo_answers_every_request_under_each_policy(tmp_path):
    done = subprocess.run(
        command(tmp_path, "--requests", "20", "--routers", "2", "--speed", "10", "--json"),
        capture_output=True,
        text=True,
        timeout=DONE_WITHIN_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "demo.json").read_text())
    assert [run["policy"] for run in document["runs"]] == list(POLICIES)
    for run in document["runs"]:
        assert run["errors"] == {}
        assert run["requests"] == 20
        assert 0 < run["ttft_p50_s"] <= run["ttft_p99_s"]
        assert run["hit_rate"] > 0, "the engines report cached tokens, and the prompts share prefixes"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for policy in POLICIES:
        logs = {path.name for path in (tmp_path / "logs" / policy).glob("*.log")}
        engines, routers = {"engine-0.log", "engine-1.log"}, {"router-0.log", "router-1.log"}
        assert logs == engines | routers | {"redis.log", "envoy-config.log", "envoy.log"}
    assert str(tmp_path / "logs") in done.stderr


@pytest.mark.slow
def test_demo_with_kv_events_compares_predictions(tmp_path):
    arguments = ("--requests", "20", "--speed", "10", "--policies", "dualmap", "--kv-events")
    done = subprocess.run(
        command(tmp_path, *arguments), capture_output=True, text=True, timeout=DONE_WITHIN_S, check=False
    )

    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "demo.json").read_text())
    without, followed = document["runs"]
    assert (without["policy"], followed["policy"]) == ("dualmap", "dualmap+events")
    assert (without["predictions"]["events"], without["predictions"]["from_events"]) == (None, 0.0)
    assert followed["errors"] == {}
    assert followed["predictions"]["events"]["states"] == {"Live": 2}
    assert followed["predictions"]["events"]["stored"] > 0
    assert followed["predictions"]["from_events"] > 0
    assert "  events of the engines: 2 Live; " in done.stdout


@pytest.mark.slow
def test_demo_with_recording_ends_with_commands_that_work_on_it(tmp_path):
    arguments = ("--requests", "150", "--routers", "2", "--speed", "8", "--policies", "dualmap", "--record")
    done = subprocess.run(
        command(tmp_path, *arguments), capture_output=True, text=True, timeout=DONE_WITHIN_S, check=False
    )

    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  dualmap ")]
    assert [words[1] for words in lines] == ["trace", "trace", "fit", "simulate", "plan"]
    # A slow machine may not meet the demo's SLO.
    more = {"show": ("--json",), "plan": ("--json", "--slo", "60s"), "fit": ("--json",), "simulate": ("--json",)}
    printed = {}
    for words in lines:
        name = words[2] if words[1] == "trace" else words[1]
        step = subprocess.run(
            [sys.executable, "-m", "dualmap_cli", *words[1:], *more.get(name, ())],
            capture_output=True,
            text=True,
            timeout=DONE_WITHIN_S,
            check=False,
        )
        assert step.returncode == 0, step.stderr
        printed[name] = json.loads(step.stdout) if step.stdout else None
    assert printed["show"]["requests"] == 150
    assert printed["show"]["damaged"] == []
    assert printed["fit"]["parameters"]["r"]["value"] > 0
    assert printed["simulate"]["as_it_was"]["ttft_p50_s"]["measured"] > 0
    assert printed["plan"]["instances"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_interrupted_demo_leaves_no_process_running(tmp_path, number):
    with subprocess.Popen(command(tmp_path, "--requests", "5000"), stderr=subprocess.PIPE, text=True) as demo:
        # Envoy starts last, so all processes of the run have started when its log exists.
        started = tmp_path / "logs" / POLICIES[0] / "envoy.log"
        give_up_s = time.monotonic() + DONE_WITHIN_S
        while not started.exists() and demo.poll() is None and time.monotonic() < give_up_s:
            time.sleep(0.05)
        children = children_of(demo.pid)
        demo.send_signal(number)
        _, printed = demo.communicate(timeout=GONE_WITHIN_S)

    assert len(children) >= 4, printed
    assert all(wait_until_gone(pid) for pid in children)
    if number is signal.SIGKILL:
        assert demo.returncode == -number
    else:
        assert demo.returncode == 128 + number
        assert "interrupted; nothing is left running" in printed
        assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_demo_serve_runs_until_a_signal(tmp_path, number):
    # The rounds take half a second, so several rounds start before the signal.
    arguments = ("--serve", "--requests", "5", "--rate", "1", "--speed", "10")
    with subprocess.Popen(
        command(tmp_path, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        where, requests, end = (demo.stdout.readline() for _ in range(3))
        assert where.startswith("dashboard: http://127.0.0.1:"), demo.stderr.read()
        url = where.removeprefix("dashboard: ").strip()
        with urlopen(url, timeout=10) as page:
            assert b"<title>DualMap</title>" in page.read()
        give_up_s = time.monotonic() + DONE_WITHIN_S
        while (routed := requests_routed(url)) < 15 and time.monotonic() < give_up_s:
            time.sleep(0.1)
        children = children_of(demo.pid)
        demo.send_signal(number)
        _, progress = demo.communicate(timeout=GONE_WITHIN_S)

    assert routed >= 15, "three rounds"
    assert demo.returncode == 0, progress
    assert requests.startswith("requests:  http://127.0.0.1:")
    assert end == "Ctrl-C ends it.\n"
    assert progress.endswith("demo stopped; all its processes have ended.\n")
    assert len(children) >= 4
    assert all(wait_until_gone(pid) for pid in children)
    assert not (tmp_path / "demo.json").exists(), "a serving demo writes no comparison"


def requests_routed(url: str) -> int:
    with urlopen(f"{url}pools/demo/qwen", timeout=10) as response:
        return json.load(response)["traffic"]["requests"]


def test_demo_rejects_serve_option_with_json_option(tmp_path):
    done = subprocess.run(command(tmp_path, "--serve", "--json"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--serve and --json exclude each other" in done.stderr


def test_demo_interrupted_during_start_reports_interruption(tmp_path):
    out = tmp_path / "out"
    workload = tmp_path / "workload.jsonl"
    os.mkfifo(workload)
    arguments = command(out, "--trace", str(workload))
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as demo:
        # The pipe has a reader when the demo reads its workload, long before the demo starts processes.
        while (pipe := writing_end(workload)) is None and demo.poll() is None:
            time.sleep(0.01)
        demo.send_signal(signal.SIGINT)
        _, printed = demo.communicate(timeout=GONE_WITHIN_S)
    assert pipe is not None, printed
    os.close(pipe)

    assert demo.returncode == 128 + signal.SIGINT
    assert printed.strip() == "interrupted; nothing is left running."
    assert not out.exists()
