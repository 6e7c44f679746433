"""A proxy of the sidecar between a client and recorded engines, all in the test's event loop."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from dualmap_edge.logs import OncePerMinute, get_logger
from dualmap_sidecar.continuing import Continuer
from dualmap_sidecar.messages import open_session
from dualmap_sidecar.metrics import SidecarMetrics
from dualmap_sidecar.prefill import Prefillers
from dualmap_sidecar.proxy import Proxy
from dualmap_sidecar.server import Server
from dualmap_sidecar.settings import KvConnector, Limits, Settings
from dualmap_sidecar.targets import read_allowed
from ports import reserved_port

PARAMETERS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "5f0c",
    "remote_block_ids": [[3, 1, 4]],
    "remote_host": "10.0.0.9",
    "remote_port": 5600,
}
Answering = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Received:
    """A request that an engine received."""

    method: str
    path: str
    headers: "aiohttp.typedefs.CIMultiDictProxy[str]"
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document


@dataclass
class RecordedEngine:
    """An HTTP server that keeps the requests that it received, and answers as ``answering`` says.

    ``cancelled`` is set when a client goes away before its answer.
    """

    answering: Answering
    received: list[Received] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    _server: asyncio.Server | None = None
    _web: web.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._web = web.Server(self._handle, handler_cancellation=True, auto_decompress=False, max_field_size=65_536)
        self.port = self.port or reserved_port()
        self._server = await asyncio.get_running_loop().create_server(self._web, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Close the listener and every connection, as the end of a process does."""
        assert self._server is not None
        assert self._web is not None
        self._server.close()
        for protocol in self._web.connections:
            if protocol.transport is not None:
                protocol.transport.abort()
        await self._web.shutdown(0.1)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request._client_max_size = 2**30
        body = await request.read()
        self.received.append(Received(request.method, request.raw_path, request.headers, body))
        self.arrived.set()
        try:
            return await self.answering(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def prefilled(_request: web.BaseRequest) -> web.StreamResponse:
    """Answer as a vLLM that has prefilled a prompt for another engine."""
    return web.json_response({"id": "cmpl-1", "choices": [{"text": "x"}], "kv_transfer_params": PARAMETERS})


async def decoded(_request: web.BaseRequest) -> web.StreamResponse:
    """Answer as an engine that does not stream."""
    return web.json_response({"id": "cmpl-1", "choices": [{"text": " the fox"}]})


async def silent(_request: web.BaseRequest) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


def with_status(status: int, body: bytes = b"{}") -> Answering:
    """Return an answer with this status."""

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"x-from": "prefiller", "Location": "http://127.0.0.1/"})

    return answer


async def cut(request: web.BaseRequest) -> web.StreamResponse:
    """Begin an answer, and close the connection within it."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"id": "cmpl-1"')
    assert request.transport is not None
    request.transport.close()
    return response


class Site:
    """A proxy with its engine and its prefillers."""

    def __init__(self, engine: RecordedEngine, prefillers: Sequence[RecordedEngine]) -> None:
        self.engine = engine
        self.prefillers = prefillers
        self.metrics = SidecarMetrics()
        self.url = ""
        self.server: Server
        self.client: aiohttp.ClientSession

    def naming(self, *numbers: int) -> dict[str, str]:
        """Return the headers that name these prefillers in order, as the router sets them."""
        endpoints = [self.prefillers[number].endpoint for number in numbers]
        return {"x-prefiller-host-port": endpoints[0], "x-dualmap-prefillers": ",".join(endpoints)}

    async def complete(self, headers: dict[str, str], **body: Any) -> aiohttp.ClientResponse:
        """Send a completion and read its answer."""
        document = {"model": "qwen", "prompt": "hello", "max_tokens": 8, **body}
        response = await self.client.post(f"{self.url}/v1/completions", json=document, headers=headers)
        await response.read()
        return response

    def count(self, name: str, **labels: str) -> float:
        """Return the value of a metric."""
        page = self.metrics.render().decode()
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return sum(sample.value for sample in samples if (sample.name, sample.labels) == (name, labels))


@asynccontextmanager
async def site(
    *prefillers: Answering,
    engine: Answering = decoded,
    allow: Sequence[str] = ("127.0.0.0/8",),
    kv_connector: KvConnector = KvConnector.NIXL,
    prefill_timeout_s: float = 30.0,
    limits: Limits | None = None,
    continue_tokens: int | None = None,
) -> AsyncGenerator[Site, None]:
    """Yield a running proxy with one recorded engine, and a prefiller for each of ``prefillers``."""
    limits = limits or Limits()
    made = Site(RecordedEngine(engine), [RecordedEngine(each) for each in prefillers])
    async with AsyncExitStack() as stack:
        for each in (made.engine, *made.prefillers):
            await each.start()
            stack.push_async_callback(each.stop)
        settings = Settings(
            host="127.0.0.1",
            port=0,
            engine="",
            kv_connector=kv_connector,
            prefill_timeout_s=prefill_timeout_s,
            allow=allow,
            limits=limits,
        )
        clock = asyncio.get_running_loop().time
        session = await stack.enter_async_context(open_session(limits))
        proxy = Proxy(
            f"http://{made.engine.endpoint}",
            session,
            Prefillers(session, settings, made.metrics, clock),
            allowed=read_allowed(allow),
            metrics=made.metrics,
            limits=limits,
            continuer=Continuer(session, settings, made.metrics),
            continue_tokens=continue_tokens,
            left_out=OncePerMinute(get_logger("dualmap_sidecar.test"), "Left out", clock),
        )
        made.server = Server(proxy.handle, limits, connections=limits.connections, changed=made.metrics.show_in_flight)
        made.url = f"http://127.0.0.1:{await made.server.start('127.0.0.1', 0)}"
        stack.push_async_callback(made.server.close)
        made.client = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield made
