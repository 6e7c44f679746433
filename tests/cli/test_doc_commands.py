"""Tests that every `dualmap` and `make` command of the documents runs unchanged; e2e/ covers kubectl and helm.

The files and hosts of the documents exist (pool.yaml, /certs, redis). Long runs have fewer requests. Each server runs
until its ready line, in a network namespace with free ports.
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from certificates import Authority, write_pair
from doc_commands import ROOT, Command, commands
from dualmap.recordings.values import RecordedRequest
from dualmap_sim.experiment import Experiment
from dualmap_sim.workloads.catalog import Workload
from recorded import CHANGED, request, write
from redis_server import redis_server
from simulated_recording import recorded

COMMANDS = list(commands("dualmap"))
POOL = """
apiVersion: serving.dualmap.dev/v1alpha1
kind: InferencePool
metadata: {name: qwen, namespace: llm}
spec:
  model: {name: Qwen/Qwen2.5-7B-Instruct, aliases: [qwen]}
status:
  ring:
    members:
    - {id: qwen-0, address: 10.0.0.12, port: 8000}
    - {id: qwen-1, address: 10.0.0.13, port: 8000}
"""
# The engine at ENGINE_URL is a simulated engine, which counts the tokens of this pool's requests.
TOKENIZER = """
  engine: {tokenizer: {source: Renderer, url: ENGINE_URL}}
status:"""
ENGINE_URL = "http://10.0.0.1:8000"
REQUEST = {"model": "qwen", "messages": [{"role": "user", "content": "Hello"}]}
# These commands run until a signal. Another test in this file starts servers; e2e/test_demo.py runs `demo --serve`, and
# e2e/test_epp.py runs `epp`, which needs an API server.
SERVERS = ("router", "engine-sim")
LASTING = (*SERVERS, "demo", "epp")
# The test appends these options, because a run with the document's values takes minutes.
SHORTER = {
    "simulate": ["--requests", "60", "--qps", "3"],
    "goodput": ["--requests", "60", "--tolerance", "0.5"],
}


@cache
def some_requests() -> tuple[RecordedRequest, ...]:
    experiment = Experiment(requests_per_s=0.5, workload=Workload(requests=120), instances=1, warmup=0)
    return tuple(recorded(experiment))


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    (tmp_path / "pool.yaml").write_text(POOL)
    written = re.search(r"```yaml\n# kv.yaml\n(.*?)```", (ROOT / "docs/kv-events.md").read_text(), re.DOTALL)
    assert written is not None
    (tmp_path / "kv.yaml").write_text(written[1])
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    trace = [
        {"timestamp": 500 * n, "input_length": 1024, "output_length": 10, "hash_ids": [n % 5, n]} for n in range(60)
    ]
    (tmp_path / "mooncake.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in trace))
    write(tmp_path / "recording" / "requests.jsonl.gz", *some_requests())
    (tmp_path / "engine.yaml").write_text("parameters: {r: {value: 5200, low: 5050, high: 5400, verdict: known}}")
    _write_recordings(tmp_path)
    authority = Authority()
    certs = tmp_path / "certs"
    certs.mkdir()
    (certs / "ca.crt").write_bytes(authority.pem)
    write_pair(certs / "router", authority.pair())
    write_pair(certs / "envoy", authority.pair())
    (tmp_path / "redis-password").write_text("secret")
    return tmp_path


def _write_recordings(folder: Path) -> None:
    """Write what the commands about recordings read: two folders, a merged file, a trace and a log."""
    for name in ("recording-a/requests-1.jsonl.gz", "recording-b/requests-1.jsonl.gz", "both.jsonl.gz"):
        write(folder / name, CHANGED, request(0), request(1))
    (folder / "recording-a" / "key").write_text("0a" * 32)
    shutil.copy(folder / "mooncake.jsonl", folder / "trace.jsonl")
    (folder / "log.jsonl").write_text(json.dumps({"timestamp": 0, "request": REQUEST}))


def typed(command: Command, folder: Path) -> list[str]:
    """Return the command's arguments for the test, without redirections."""
    line = command.line.replace("/certs", f"{folder}/certs").replace("/run/secrets/redis", f"{folder}/redis-password")
    words = shlex.split(re.split(r" [<>|] ", line, maxsplit=1)[0])
    return [sys.executable, "-m", "dualmap_cli", *words[1:], *SHORTER.get(words[1], [])]


@contextmanager
def engine_for(command: Command, folder: Path) -> Iterator[str]:
    """Run a simulated engine for a command that contains an engine's URL, and yield the engine's URL."""
    if ENGINE_URL not in command.line:
        yield ENGINE_URL
        return
    line = [sys.executable, "-m", "dualmap_cli", "engine-sim", "--port", "0", "--model", "qwen"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as engine:
        assert engine.stderr is not None
        try:
            ready = re.search(r"ready http=(\S+)", engine.stderr.readline())
            assert ready is not None
            url = f"http://{ready[1]}"
            (folder / "pool.yaml").write_text(POOL.replace("\nstatus:", TOKENIZER.replace("ENGINE_URL", url)))
            yield url
        finally:
            engine.terminate()
            engine.stderr.read()


def test_documentation_contains_commands() -> None:
    assert {command.page for command in COMMANDS} >= {"README.md", "docs/operations.md", "docs/state.md"}
    assert {command.line.split()[1] for command in COMMANDS} >= {"router", "envoy-config", "explain", "simulate"}


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if command.line.split()[1] not in LASTING],
    ids=lambda command: f"{command.page}: {command.line[:60]}",
)
def test_documented_command_succeeds(command: Command, folder: Path) -> None:
    given = (folder / "request.json").read_bytes() if "< request.json" in command.line else b""
    with redis_server(folder / "redis") as redis, engine_for(command, folder) as engine:
        words = [
            word.replace("redis://redis:6379", redis.url).replace(ENGINE_URL, engine) for word in typed(command, folder)
        ]
        done = subprocess.run(words, cwd=folder, input=given, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    # A command that writes a file prints on stderr.
    assert done.stdout or "-o" in words


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if command.line.split()[1] in SERVERS],
    ids=lambda command: f"{command.page}: {command.line[:60]}",
)
def test_documented_server_starts_and_stops(command: Command, folder: Path) -> None:
    if subprocess.run(["unshare", "--map-root-user", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets you make no network namespace")
    own = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    with subprocess.Popen(
        [*own, *typed(command, folder)], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as server:
        assert server.stderr is not None
        lines = []
        try:
            for line in server.stderr:
                lines.append(line.decode())
                if line.startswith(f"dualmap {command.line.split()[1]} ready".encode()):
                    break
            else:
                pytest.fail("".join(lines))
        finally:
            server.send_signal(signal.SIGTERM)
        # The test reads stderr to its end; test_stderr.py covers a closed stderr.
        lines += [line.decode() for line in server.stderr]
    assert server.returncode == 0, "".join(lines)


def test_documented_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    typed_targets = {command.line.split()[1] for command in commands("make")}
    assert typed_targets
    assert typed_targets <= set(targets)
