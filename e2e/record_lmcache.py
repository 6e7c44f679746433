"""Records questions and answers of LMCache's coordinator and controller, which run without an engine.

Run as ``PYTHONPATH=tests:testing .venv/bin/python e2e/record_lmcache.py`` after ``make vllm`` and::

    .venv/bin/uv pip install --python .vllm/bin/python --target /tmp/lmcache --no-deps lmcache==0.5.6 aiofile aiofiles \
        blake3 caio cffi cryptography httpcore httptools httpx llvmlite numba opentelemetry-exporter-prometheus \
        py-cpuinfo pycparser sortedcontainers

LMCache's wheel requires CUDA libraries, so it is installed without its dependencies: the servers import none of these
libraries. The script takes the place of LMCache's workers, and reports to the servers which chunks are stored.
tests/extproc/kv_stores/test_lmcache_recording.py reads the recording.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from emulated_cluster.waiting import until
from ports import reserved_port

REPOSITORY = Path(__file__).parents[1]
RECORDING = REPOSITORY / "tests/extproc/recorded/lmcache.json"
PYTHON = REPOSITORY / ".vllm/bin/python"
PACKAGES = "/tmp/lmcache"
"""The folder of the docstring's command."""
START_LIMIT_S = 240.0
COORDINATOR_CHUNK_TOKENS = 16
CONTROLLER_CHUNK_TOKENS = 256
"""The controller has no option for it."""
CHUNKS = 3
MODEL = "m"


class Recorder:
    """Asks a server, and keeps each question with its answer."""

    def __init__(self, server: str, url: str, http: aiohttp.ClientSession) -> None:
        self.exchanges: list[dict[str, Any]] = []
        self._server = server
        self._url = url
        self._http = http

    async def ask(self, name: str, path: str, body: Mapping[str, Any]) -> Any:
        """Send a question and keep it under a name; return the answer."""
        status, answer = await self.post(path, body)
        self.exchanges.append(
            {"name": name, "server": self._server, "path": path, "body": body, "status": status, "answer": answer}
        )
        return answer

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Send a request that is no question of a client."""
        async with self._http.post(self._url + path, json=body) as response:
            return response.status, await response.json()


async def coordinator(record: Recorder) -> None:
    """Ask about a prompt while a rank of the instance ``mp-1`` stores its chunks, one after the other."""

    async def ask(name: str, **fields: object) -> Any:
        ids = list(range(CHUNKS * COORDINATOR_CHUNK_TOKENS))
        question = {"token_ids": ids, "model_name": MODEL, "world_size": 1, "cache_salt": "", **fields}
        return await record.ask(name, "/directory/lookup", question)

    async def store(sequence: int, tier: Mapping[str, object], keys: Sequence[Mapping[str, object]]) -> None:
        size = COORDINATOR_CHUNK_TOKENS
        entries = [
            {"key": key, "size_bytes": 8192, "token_ids": list(range(at, at + size)), "token_offset": at}
            for at, key in ((number * size, key) for number, key in enumerate(keys))
        ]
        batch = {"instance_id": "mp-1", "incarnation": 1, "seq": sequence, "event_type": "store", "entries": entries}
        status, answer = await record.post("/events", {"batches": [{**batch, **tier}]})
        assert (status, answer["applied"]) == (200, 1), answer

    one = await ask("nothing is stored")
    two = await ask("nothing is stored, two ranks", world_size=2)
    memory, disk = {"tier": "l1", "backend": "dram"}, {"tier": "l2", "backend": "fs", "shared": True}
    await store(1, memory, [result["key"] for result in one["results"][:2]])
    await store(2, disk, [result["key"] for result in one["results"][:1]])
    # The results have all ranks of the first chunk, then those of the second one.
    await store(3, memory, [two["results"][0]["key"]])
    await store(4, memory, [two["results"][1]["key"], two["results"][3]["key"]])
    await ask("two chunks are stored")
    await ask("two ranks store one chunk, one rank another", world_size=2)
    await ask("another salt", cache_salt="tenant-2")
    await record.ask("the controller's path", "/lookup", {"tokens": [1, 2, 3]})


async def controller(record: Recorder, *, pull: int, reply: int) -> None:
    """Ask about a prompt, before and after two instances report its chunks."""
    tokens = list(range(CHUNKS * CONTROLLER_CHUNK_TOKENS))
    await record.ask("nothing is stored", "/lookup", {"tokens": tokens})
    digests = await _digests(tokens)
    context = zmq.asyncio.Context()
    try:
        for number, held in enumerate(([0, 2], [1])):
            worker = {"instance_id": f"instance-{number}", "worker_id": 0}
            with context.socket(zmq.REQ) as socket:
                socket.connect(f"tcp://127.0.0.1:{reply}")
                address = {"ip": "127.0.0.1", "port": 9100 + number, "peer_init_url": None}
                await socket.send(json.dumps({"type": "RegisterMsg", **worker, **address}).encode())
                await socket.recv()
            with context.socket(zmq.PUSH) as socket:
                socket.connect(f"tcp://127.0.0.1:{pull}")
                admitted = [{"op_type": "admit", "key": digests[at], "seq_num": n} for n, at in enumerate(held)]
                stored = {"location": "LocalCPUBackend", "operations": admitted}
                await socket.send(json.dumps({"type": "BatchedKVOperationMsg", **worker, **stored}).encode())

        async def reported() -> bool:
            _, answer = await record.post("/lookup", {"tokens": tokens})
            return len(answer["layout_info"]) == 2

        await until(reported, "the controller knows all chunks", timeout_s=60.0)
    finally:
        context.destroy(linger=0)
    await record.ask("two instances store the chunks", "/lookup", {"tokens": tokens})
    await record.ask("the coordinator's path", "/directory/lookup", {"token_ids": [1, 2, 3]})


async def _digests(tokens: list[int]) -> list[int]:
    """Return the digests that the controller computes for the chunks of a prompt."""
    script = f"""
from lmcache.v1.token_database import ChunkedTokenDatabase
print(*(key for _, _, key in ChunkedTokenDatabase().process_tokens({tokens}, make_key=False)))
"""
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-c", script, env=_environment(), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    # LMCache logs to the same stream.
    digests = [int(digest) for digest in printed.decode().splitlines()[-1].split()]
    assert len(digests) == CHUNKS
    return digests


@asynccontextmanager
async def running(module: str, *arguments: str, port: int, health: str) -> AsyncIterator[str]:
    """Run a server of LMCache; yield its URL when it answers."""
    command: tuple[str | Path, ...] = (PYTHON, "-m", module, "--host", "127.0.0.1", "--port", str(port), *arguments)
    process = await asyncio.create_subprocess_exec(*command, env=_environment(), stdout=asyncio.subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:

        async def answers() -> bool:
            assert process.returncode is None, f"{module} exited with {process.returncode}"
            with contextlib.suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession() as http, http.get(url + health) as response:
                    return response.status == 200
            return False

        await until(answers, f"{module} answers", timeout_s=START_LIMIT_S)
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    # The controller's digests are Python's own hashes.
    return {**os.environ, "PYTHONPATH": PACKAGES, "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}


async def record() -> dict[str, Any]:
    """Run both servers, one after the other; return the recording."""
    exchanges: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as http:
        arguments = ("--chunk-size", str(COORDINATOR_CHUNK_TOKENS), "--disable-metrics")
        async with running("lmcache.v1.mp_coordinator", *arguments, port=reserved_port(), health="/healthz") as url:
            recorder = Recorder("coordinator", url, http)
            await coordinator(recorder)
            exchanges += recorder.exchanges
        pull, reply = reserved_port(), reserved_port()
        ports = json.dumps({"pull": pull, "reply": reply})
        async with running(
            "lmcache.v1.api_server", "--monitor-ports", ports, port=reserved_port(), health="/openapi.json"
        ) as url:
            recorder = Recorder("controller", url, http)
            await controller(recorder, pull=pull, reply=reply)
            exchanges += recorder.exchanges
    return {"lmcache": "0.5.6", "exchanges": exchanges}


def _written(recording: Mapping[str, Any]) -> str:
    """Return the recording as JSON, with one exchange on a line."""
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in recording["exchanges"])
    return f'{{"lmcache": "{recording["lmcache"]}", "exchanges": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    RECORDING.write_text(_written(asyncio.run(record())), encoding="utf-8")
    print(f"wrote {RECORDING.relative_to(REPOSITORY)}", file=sys.stderr)
