"""Tests that the process kubelet repeats requests after a rejection or without an answer."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from emulated_cluster.api.client import ApiClient, ApiError
from emulated_cluster.api.retries import Retries
from emulated_cluster.kubelet.containers.containers import NodeSettings, PodLocation
from emulated_cluster.kubelet.pod_spec.environment import ContainerConfigError
from emulated_cluster.kubelet.pod_spec.volumes import persistently
from emulated_cluster.kubelet.pods import FAKE_ANNOTATION, PodWorker
from waiting import until
from web_server import WebServer

POD = {
    "metadata": {
        "name": "chat-0",
        "namespace": "team",
        "uid": "0f1e2d3c-0000",
        "resourceVersion": "1",
        "annotations": {FAKE_ANNOTATION: "true"},
    },
    "spec": {"nodeName": "node-0", "containers": [{"name": "engine"}]},
}
TERMINATED = {"kind": "Status", "message": "unable to create new content in namespace team", "reason": "Forbidden"}


class Server:
    """A server that answers the first requests with these statuses, and accepts all later requests."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.taken: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        if self.statuses:
            return web.json_response(TERMINATED, status=self.statuses.pop(0))
        self.taken.append(request.method)
        said: dict[str, Any] = await request.json()
        return web.json_response({**POD, **said, "metadata": {**POD["metadata"], "resourceVersion": "2"}})


@asynccontextmanager
async def server(*statuses: int) -> AsyncIterator[tuple[Server, ApiClient]]:
    refusing = Server(*statuses)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", refusing.answer)
    async with WebServer(application) as server:
        client = ApiClient(f"http://127.0.0.1:{server.port}")
        try:
            yield refusing, client
        finally:
            await client.close()


async def test_rejected_pod_status_is_sent_again_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="emulated_cluster.kubelet.pods")
    async with server(503, 403, 409, 403) as (refusing, client):
        node = NodeSettings(
            environment={},
            logs=tmp_path,
            images={},
            nameserver=None,
            api_server=("", 0),
            folder=tmp_path,
            memory=tmp_path,
        )
        location = PodLocation(address="10.244.0.2", host_address="10.244.0.1", node=node)
        worker = PodWorker(POD, location, client, asyncio.Semaphore(1))
        running = asyncio.create_task(worker.run())

        await until(lambda: refusing.taken == ["PATCH"])
        worker.forget()
        await running
    (told,) = caplog.messages
    assert "403 unable to create new content" in told


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_retry_limit_counts_rejections_but_no_outage() -> None:
    clock = Clock()
    retries = Retries(clock)
    refused, away = ApiError(403, "no"), ApiError(0, "away")
    clock.now_s += 100.0
    retries.check(away)
    retries.check(refused)
    clock.now_s += 59.0
    retries.check(refused)
    retries.check(away)
    clock.now_s += 59.0
    retries.check(refused)
    clock.now_s += 61.0
    retries.check(away)
    retries.check(refused)
    clock.now_s += 61.0
    with pytest.raises(ApiError, match="403 no"):
        retries.check(refused)


async def test_rejected_container_request_is_reported_as_config_error() -> None:
    async with server(403) as (_, client):
        with pytest.raises(ContainerConfigError, match="403 unable to create new content"):
            await persistently(client, "POST", "/api/v1/namespaces/team/serviceaccounts/default/token", body={})
