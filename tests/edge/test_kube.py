"""Tests of the Kubernetes API client with a small aiohttp server and scripted responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dualmap_edge.kube.client import KubeClient, KubeConfigError, KubeError, Page, WatchEvent, pages
from web_server import WebServer

PODS = "/api/v1/namespaces/llm/pods"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """An API server that answers with ``handler``; ``kubeconfig`` points to it."""

    def __init__(self, folder: Path) -> None:
        self.handler: Handler | None = None
        self.requests: list[web.Request] = []
        self.kubeconfig = folder / "kubeconfig"
        self._server = WebServer(self._application())

    def _application(self) -> web.Application:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        return application

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        assert self.handler is not None
        return await self.handler(request)

    async def start(self) -> None:
        await self._server.start()
        self.port = self._server.port
        self.write_kubeconfig()

    def write_kubeconfig(self, **user: str) -> None:
        write_kubeconfig(self.kubeconfig, f"http://127.0.0.1:{self.port}", **user)

    async def stop(self) -> None:
        await self._server.stop()


def write_kubeconfig(path: Path, server: str, **user: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": user}],
    }
    path.write_text(json.dumps(config))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[KubeClient]:
    client = await KubeClient.connect(server.kubeconfig)
    yield client
    await client.close()


def answering(status: int, document: object, **headers: str) -> Handler:
    async def answer(_request: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(document, status=status, headers=named)

    return answer


def streaming(*pieces: bytes, then: asyncio.Event | None = None, cut: bool = False) -> Handler:
    """Answer with these pieces in separate writes, then wait for ``then``; ``cut`` aborts the response."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if then is not None:
            await then.wait()
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


def line(kind: str, /, **value: object) -> bytes:
    return json.dumps({"type": kind, "object": value}).encode() + b"\n"


async def watched(client: KubeClient, **options: float) -> list[WatchEvent]:
    async with aclosing(client.watch(PODS, query=[("resourceVersion", "5")], **options)) as events:
        return [event async for event in events]


async def test_kube_client_request_has_query_body_and_content_type(server: Server, client: KubeClient) -> None:
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.method, request.path, dict(request.query), request.content_type, await request.json()))
        return web.json_response({"kind": "Pod"})

    server.handler = answer
    answered = await client.request(
        "PATCH",
        PODS,
        query=[("labelSelector", "app in (a,b),!c"), ("force", "true")],
        body={"a": 1},
        content_type="application/apply-patch+yaml",
    )
    assert answered == {"kind": "Pod"}
    query = {"labelSelector": "app in (a,b),!c", "force": "true"}
    assert seen == [("PATCH", PODS, query, "application/apply-patch+yaml", {"a": 1})]


async def test_kube_client_json_patch_has_its_content_type(server: Server, client: KubeClient) -> None:
    server.handler = answering(200, {})
    await client.request("PATCH", PODS, body=[{"op": "test"}], content_type="application/json-patch+json")
    assert server.requests[0].content_type == "application/json-patch+json"


@pytest.mark.parametrize(
    ("status", "document", "reason", "message"),
    [
        (409, {"kind": "Status", "reason": "Conflict", "message": "it was changed"}, "Conflict", "it was changed"),
        (500, ["no", "status"], "", '["no", "status"]'),
        (404, {}, "", "no message"),
    ],
)
async def test_kube_client_error_has_status_and_message(
    server: Server, client: KubeClient, status: int, document: object, reason: str, message: str
) -> None:
    server.handler = answering(status, document)
    with pytest.raises(KubeError) as caught:
        await client.request("GET", PODS)
    error = caught.value
    assert (error.status, error.reason, error.message, error.expired) == (status, reason, message, False)
    assert str(error) == f"{status} {message}"


async def test_kube_client_missing_kind_gives_a_clear_error(server: Server, client: KubeClient) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=404, text="404 page not found\n")

    server.handler = answer
    with pytest.raises(KubeError, match=r"^404 the API server does not serve this kind; is its CRD installed\?$"):
        await client.request("GET", PODS)


@pytest.mark.parametrize(("header", "wait_s"), [("7", 7.0), ("Wed, 21 Oct 2015 07:28:00 GMT", None)])
async def test_kube_client_error_has_retry_after(
    server: Server, client: KubeClient, header: str, wait_s: float | None
) -> None:
    server.handler = answering(429, {"message": "too many"}, Retry_After=header)
    with pytest.raises(KubeError) as caught:
        await client.request("GET", PODS)
    assert caught.value.retry_after_s == wait_s


async def test_kube_client_rejects_a_response_that_is_no_object(server: Server, client: KubeClient) -> None:
    for body in (b"<html>a proxy's page", b"[]"):

        async def answer(_request: web.Request, body: bytes = body) -> web.Response:
            return web.Response(body=body)

        server.handler = answer
        with pytest.raises(KubeError, match="JSON"):
            await client.request("GET", PODS)


async def test_kube_client_separates_unreachable_server_from_api_error(server: Server, client: KubeClient) -> None:
    never = asyncio.Event()
    server.handler = streaming(then=never)
    with pytest.raises(KubeError, match=r"did not answer within 0\.05 s") as caught:
        await client.request("GET", PODS, timeout_s=0.05)
    assert caught.value.status == 0
    never.set()
    await server.stop()
    for attempt in (client.request("GET", PODS), watched(client)):
        with pytest.raises(KubeError, match="cannot be reached") as unreached:
            await attempt
        assert unreached.value.status == 0


async def test_watch_yields_events_and_bookmarks_until_its_end(server: Server, client: KubeClient) -> None:
    pieces = [line("ADDED", a=1)[:7], line("ADDED", a=1)[7:] + line("MODIFIED", a=2) + b'{"ty', line("BOOKMARK")[4:]]
    server.handler = streaming(*pieces)
    events = await watched(client, timeout_s=44.6)
    assert events == [WatchEvent("ADDED", {"a": 1}), WatchEvent("MODIFIED", {"a": 2}), WatchEvent("BOOKMARK", {})]
    query = dict(server.requests[0].query)
    assert query == {"resourceVersion": "5", "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "45"}


async def test_watch_reads_an_event_of_several_megabytes(server: Server, client: KubeClient) -> None:
    text = "x" * (5 * 1024 * 1024)
    server.handler = streaming(line("ADDED", text=text) + line("DELETED"))
    events = await watched(client)
    assert [event.type for event in events] == ["ADDED", "DELETED"]
    assert events[0].object["text"] == text


async def test_watch_detects_expired_version_by_status_and_event(server: Server, client: KubeClient) -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    for handler in (answering(410, gone), streaming(line("ERROR", **gone))):
        server.handler = handler
        with pytest.raises(KubeError, match="410 too old") as caught:
            await watched(client)
        assert caught.value.expired
        assert caught.value.reason == "Expired"


async def test_list_is_read_in_pages_with_its_version(server: Server, client: KubeClient) -> None:
    async def answer(request: web.Request) -> web.Response:
        rest = request.query.get("continue", "")
        metadata = {"resourceVersion": f"1{rest}", **({} if rest else {"continue": "7"})}
        return web.json_response({"metadata": metadata, "items": [{"page": rest}, "no object"] if rest else None})

    server.handler = answer
    listed = [page async for page in pages(client, PODS, query=[("labelSelector", "app=vllm")])]

    assert listed == [Page(objects=[], version="1"), Page(objects=[{"page": "7"}], version="17")]
    first, second = (dict(request.query) for request in server.requests)
    assert first == {"labelSelector": "app=vllm", "limit": "250"}
    assert second == {**first, "continue": "7"}


@pytest.mark.parametrize("answer", [{}, {"metadata": None, "items": []}, {"metadata": {"resourceVersion": 5}}])
async def test_list_response_that_is_no_list_raises_an_error(
    server: Server, client: KubeClient, answer: object
) -> None:
    server.handler = answering(200, answer)
    with pytest.raises(KubeError, match="list has no resourceVersion") as caught:
        _ = [page async for page in pages(client, PODS)]
    assert caught.value.status == 0


async def breaks_off_after_what_came(client: KubeClient, words: str, **options: float) -> None:
    events = []
    with pytest.raises(KubeError, match=words) as caught:  # noqa: PT012  # what came before counts too
        async with aclosing(client.watch(PODS, **options)) as watch:
            async for event in watch:
                events.append(event)
    assert [event.type for event in events] == ["ADDED"]
    assert caught.value.status == 0


async def test_watch_yields_events_then_raises_an_error_at_silence(server: Server, client: KubeClient) -> None:
    never = asyncio.Event()
    server.handler = streaming(line("ADDED", a=1), then=never)
    await breaks_off_after_what_came(client, "sent no data and did not end in time", inactivity_s=0.5)
    never.set()


async def test_watch_without_response_raises_an_error(server: Server, client: KubeClient) -> None:
    never = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    server.handler = answer
    with pytest.raises(KubeError, match="did not answer"):
        await watched(client, inactivity_s=0.05)
    never.set()


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (streaming(line("ADDED", a=1), cut=True), "cannot be reached"),
        (streaming(line("ADDED", a=1), b'{"type": "ADD'), "in the middle of an event"),
        (streaming(line("ADDED", a=1), b"]garbage[\n"), "not JSON"),
        (streaming(line("ADDED", a=1), b'{"type": 3}\n'), "invalid event"),
    ],
)
async def test_watch_yields_events_then_raises_an_error_at_disconnect(
    server: Server, client: KubeClient, handler: Handler, words: str
) -> None:
    server.handler = handler
    await breaks_off_after_what_came(client, words)


async def test_rejected_token_is_read_again_from_its_file(server: Server) -> None:
    async def answer(request: web.Request) -> web.Response:
        known = request.headers.get("Authorization") == "Bearer new"
        return web.json_response({"message": "" if known else "who are you"}, status=200 if known else 401)

    server.handler = answer
    server.write_kubeconfig(token="old")
    client = await KubeClient.connect(server.kubeconfig)
    with pytest.raises(KubeError, match="who are you"):
        await client.request("GET", PODS)
    assert len(server.requests) == 1
    server.write_kubeconfig(token="new")
    await client.request("GET", PODS)
    assert [request.headers["Authorization"] for request in server.requests[1:]] == ["Bearer old", "Bearer new"]
    await client.close()


async def test_unusable_kubeconfig_is_named_in_the_error(tmp_path: Path) -> None:
    missing, broken = tmp_path / "missing", tmp_path / "broken"
    broken.write_text("- no\n- mapping")
    for path, words in ((missing, "does not exist"), (broken, "is invalid")):
        with pytest.raises(KubeConfigError, match=words) as caught:
            await KubeClient.connect(path)
        assert str(path) in str(caught.value)


async def test_login_outside_a_pod_without_kubeconfig_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubernetes.aio import config

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / ".kube" / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(KubeConfigError, match="set KUBECONFIG to a kubeconfig, or run in a pod"):
        await KubeClient.connect()
