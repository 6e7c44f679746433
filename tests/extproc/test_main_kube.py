"""Tests ``dualmap router`` as a process with pools of a Kubernetes API: the router waits for pools, and a signal can
stop it.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from extproc.envoy_messages import chat
from extproc.router_processes import READY, WAIT_S, Router, launch, picked
from kube_api import KubeApi, kube_api, pool_body
from waiting import until

pytestmark = pytest.mark.usefixtures("transport")


@asynccontextmanager
async def on_kubernetes(api: KubeApi, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    ports = [text for port in ("grpc", "health", "metrics", "als") for text in (f"--{port}-port", "0")]
    process = await launch("--kube", "--host", "127.0.0.1", *ports, *options, KUBECONFIG=str(api.kubeconfig))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line_with(process: asyncio.subprocess.Process, words: str) -> str:
    """Return the next line on stderr that contains this text."""
    assert process.stderr is not None
    async with asyncio.timeout(WAIT_S):
        while line := (await process.stderr.readline()).decode().rstrip():
            if words in line:
                return line
    raise AssertionError(f"it ended without saying {words!r}")


async def test_router_with_kubernetes_is_ready_after_pools_are_listed(tmp_path):
    async with kube_api(tmp_path) as api:
        await api.put(pool_body("qwen", version=3, model="m"))
        api.hold_lists()
        async with on_kubernetes(api, "--namespace", "llm") as process:
            await line_with(process, "Listing pools from the Kubernetes API")
            await until(lambda: len(api.lists) > 0)
            api.answer_lists()
            match = READY.match(await line_with(process, "ready grpc="))
            assert match
            served = Router(process, *match.groups())
            assert await served.ready() == health_pb2.HealthCheckResponse.SERVING
            async with grpc.aio.insecure_channel(served.grpc) as channel:
                assert await picked(channel, chat())
            assert json.loads(await served.get("/pools/llm/qwen"))["ring_version"] == 3
            assert b'dualmap_kube_watch_age_seconds{resource="inferencepools"}' in await served.get("/metrics")
            served.stop()
            assert await served.exited() == 0


async def test_router_waiting_for_the_api_server_stops_on_signal(tmp_path):
    async with kube_api(tmp_path) as api:
        await api.stop()
        async with on_kubernetes(api, "--drain-timeout", "1s") as process:
            assert "ready" not in await line_with(process, "Kubernetes list or watch failed")
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            said = await asyncio.wait_for(process.stderr.read(), WAIT_S)
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
            assert b"router ready" not in said
