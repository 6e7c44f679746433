"""Engines with scripted answers on a loopback port."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from dualmap.pools.pool import Member
from web_server import WebServer

HOST = "127.0.0.1"
METRICS = """vllm:num_requests_running 2
vllm:num_requests_waiting 1
vllm:engine_sleep_state{sleep_state="awake"} 1
vllm:cache_config_info{block_size="16",num_gpu_blocks="101"} 1
process_start_time_seconds %s
"""
MODELS = {"data": [{"id": "m", "parent": None, "max_model_len": 4096}, {"id": "sql", "parent": "m"}]}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def hang(_request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    raise AssertionError


@dataclass(slots=True)
class Scripted:
    """An engine with the test's answers by path: text, JSON values or handlers. Other paths are answered with 404."""

    answers: dict[str, str | object]
    asked: list[str] = field(default_factory=list)
    heads: list[Mapping[str, str]] = field(default_factory=list)
    peers: dict[str, set[object]] = field(default_factory=dict)
    at_once: int = 0
    most_at_once: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        self.heads.append(request.headers)
        assert request.transport is not None
        self.peers.setdefault(request.path, set()).add(request.transport.get_extra_info("peername"))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            answer = self.answers.get(request.path)
            if answer is None:
                raise web.HTTPNotFound
            if callable(answer):
                response = await answer(request)
                assert isinstance(response, web.StreamResponse)
                return response
            return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            self.at_once -= 1


def vllm(started_s: float = 100.0, **answers: object) -> Scripted:
    usual = {"/metrics": METRICS % started_s, "/version": {"version": "0.32.0"}, "/v1/models": MODELS}
    return Scripted({**usual, **{f"/{path}": answer for path, answer in answers.items()}})


@asynccontextmanager
async def serving(engine: Scripted) -> AsyncIterator[Member]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    async with WebServer(app, host=HOST) as server:
        yield Member(id="m-0", address=HOST, port=server.port)
