"""Tests of the emulated cluster's API client and of its list-watch loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from emulated_cluster.api.client import ApiClient, ApiError
from emulated_cluster.api.follow import Mirror, follow
from emulated_cluster.control_plane.kubeconfigs import write_for_token
from kube_api import KubeApi, kube_api
from waiting import until
from web_server import WebServer

PODS = "/api/v1/namespaces/team/pods"


def pod(name: str, **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}}


@asynccontextmanager
async def answering(answer: web.Response, seen: list[web.Request]) -> AsyncIterator[str]:
    """A server that answers one request with a fixed response."""

    async def handle(request: web.Request) -> web.Response:
        seen.append(request)
        return answer

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    async with WebServer(application) as server:
        yield f"http://127.0.0.1:{server.port}"


@asynccontextmanager
async def following(api: KubeApi) -> AsyncIterator[list[Mapping[str, Any]]]:
    """Records the pods after each change that ``follow`` reports, with the latest state last."""
    client = ApiClient.from_kubeconfig(api.kubeconfig)
    states: list[Mapping[str, Any]] = []
    task = asyncio.create_task(follow(client, PODS, Mirror(states.append)))
    try:
        yield states
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await client.close()


async def test_request_with_token_sends_query_body_and_token(tmp_path: Path) -> None:
    seen: list[web.Request] = []
    async with answering(web.json_response({"kind": "Pod"}), seen) as server:
        file = write_for_token(tmp_path / "config", server=server, authority=b"", token="word", namespace="team")
        document = json.loads(file.read_text())
        del document["clusters"][0]["cluster"]["certificate-authority-data"]
        file.write_text(json.dumps(document))
        client = ApiClient.from_kubeconfig(file)

        answer = await client.request("PATCH", PODS, query=[("a", "b c")], content_type="application/x")
        await client.close()

    (request,) = seen
    assert answer == {"kind": "Pod"}
    assert (request.method, request.path, request.query["a"]) == ("PATCH", PODS, "b c")
    assert (request.headers["Authorization"], request.headers["Content-Type"]) == ("Bearer word", "application/x")


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (lambda: web.json_response({"kind": "Status", "message": "not yours"}, status=403), 403, "403 not yours"),
        (lambda: web.Response(text="busy", status=503), 503, "503 busy"),
        (lambda: web.Response(text="no JSON"), 0, "the answer is not a JSON object"),
        (lambda: web.json_response([]), 0, "the answer is not a JSON object"),
    ],
)
async def test_failed_request_raises_error_with_status_and_message(answer: Any, status: int, message: str) -> None:
    async with answering(answer(), []) as server:
        client = ApiClient(server)
        with pytest.raises(ApiError, match=message) as raised:
            await client.request("GET", PODS)
        await client.close()
    assert raised.value.status == status


async def test_request_to_absent_server_raises_error_with_status_0() -> None:
    client = ApiClient("http://127.0.0.1:1")
    with pytest.raises(ApiError, match="cannot be reached") as raised:
        await client.request("GET", PODS)
    await client.close()
    assert raised.value.status == 0


async def test_watch_yields_events_until_an_error_event() -> None:
    big = pod("big", text="x" * 300_000)
    lines = [
        {"type": "ADDED", "object": {**big, "metadata": {**big["metadata"], "resourceVersion": "7"}}},
        {"type": "ERROR", "object": {"code": 410, "message": "too old"}},
    ]
    text = "".join(f"{json.dumps(each)}\n" for each in lines)
    async with answering(web.Response(text=text), []) as server:
        client = ApiClient(server)
        watch = client.watch(PODS)
        event = await anext(watch)
        with pytest.raises(ApiError, match="410 too old") as raised:
            await anext(watch)
        await client.close()
    assert (event.type, event.version) == ("ADDED", "7")
    assert raised.value.expired


async def test_follow_applies_every_change_to_the_store(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        await api.put(pod("a"))
        async with following(api) as states:
            await until(lambda: bool(states))
            await until(lambda: api.open_watches == 1)
            await api.put(pod("b"))
            await until(lambda: states[-1].keys() == {"team/a", "team/b"})
            await api.put(pod("a", colour="red"))
            await until(lambda: states[-1]["team/a"]["metadata"]["labels"] == {"colour": "red"})
            await api.delete(pod("b"))
            await until(lambda: states[-1].keys() == {"team/a"})
        assert len(states) == 4


async def test_follow_lists_again_after_expired_resource_version(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api, following(api) as states:
        await until(lambda: api.open_watches == 1)
        await api.stop()
        await api.put(pod("late"))
        await api.forget()
        await api.start()
        await until(lambda: states[-1].keys() == {"team/late"})
    assert len(api.lists) >= 2


async def test_follow_with_rejected_list_raises_an_error(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.refuse_with = 403
        client = ApiClient.from_kubeconfig(api.kubeconfig)
        with pytest.raises(ApiError, match="403"):
            await follow(client, PODS, Mirror(lambda _: None))
        await client.close()
