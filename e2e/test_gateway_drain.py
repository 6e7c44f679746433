"""Tests the chart's drain script with a real Envoy: Envoy stops only after its open streams have ended."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from harness.clients import http1, opened
from harness.deployment import CHAT, Deployment
from harness.documents import chat
from harness.shared_engines import SharedEngines
from harness.upstream import sse
from harness.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

SCRIPT = Path(__file__).parents[1] / "helm" / "dualmap" / "files" / "envoy_drain.py"
EVENTS = [b'data: {"number": %d}\n\n' % number for number in range(2)]
ENDS_WITHIN_S = 30.0


async def test_gateway_drain_waits_for_the_open_stream(engines: SharedEngines, deployment: Deployment) -> None:
    rest = asyncio.Event()
    engines.left.answer = engines.right.answer = sse(EVENTS, then=rest)
    body = json.dumps(chat("scripted", f"{deployment.mode} drain", stream=True)).encode()
    envoy = deployment.another_envoy("leaving")

    async def told_to_go() -> bool:
        # The router rejects a body without a model.
        return (await http1(envoy.url + CHAT, body=b"{}")).headers.get("connection") == "close"

    # The test stops Envoy immediately after the drain. The router's load must then become zero, because Envoy has sent
    # its access log before.
    async with envoy:
        arguments = (f"--admin={envoy.admin.removeprefix('http://')}", "--port=0", "--timeout=60", "--least=0")
        drain = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, *arguments, stderr=asyncio.subprocess.PIPE)
        try:
            assert drain.stderr is not None
            await drain.stderr.readline()
            async with opened(envoy.url + CHAT, body) as response:
                assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
                drain.terminate()
                await until(told_to_go, "responses ask clients to close their connections")
                assert drain.returncode is None
                rest.set()
                assert await response.content.read() == EVENTS[1]
            assert await asyncio.wait_for(drain.stderr.read(), ENDS_WITHIN_S) == b"nothing is open\n"
            assert await drain.wait() == 0
        finally:
            rest.set()
            if drain.returncode is None:
                drain.kill()
                await drain.wait()
