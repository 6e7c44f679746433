"""A scripted engine with the test's answers. Its responses report the digest of the received body."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from aiohttp import web

from ports import reserved_port
from web_server import WebServer

BODY_LIMIT = 1 << 30
DIGEST_HEADER = "x-request-sha256"
ENGINE_HEADER = "x-engine"
DISCOVERY_AGENT = "dualmap-router"
# The key of a request body's digest, which the response's header reports.
_SHA256 = web.RequestKey("sha256", str)


@dataclass(slots=True, kw_only=True)
class Received:
    """One request that the upstream received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


Answer = Callable[[web.Request, Received], Awaitable[web.StreamResponse]]


async def plain(request: web.Request, received: Received) -> web.StreamResponse:
    """Answer a request without streaming like an engine."""
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    return web.json_response({"object": "chat.completion", "choices": [], "usage": usage})


def sse(events: list[bytes], *, first_after: asyncio.Event | None = None, then: asyncio.Event | None = None) -> Answer:
    """Return an answer with these events: the first event after ``first_after``, the other events after ``then``."""

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index, event in enumerate(events):
            gate = first_after if index == 0 else then
            if gate is not None:
                await gate.wait()
            await response.write(event)
        await response.write_eof()
        return response

    return answer


@dataclass(slots=True, kw_only=True)
class Upstream:
    """One scripted upstream on a loopback port; ``endpoint`` is its address in a destination list."""

    name: str
    host: str = "127.0.0.1"
    answer: Answer = plain
    received: list[Received] = field(default_factory=list)
    aborted: int = 0
    port: int = 0
    _server: WebServer | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen on ``port``, or on a reserved port for 0."""
        app = web.Application(client_max_size=BODY_LIMIT)
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.on_response_prepare.append(self._sign)
        self.port = self.port or reserved_port(self.host)
        self._server = WebServer(app, host=self.host, port=self.port, shutdown_timeout=1.0)
        await self._server.start()

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("user-agent") == DISCOVERY_AGENT:
            # The router's own requests are no traffic of the test, and a scripted engine has nothing to say.
            raise web.HTTPNotFound
        received = Received(
            method=request.method, path=request.path_qs, headers=dict(request.headers), body=await request.read()
        )
        received.headers = {key.lower(): value for key, value in received.headers.items()}
        self.received.append(received)
        request[_SHA256] = received.sha256
        try:
            return await self.answer(request, received)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers[ENGINE_HEADER] = self.name
        if _SHA256 in request:
            response.headers[DIGEST_HEADER] = request[_SHA256]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()
