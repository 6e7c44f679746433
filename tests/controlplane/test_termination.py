"""Tests of the preStop script: a shell runs the script against a small HTTP server, with a clock that only ``sleep``
moves.
"""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from dualmap_operator.decide.workload.termination import grace_period_s, pre_stop_script
from dualmap_sim.engine import Engine
from dualmap_sim.metrics import EngineMetrics
from engines import ROUND, ask
from pod_templates import GOOD_CONTAINER, pool_of, template_of
from ports import reserved_port

START_S = 1_000_000
FAKE_DATE = """#!/bin/sh
read -r now <'{clock}'
echo "$now"
"""
FAKE_SLEEP = """#!/bin/sh
read -r now <'{clock}'
echo $((now + $1)) >'{clock}'
"""
PAGES = {
    "vLLM": (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        'vllm:num_requests_running{{engine="0",model_name="a model"}} {running}\n'
        'vllm:num_requests_waiting{{engine="0",model_name="a model"}} {waiting}\n'
        'vllm:num_requests_waiting_by_reason{{engine="0",model_name="a model",reason="capacity"}} 9.0\n'
        "process_open_fds 27.0\n"
    ),
    "SGLang": (
        'sglang:num_running_reqs{{model_name="m"}} {running}\nsglang:num_queue_reqs{{model_name="m"}} {waiting}\n'
    ),
    "TensorRTLLM": "trtllm_num_requests_running {running}\ntrtllm_num_requests_waiting {waiting}\n",
}
PATHS = {"vLLM": "/metrics", "SGLang": "/metrics", "TensorRTLLM": "/prometheus/metrics"}


class Metrics(ThreadingHTTPServer):
    """An engine's metrics page.

    The server returns the texts in order and repeats the last text; an empty text is an answer 500.
    """

    def __init__(self, pages: list[str], *, host: str, path: str) -> None:
        self.pages, self.path, self.asked = pages, path, 0
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, 0), Page)


class Page(BaseHTTPRequestHandler):
    server: Metrics

    def do_GET(self) -> None:
        page = self.server.pages[min(self.server.asked, len(self.server.pages) - 1)]
        self.server.asked += 1
        self.send_response(500 if not page else 200 if self.path == self.server.path else 404)
        self.end_headers()
        if self.path == self.server.path:
            self.wfile.write(page.encode())

    def log_message(self, *_: Any) -> None:
        pass


class Pod:
    """The part of a container's file system that the script uses: a PATH with some commands, and a clock."""

    def __init__(self, folder: Path, *context: str) -> None:
        self.bin, self.clock = folder / "bin", folder / "clock"
        self.bin.mkdir()
        self.clock.write_text(f"{START_S}\n")
        self.tool("date", FAKE_DATE.format(clock=self.clock))
        self.tool("sleep", FAKE_SLEEP.format(clock=self.clock))
        for tool in context:
            path = sys.executable if tool == "python3" else which(tool)
            if path is None:
                pytest.skip(f"there is no {tool} on this machine")
            self.tool(tool, f'#!/bin/sh\nexec {path} "$@"\n')

    def tool(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def stop(
        self, port: int, *, engine: str = "vLLM", drain_timeout_s: float = 600.0, shell: str = "/bin/sh", **env: str
    ) -> tuple[int, int]:
        """Run the pool's script; return its exit code and its duration in seconds of the fake clock."""
        spec = pool_of(template_of(GOOD_CONTAINER), engine=engine, drain_timeout_s=drain_timeout_s)
        script = pre_stop_script(spec).replace("port=8000 ", f"port={port} ")
        done = subprocess.run(
            [shell, "-c", script], env={"PATH": str(self.bin), **env}, capture_output=True, timeout=60
        )
        assert done.stdout == b""
        return done.returncode, int(self.clock.read_text()) - START_S


@pytest.fixture
def serve() -> Iterator[Any]:
    running: list[Metrics] = []

    def start(pages: list[str], *, host: str = "127.0.0.1", path: str = "/metrics") -> Metrics:
        server = Metrics(pages, host=host, path=path)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def page(running: float, waiting: float, *, engine: str = "vLLM") -> str:
    return PAGES[engine].format(running=running, waiting=waiting)


IDLE = page(0.0, 0.0)
BUSY = page(3.0, 0.0)


@pytest.fixture
def nobody() -> int:
    """Return a port of this machine without a listener."""
    return reserved_port()


@pytest.mark.parametrize("tool", ["curl", "wget", "python3"])
def test_pre_stop_of_idle_engine_ends_after_pause_and_two_checks(serve: Any, tmp_path: Path, tool: str) -> None:
    server = serve([IDLE])

    assert Pod(tmp_path, tool).stop(server.server_port) == (0, 5 + 2)
    assert server.asked == 2


@pytest.mark.parametrize("tool", ["curl", "wget", "python3"])
def test_pre_stop_waits_until_a_busy_engine_is_idle(serve: Any, tmp_path: Path, tool: str) -> None:
    server = serve([BUSY, BUSY, IDLE])

    assert Pod(tmp_path, tool).stop(server.server_port) == (0, 5 + 3 * 2)


def test_pre_stop_gives_the_same_result_in_bash_and_other_shells(serve: Any, tmp_path: Path) -> None:
    bash = which("bash")
    if bash is None:
        pytest.skip("there is no bash on this machine")
    server = serve([BUSY, page(0.0, 1.0), IDLE])

    assert Pod(tmp_path, "curl").stop(server.server_port, shell=bash) == (0, 5 + 3 * 2)


@pytest.mark.parametrize("engine", ["vLLM", "SGLang", "TensorRTLLM"])
@pytest.mark.parametrize(
    ("running", "waiting", "took_s"), [(0, 0, 7), (0.0, 0.0, 7), (1, 0, 11), (0, 1, 11), (0.0, 12.0, 11), (1e20, 0, 11)]
)
def test_pre_stop_counts_running_and_waiting_requests_per_engine(
    serve: Any, tmp_path: Path, engine: str, running: float, waiting: float, took_s: int
) -> None:
    first = page(running, waiting, engine=engine)
    server = serve([first, first, page(0, 0, engine=engine)], path=PATHS[engine])

    assert Pod(tmp_path, "curl").stop(server.server_port, engine=engine) == (0, took_s)


def test_pre_stop_counts_every_engine_on_a_metrics_page(serve: Any, tmp_path: Path) -> None:
    two = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_running{engine="1"} 2.0\n'
    last = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 0.0\n'
    server = serve([two, last, IDLE])

    assert Pod(tmp_path, "curl").stop(server.server_port) == (0, 11)


def test_pre_stop_reads_metrics_of_the_simulated_engine(serve: Any, tmp_path: Path) -> None:
    engine = Engine(ROUND)
    metrics = EngineMetrics(engine, model="sim", speed=1.0)
    idle = metrics.render().decode()
    engine.submit(0.0, ask("a"))
    server = serve([metrics.render().decode(), idle])

    assert Pod(tmp_path, "curl").stop(server.server_port) == (0, 9)


def test_pre_stop_continues_after_a_single_idle_check(serve: Any, tmp_path: Path) -> None:
    server = serve([IDLE, BUSY, IDLE, BUSY, IDLE])

    assert Pod(tmp_path, "curl").stop(server.server_port) == (0, 5 + 5 * 2)


def test_pre_stop_resets_the_idle_count_after_a_failed_check(serve: Any, tmp_path: Path) -> None:
    # A failed check queries two addresses, which are equal in this test.
    server = serve([IDLE, "", "", IDLE])

    assert Pod(tmp_path, "curl").stop(server.server_port) == (0, 5 + 3 * 2)


def test_pre_stop_of_busy_engine_ends_at_the_drain_timeout(serve: Any, tmp_path: Path) -> None:
    server = serve([BUSY])
    code, took_s = Pod(tmp_path, "curl").stop(server.server_port, drain_timeout_s=59.5)

    assert code == 0
    assert 60 <= took_s <= 62


def test_pre_stop_with_short_drain_timeout_shortens_the_pause(serve: Any, tmp_path: Path) -> None:
    assert Pod(tmp_path, "curl").stop(serve([BUSY]).server_port, drain_timeout_s=0.2) == (0, 1)


def test_pre_stop_without_http_tool_waits_the_default_time(serve: Any, tmp_path: Path) -> None:
    server = serve([BUSY])

    assert Pod(tmp_path).stop(server.server_port) == (0, 5 + 30)
    assert server.asked == 0


def test_pre_stop_without_http_tool_ends_at_the_drain_timeout(nobody: int, tmp_path: Path) -> None:
    code, took_s = Pod(tmp_path).stop(nobody, drain_timeout_s=20.0)

    assert code == 0
    assert 20 <= took_s <= 22


def test_pre_stop_waits_default_time_if_metrics_have_no_counts(serve: Any, tmp_path: Path) -> None:
    server = serve(["process_open_fds 27.0\n"])

    assert Pod(tmp_path, "curl").stop(server.server_port, engine="Generic") == (0, 5 + 30)


def test_pre_stop_ends_soon_after_the_engine_has_exited(nobody: int, tmp_path: Path) -> None:
    assert Pod(tmp_path, "curl").stop(nobody) == (0, 5 + 30)


def test_pre_stop_default_time_starts_at_the_last_response(serve: Any, tmp_path: Path) -> None:
    server = serve([*["", ""] * 10, BUSY, *["", ""] * 10, BUSY, IDLE])

    assert Pod(tmp_path, "curl").stop(server.server_port) == (0, 5 + 23 * 2)


@pytest.mark.parametrize("missing", ["sleep", "date"])
def test_pre_stop_without_clock_fails(serve: Any, tmp_path: Path, missing: str) -> None:
    server = serve([BUSY])
    pod = Pod(tmp_path, "curl")
    (pod.bin / missing).unlink()

    code, _ = pod.stop(server.server_port)

    assert server.asked <= 1
    assert (code == 0) == (missing == "date")


def test_pre_stop_finds_the_engine_on_the_pod_address(serve: Any, tmp_path: Path) -> None:
    server = serve([BUSY, IDLE], host="127.0.0.2")

    assert Pod(tmp_path, "curl").stop(server.server_port, DUALMAP_POD_IP="127.0.0.2") == (0, 9)
    assert server.asked == 3


def test_pre_stop_uses_localhost_if_pod_address_is_unreachable(serve: Any, tmp_path: Path) -> None:
    server = serve([BUSY, IDLE])

    assert Pod(tmp_path, "curl").stop(server.server_port, DUALMAP_POD_IP="127.0.0.2") == (0, 9)


@pytest.mark.parametrize("tool", ["curl", "wget", "python3"])
def test_pre_stop_encloses_ipv6_address_in_brackets(serve: Any, tmp_path: Path, tool: str) -> None:
    try:
        server = serve([BUSY, IDLE], host="::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")

    assert Pod(tmp_path, tool).stop(server.server_port, DUALMAP_POD_IP="::1") == (0, 9)


@pytest.mark.parametrize("tool", ["curl", "wget", "python3"])
def test_pre_stop_ignores_proxy_variables(serve: Any, nobody: int, tmp_path: Path, tool: str) -> None:
    server, proxy = serve([BUSY, IDLE]), f"http://127.0.0.1:{nobody}"

    assert Pod(tmp_path, tool).stop(server.server_port, http_proxy=proxy, all_proxy=proxy, HTTP_PROXY=proxy) == (0, 9)


def test_pre_stop_ends_before_the_grace_period() -> None:
    # The drain timeout includes the initial pause. After the timeout, the script may sleep once more and query two
    # addresses, 2 s each.
    assert grace_period_s(pool_of(template_of(GOOD_CONTAINER), drain_timeout_s=60.0)) >= 60 + 2 + 2 * 2 + 30
