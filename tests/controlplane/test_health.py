"""Tests of the operator's health and metrics ports."""

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from dualmap_edge.ports import AddressError
from dualmap_operator.run.health import HttpServer, problems
from dualmap_operator.run.metrics import Metrics

HOST = "127.0.0.1"


class Scene:
    def __init__(self, **settings: float) -> None:
        self.problems: list[str] = []
        self.server = HttpServer(problems=lambda: self.problems, metrics=Metrics(), **settings)
        self.ports = (0, 0)

    async def get(self, port: int, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://{HOST}:{port}{path}") as response:
            return response.status, await response.text()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    scene.ports = await scene.server.start(HOST, health_port=0, metrics_port=0)
    yield scene
    await scene.server.close()


async def test_health_is_200_without_problems(scene: Scene) -> None:
    assert await scene.get(scene.ports[0], "/healthz") == (200, "ok\n")


async def test_health_with_problems_is_500_with_the_reasons(scene: Scene) -> None:
    scene.problems = ["no data from the watch of Pod for 130 s", "reconcile of llm/qwen is stuck"]

    assert await scene.get(scene.ports[0], "/healthz") == (
        500,
        "no data from the watch of Pod for 130 s\nreconcile of llm/qwen is stuck\n",
    )


async def test_operator_metrics_are_served_only_on_the_metrics_port(scene: Scene) -> None:
    status, page = await scene.get(scene.ports[1], "/metrics")

    assert status == 200
    assert "dualmap_operator_leader 0.0" in page
    assert (await scene.get(scene.ports[0], "/metrics"))[0] == 404


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: o\r\n\r\n"])
async def test_incomplete_health_request_is_closed(sent: bytes) -> None:
    scene = Scene(idle_timeout_s=0.05)
    try:
        for port in await scene.server.start(HOST, health_port=0, metrics_port=0):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(sent)
            async with asyncio.timeout(30):
                await reader.read()
            writer.close()
    finally:
        await scene.server.close()


async def test_health_port_in_use_is_named_in_the_error() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=rf"cannot listen on {HOST}:{port}: .*; give another --metrics-port"):
            await Scene().server.start(HOST, health_port=0, metrics_port=port)


def test_problems_include_silent_watch_and_stuck_or_absent_reconcile() -> None:
    said = problems(
        ages_s={"Pod": 121.0, "Service": 46.0}, stuck=["llm/qwen"], unreconciled_s={"llm/new": 1.0, "llm/lost": 31.0}
    )

    assert said == (
        "no data from the watch of Pod for 121 s",
        "reconcile of llm/qwen is stuck",
        "llm/lost has had no reconciler for 31 s",
    )
