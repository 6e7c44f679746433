"""``dualmap router`` as a process for tests: helpers that start the process, find its ports, and send a request."""

import asyncio
import os
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import NO_WAIT, destination, request_body, request_headers
from extproc.transports import selected

WAIT_S = 60.0
READY = re.compile(r"dualmap router ready grpc=(\S+) health=(\S+) metrics=(\S+) als=(\S+)$")


def pool_document(name="qwen", *, model="m", members=2) -> dict[str, object]:
    ring = [{"id": f"{name}-{n}", "address": f"10.0.0.{n}", "port": 8000} for n in range(members)]
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {"model": {"name": model}},
        "status": {"ring": {"version": members, "members": ring}},
    }


def write_pool(path: Path, *args, **kwargs) -> Path:
    path.write_text(yaml.safe_dump(pool_document(*args, **kwargs)))
    return path


@dataclass
class Router:
    """A running ``dualmap router``, its ports, and what it logged before it was ready."""

    process: asyncio.subprocess.Process
    grpc: str
    health: str
    metrics: str
    als: str
    before: bytes = b""

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exited(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WAIT_S)

    async def get(self, path: str) -> bytes:
        def fetch() -> bytes:
            with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=10) as response:
                content: bytes = response.read()
            return content

        return await asyncio.to_thread(fetch)

    async def buffered(self, size: int) -> bool:
        """Return whether the router stores bodies of this size."""
        return f"dualmap_buffered_bytes {float(size)}\n".encode() in await self.get("/metrics")

    async def ready(self) -> int:
        async with grpc.aio.insecure_channel(self.health) as channel:
            request = health_pb2.HealthCheckRequest(service="readiness")
            return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def launch(
    *arguments: str, program: tuple[str, ...] = ("-m", "dualmap_cli"), command: str = "router", **environment: str
) -> asyncio.subprocess.Process:
    argv = [sys.executable, *program, command, "--transport", selected(), *arguments]
    environment = {**os.environ, "GRPC_VERBOSITY": "NONE", **environment}
    return await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )


@asynccontextmanager
async def running(
    *pools: Path, options: tuple[str, ...] = (), program: tuple[str, ...] = ("-m", "dualmap_cli")
) -> AsyncIterator[Router]:
    ports = [text for port in ("grpc", "health", "metrics", "als") for text in (f"--{port}-port", "0")]
    files = [text for path in pools for text in ("--pool", str(path))]
    process = await launch("--host", "127.0.0.1", *ports, *files, *options, program=program)
    try:
        assert process.stderr is not None
        # A router may log what it does before it is ready, such as its connections to other routers.
        before = b""
        line = await asyncio.wait_for(process.stderr.readline(), WAIT_S)
        while (match := READY.match(line.decode().strip())) is None:
            assert line, before
            before += line
            line = await asyncio.wait_for(process.stderr.readline(), WAIT_S)
        yield Router(process, *match.groups(), before)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def stream(channel: grpc.aio.Channel):
    return channel.stream_stream(
        f"/{EXT_PROC_SERVICE}/{EXT_PROC_METHOD}",
        request_serializer=wire.ProcessingRequest.SerializeToString,
        response_deserializer=wire.ProcessingResponse.FromString,
    )()


async def picked(channel: grpc.aio.Channel, body: bytes) -> str | None:
    call = stream(channel)
    await call.write(request_headers(NO_WAIT))
    await call.write(request_body(body))
    answer = await call.read()
    call.cancel()
    return destination(answer)
