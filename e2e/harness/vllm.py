"""Real vLLM processes on the CPU, with KV events, and the tiny random model that they serve.

``make vllm`` installs vLLM in ``.vllm`` and names its Python in DUALMAP_VLLM_PYTHON.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from emulated_cluster.waiting import until
from harness.processes import Child
from harness.stack import PoolMember
from ports import reserved_port

REPOSITORY = Path(__file__).parents[2]
PYTHON = os.environ.get("DUALMAP_VLLM_PYTHON")
MODEL = "tiny-model"
BLOCK_TOKENS = 32
# A token takes 512 bytes of KV memory, and one block is a placeholder.
CACHE_BLOCKS = 256
LONGEST_PROMPT = 2048
START_LIMIT_S = 600.0
"""vLLM starts in 25 s on an idle machine. With ten runnable processes for each core, 240 s were too short."""
STOP_LIMIT_S = 20.0
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # The endpoints that reset the prefix cache and that sleep.
    "VLLM_SERVER_DEV_MODE": "1",
    # One thread computes, because several engines share the cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def make_model(folder: Path, size: str = "fast") -> None:
    """Write the tiny model with random weights into a folder; ``size`` is one of ``tiny_model.py``."""
    assert PYTHON is not None
    script = REPOSITORY / "bench/engine/tiny_model.py"
    made = subprocess.run(
        [PYTHON, script, folder, size], env=_environment(), capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


class Vllm(Child):
    """A vLLM that serves the model in a folder; a restart uses the same ports."""

    def __init__(self, model: Path, *, directory: Path, name: str, arguments: Sequence[str] = ()) -> None:
        assert PYTHON is not None
        self.host = "127.0.0.1"
        self.port, self.events_port, replay_port = (reserved_port() for _ in range(3))
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # vLLM listens at this port only if the host is a wildcard.
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
        }
        argv = (
            *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--host", self.host, "--port", str(self.port)),
            *("--model", model, "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(LONGEST_PROMPT), "--max-num-seqs", "8", "--block-size", str(BLOCK_TOKENS)),
            *("--kv-cache-memory-bytes", str(CACHE_BLOCKS * BLOCK_TOKENS * 512), "--enable-prefix-caching"),
            *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)),
            # The render endpoints, and requests with tools.
            *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *arguments,
        )
        super().__init__(name, argv, directory=directory)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def member(self) -> PoolMember:
        """This engine as a member of a pool."""
        return PoolMember(id=self.name, address=self.host, port=self.port)

    async def start(self) -> None:
        """Start vLLM and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.argv,
                # Python imports from this folder first.
                cwd=self.log.parent,
                env=_environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The process has its own group, because signals must also reach vLLM's child processes.
                start_new_session=True,
            )

        async def healthy() -> bool:
            assert self.returncode is None, f"{self.name} exited with {self.returncode}:\n{self.output()[-4000:]}"
            with contextlib.suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession() as http, http.get(f"{self.url}/health") as response:
                    return response.status == 200
            return False

        await until(healthy, f"{self.name} is healthy", timeout_s=START_LIMIT_S)

    async def kill(self) -> None:
        """Send SIGKILL to vLLM and its child processes; wait until vLLM has ended."""
        self._signal(signal.SIGKILL)
        await self._running().wait()

    async def stop(self) -> int:
        """Stop vLLM and its child processes, with SIGKILL after a timeout, because vLLM's shutdown can hang."""
        if self._process is None:
            return 0
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await self.wait(timeout_s=STOP_LIMIT_S)
        await self.kill()
        return await self.wait()

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST a body past the router; return the JSON of the answer, None for an empty answer."""
        async with aiohttp.ClientSession() as http, http.post(self.url + path, json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            return json.loads(text) if text else None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _environment() -> dict[str, str]:
    # PYTHONPATH is removed, because Python would otherwise find its packages before vLLM's own.
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **ENVIRONMENT}
