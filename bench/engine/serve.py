"""Starts and stops a real vLLM on the CPU with the model of ``tiny_model.py``, for ``record`` and the e2e tests."""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

HERE = Path(__file__).parent
START_LIMIT_S = 240.0
"""vLLM starts in 25 s on an idle machine, and in up to 150 s on a busy machine."""
STOP_LIMIT_S = 20.0
LOG_CHARACTERS = 3000
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # One thread computes. A second core is left for the engine's other processes and the client.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class ServeError(Exception):
    """vLLM did not start; the message ends with vLLM's last output."""


def options_of(*, step_tokens: int, whole: bool) -> tuple[str, ...]:
    """Return vLLM's options.

    ``step_tokens`` limits the tokens of a step. With ``whole``, vLLM never cuts a prompt into several steps.
    """
    return (
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "8192", "--max-num-seqs", "32"),
        *("--block-size", "32", "--kv-cache-memory-bytes", "1073741824", "--enable-prefix-caching"),
        *("--enable-prompt-tokens-details", "--max-num-batched-tokens", str(step_tokens)),
        *(("--no-enable-chunked-prefill",) if whole else ()),
    )


@asynccontextmanager
async def serving(python: Path, options: Sequence[str], *, say: Callable[[str], None]) -> AsyncIterator[str]:
    """Yield the URL of a vLLM that runs while the context is open. Raises ServeError and OSError."""
    with tempfile.TemporaryDirectory(prefix="dualmap-vllm-") as temporary:
        folder = Path(temporary)
        log = folder / "log"
        say("making the model")
        await _run(python, HERE / "tiny_model.py", folder / "model", log=log)
        port = _free_port()
        command = ("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port))
        model = ("--model", str(folder / "model"), "--served-model-name", "tiny")
        say("starting vLLM")
        with log.open("wb") as output:
            server = await asyncio.create_subprocess_exec(
                *(str(python), *command, *model, *options),
                cwd=folder,
                env=_environment(),
                stdout=output,
                stderr=output,
                # The process has its own group, because signals must also reach vLLM's child processes.
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            await _healthy(server, url, log)
            yield url
        finally:
            await _stop(server)


async def _run(python: Path, script: Path, folder: Path, *, log: Path) -> None:
    with log.open("wb") as output:
        made = await asyncio.create_subprocess_exec(
            str(python), str(script), str(folder), "slow", env=_environment(), stdout=output, stderr=output
        )
        if await made.wait():
            raise ServeError(f"{python} failed to create the model:\n{_end_of(log)}")


async def _healthy(server: asyncio.subprocess.Process, url: str, log: Path) -> None:
    try:
        async with asyncio.timeout(START_LIMIT_S), aiohttp.ClientSession() as http:
            while server.returncode is None:
                try:
                    async with http.get(f"{url}/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass  # The server is still starting.
                await asyncio.sleep(0.5)
    except TimeoutError as error:
        raise ServeError(f"vLLM did not become healthy within {START_LIMIT_S:.0f} s:\n{_end_of(log)}") from error
    raise ServeError(f"vLLM exited with status {server.returncode}:\n{_end_of(log)}")


async def _stop(server: asyncio.subprocess.Process) -> None:
    """Stop vLLM and its child processes.

    On a busy machine vLLM's shutdown can hang for minutes. So the processes are killed after ``STOP_LIMIT_S``.
    """
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(server.wait(), STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    await server.wait()


def _environment() -> dict[str, str]:
    # PYTHONPATH is removed, because Python would otherwise find its packages before vLLM's own.
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **ENVIRONMENT}


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_CHARACTERS:]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
