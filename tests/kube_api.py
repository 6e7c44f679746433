"""A small Kubernetes API for tests: lists and watches of the test's objects, with all kinds of failures.

The API supports the features that clients need: resource versions, pages, equality selectors, events since a version,
bookmarks, and 410 for expired versions. Tests with the real API server are in e2e/controlplane.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from ports import reserved_port
from web_server import WebServer

Body = dict[str, Any]


class KubeApi:
    """The server, with its address in ``kubeconfig``. A restarted server has the same port."""

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.lists: list[str] = []
        """The paths and selectors of the list requests."""
        self.watches: list[str] = []
        """The paths and selectors of the watch requests."""
        self.watched_from: list[int] = []
        """The start versions of the watches."""
        self.refuse_with: int | None = None
        self.refuse_watches_with: int | None = None
        self.refuse: dict[str, int] = {}
        """The status with which requests for a collection, or for a path, are refused."""
        self._objects: dict[tuple[str, str, str], Body] = {}
        self._events: list[tuple[int, str, Body]] = []
        self._version = itertools.count(100)
        self._now = next(self._version)
        self._forgotten = 0
        self._changed = asyncio.Condition()
        self._open: list[web.Request] = []
        self._silent: list[web.Request] = []
        self._may_list = asyncio.Event()
        self._may_list.set()
        self._server: WebServer | None = None
        self._port = reserved_port()

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", self._get)
        self._server = WebServer(application, port=self._port, shutdown_timeout=0.01)
        await self._server.start()
        write_kubeconfig(self.kubeconfig, f"http://127.0.0.1:{self._port}")

    async def stop(self) -> None:
        self.cut_watches()
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def put(self, body: Body) -> None:
        """Create an object, or replace the object of the same name."""
        await self._store("PUT", body)

    async def delete(self, body: Body) -> None:
        await self._store("DELETED", body)

    async def bookmark(self) -> None:
        async with self._changed:
            self._now = next(self._version)
            self._events.append((self._now, "BOOKMARK", {"metadata": {"resourceVersion": str(self._now)}}))
            self._changed.notify_all()

    async def forget(self) -> None:
        """Drop all events, so that requests with older versions get 410."""
        self._now = next(self._version)
        self._forgotten = self._now
        self._events.clear()

    def cut_watches(self) -> None:
        """Break every open watch's connection."""
        for request in self._open:
            if request.transport is not None:
                request.transport.abort()

    def fall_silent(self) -> None:
        """Send no more data on the open watches, and keep them open; new watches work."""
        self._silent += self._open

    def hold_lists(self) -> None:
        self._may_list.clear()

    def answer_lists(self) -> None:
        self._may_list.set()

    @property
    def version(self) -> int:
        return self._now

    @property
    def open_watches(self) -> int:
        return len(self._open)

    def _is_past(self, version: int) -> bool:
        return self._now > version

    async def _store(self, kind: str, body: Body) -> None:
        body = deepcopy(body)
        async with self._changed:
            self._now = next(self._version)
            body["metadata"]["resourceVersion"] = str(self._now)
            key = (_collection(body), body["metadata"]["namespace"], body["metadata"]["name"])
            if kind == "DELETED":
                self._objects.pop(key, None)
            else:
                kind = "MODIFIED" if key in self._objects else "ADDED"
                self._objects[key] = body
            self._events.append((self._now, kind, body))
            self._changed.notify_all()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") == "true"
        asked = f"{request.path}?{request.query.get('labelSelector', '')}".removesuffix("?")
        (self.watches if watch else self.lists).append(asked)
        status = self.refuse_with or (self.refuse_watches_with if watch else None)
        status = status or self.refuse.get(request.path.rpartition("/")[2]) or self.refuse.get(request.path)
        if status is not None:
            verb, resource = "watch" if watch else "list", request.path.rpartition("/")[2]
            message = f'{resource} is forbidden: User "me" cannot {verb} resource "{resource}"'
            return web.json_response({"kind": "Status", "message": message}, status=status)
        wanted = _wanted(request)
        return await self._watch(request, wanted) if watch else await self._list(request, wanted)

    async def _list(self, request: web.Request, wanted: Callable[[Body], bool]) -> web.Response:
        await self._may_list.wait()
        found = [body for _, body in sorted(self._objects.items()) if wanted(body)]
        begin, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "500"))
        metadata = {"resourceVersion": str(self._now)}
        if begin + limit < len(found):
            metadata["continue"] = str(begin + limit)
        # Items of a list have no kind and no apiVersion, as in the real API.
        items = [
            {key: value for key, value in body.items() if key not in ("kind", "apiVersion")}
            for body in found[begin : begin + limit]
        ]
        return web.json_response({"metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, wanted: Callable[[Body], bool]) -> web.StreamResponse:
        response = web.StreamResponse()
        seen = int(request.query["resourceVersion"])
        self.watched_from.append(seen)
        await response.prepare(request)
        self._open.append(request)
        try:
            if seen < self._forgotten:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                return response
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    async with self._changed:
                        await self._changed.wait_for(partial(self._is_past, seen))
                        news = [event for event in self._events if event[0] > seen]
                        seen = self._now
                    for _, kind, body in news:
                        if request in self._silent:
                            await asyncio.Event().wait()
                        if kind == "BOOKMARK" or wanted(body):
                            await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")
        except TimeoutError:
            if request in self._silent:
                await asyncio.Event().wait()
            return response
        finally:
            self._open.remove(request)


def write_kubeconfig(path: Path, server: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {}}],
    }
    path.write_text(json.dumps(config))


@asynccontextmanager
async def kube_api(folder: Path) -> AsyncIterator[KubeApi]:
    """Run a KubeApi without objects."""
    api = KubeApi(folder)
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


def pool_body(name: str = "qwen", *, version: int = 1, **fields: Any) -> Body:
    """Return an InferencePool like the operator's.

    ``members`` maps member IDs to changes of their entries, ``created`` is the second of creation, ``selector`` has the
    pods' labels.
    """
    given = {"members": {f"{name}-0": {}, f"{name}-1": {}}, "created": 0, "model": name, "namespace": "llm", **fields}
    ring = [
        {"id": member, "address": address(member), "port": 8000, "state": "Active", "incarnation": "", **changes}
        for member, changes in given["members"].items()
    ]
    ring = [{key: value for key, value in entry.items() if value != ""} for entry in ring]
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {
            "name": name,
            "namespace": given["namespace"],
            "uid": given.get("uid", f"uid-of-{name}"),
            "creationTimestamp": f"2026-11-20T08:00:{given['created']:02}Z",
        },
        "spec": {"model": {"name": given["model"], "aliases": given.get("aliases", [])}, **given.get("spec", {})},
        "status": {
            "selector": given.get("selector", f"serving.dualmap.dev/pool={name}"),
            "ring": {"version": version, "members": ring},
        },
    }


def pod_body(
    name: str, *, ready: bool = True, terminating: bool = False, restarts: int = 0, uid: str = "", **fields: Any
) -> Body:
    """Return a pod of the pool with the name's first part."""
    pool = name.rpartition("-")[0]
    metadata: Body = {
        "name": name,
        "namespace": fields.get("namespace", "llm"),
        "uid": uid or f"{name}-uid",
        "labels": {"serving.dualmap.dev/pool": pool},
    }
    if terminating:
        metadata["deletionTimestamp"] = "2026-11-20T09:00:00Z"
    condition = {"status": "True" if ready else "False", "lastTransitionTime": "2026-11-20T08:30:00Z"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {},
        "status": {
            "phase": "Running",
            "podIP": fields.get("address", address(name)),
            "conditions": [{"type": kind, **condition} for kind in ("ContainersReady", "Ready")],
            "containerStatuses": [{"restartCount": restarts}],
        },
    }


def address(member: str) -> str:
    """Return the address of a member or pod, from the number at the end of its name."""
    return f"10.244.0.{int(member.rpartition('-')[2]) + 1}"


def _collection(body: Body) -> str:
    """Return the path of an object's collection in all namespaces."""
    prefix = "/api" if "/" not in body["apiVersion"] else "/apis"
    return f"{prefix}/{body['apiVersion']}/{body['kind'].lower()}s"


def _wanted(request: web.Request) -> Callable[[Body], bool]:
    """Return whether an object has a request's collection, namespace and labels."""
    before, _, resource = request.path.rpartition("/")
    api, _, namespace = before.partition("/namespaces/")
    collection, name = f"{api}/{resource}", request.query.get("fieldSelector", "").removeprefix("metadata.name=")
    selector = request.query.get("labelSelector", "")
    labels = dict(each.split("=") for each in selector.split(",") if each)

    def wanted(body: Body) -> bool:
        metadata = body["metadata"]
        return (
            _collection(body) == collection
            and namespace in ("", metadata["namespace"])
            and name in ("", metadata["name"])
            and labels.items() <= metadata.get("labels", {}).items()
        )

    return wanted
