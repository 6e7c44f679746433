"""Tests that long-running commands keep their exit status in any state of stderr."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ports import reserved_port

# With this variable Python does not buffer stderr; the buffer would hide the fault.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
POOL = """
apiVersion: serving.dualmap.dev/v1alpha1
kind: InferencePool
metadata: {name: qwen, namespace: llm}
spec: {model: {name: qwen}}
status: {ring: {members: [{id: qwen-0, address: 10.0.0.12, port: 8000}]}}
"""
READY_WITHIN_S = 60.0


@pytest.fixture(name="port")
def _port() -> int:
    return reserved_port()


@pytest.fixture(params=["router", "engine-sim"], name="command")
def _command(request: pytest.FixtureRequest, port: int, tmp_path: Path) -> list[str]:
    (tmp_path / "pool.yaml").write_text(POOL)
    ports = ("--grpc-port", "0", "--health-port", "0", "--als-port", "0", "--metrics-port", str(port))
    arguments = {
        "router": ("--pool", str(tmp_path / "pool.yaml"), "--host", "127.0.0.1", *ports),
        "engine-sim": ("--model", "qwen", "--port", str(port)),
    }
    return [sys.executable, "-m", "dualmap_cli", request.param, *arguments[request.param]]


def stopped(process: subprocess.Popen[bytes], port: int) -> int:
    """Wait until the command listens, stop it, and return its exit status."""
    try:
        give_up_s = time.monotonic() + READY_WITHIN_S
        while process.poll() is None and time.monotonic() < give_up_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        return process.wait(READY_WITHIN_S)
    finally:
        process.kill()


def test_command_exits_0_if_the_stderr_reader_closes_the_pipe(command: list[str], port: int) -> None:
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        assert any(b" ready " in line for line in process.stderr)
        process.stderr.close()
        assert stopped(process, port) == 0


def test_command_without_stderr_reader_starts_and_exits_0(command: list[str], port: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(command, stderr=writer, env=ENVIRONMENT) as process:
        os.close(writer)
        assert stopped(process, port) == 0


def test_command_with_stderr_closed_starts_and_exits_0(command: list[str], port: int) -> None:
    with subprocess.Popen(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], env=ENVIRONMENT) as process:
        assert stopped(process, port) == 0


def test_command_with_stderr_on_a_full_disk_exits_0(command: list[str], port: int) -> None:
    with Path("/dev/full").open("w") as full, subprocess.Popen(command, stderr=full, env=ENVIRONMENT) as process:
        assert stopped(process, port) == 0


def test_command_with_a_full_output_device_reports_the_fault() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "dualmap_cli", "policies"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )

    assert ended.returncode == 1
    assert ended.stderr == "Error: the output cannot be written: No space left on device\n"
