"""What the process kubelet does where the API server refuses: it asks again, and no pod ends of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from controlplane.kubelet.containers import NodeSettings, Place
from controlplane.kubelet.environment import ContainerConfigError
from controlplane.kubelet.pods import FAKE_ANNOTATION, PodWorker
from controlplane.kubelet.volumes import persistently
from dualmap_edge.kube import KubeClient
from kube_api import write_kubeconfig
from waiting import until

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
    """Refuses as many requests as a test says with 403, and then says yes to all of them."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.taken: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        if self.refusals:
            self.refusals -= 1
            return web.json_response(TERMINATED, status=403)
        self.taken.append(request.method)
        said: dict[str, Any] = await request.json()
        return web.json_response({**POD, **said, "metadata": {**POD["metadata"], "resourceVersion": "2"}})


@asynccontextmanager
async def server(folder: Path, *, refusals: int) -> AsyncIterator[tuple[Server, KubeClient]]:
    refusing = Server(refusals)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", refusing.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        write_kubeconfig(folder / "kubeconfig", f"http://127.0.0.1:{runner.addresses[0][1]}")
        client = await KubeClient.connect(folder / "kubeconfig")
        try:
            yield refusing, client
        finally:
            await client.close()
    finally:
        await runner.cleanup()


async def test_a_status_that_is_refused_is_said_again(tmp_path: Path) -> None:
    async with server(tmp_path, refusals=2) as (refusing, client):
        node = NodeSettings(
            environment={},
            logs=tmp_path,
            images={},
            nameserver=None,
            api_server=("", 0),
            folder=tmp_path,
            memory=tmp_path,
        )
        place = Place(address="10.244.0.2", host_address="10.244.0.1", node=node)
        worker = PodWorker(POD, place, client, asyncio.Semaphore(1))
        running = asyncio.create_task(worker.run())

        await until(lambda: refusing.taken == ["PATCH"])
        worker.forget()
        await running


async def test_what_a_container_needs_and_is_refused_is_its_configuration_error(tmp_path: Path) -> None:
    async with server(tmp_path, refusals=1) as (_, client):
        with pytest.raises(ContainerConfigError, match="403 unable to create new content"):
            await persistently(client, "POST", "/api/v1/namespaces/team/serviceaccounts/default/token", body={})
