"""Servers of KV stores for tests: a conforming stub of LMCache, and real masters of Mooncake (harness/mooncake.py)."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class LmCacheStub:
    """A stub of LMCache 0.5.6: the coordinator's ``/directory/lookup``, and the controller's ``/lookup``.

    Its answers have the shape of the recorded ones (e2e/record_lmcache.py). It validates questions as the coordinator's
    schemas do, and names the chunks' keys by own hashes. The model needs ``world_size`` ranks. ``held`` contains the
    number of leading chunks that each rank has.
    """

    def __init__(self, *, chunk_tokens: int = 256, world_size: int = 1, controller: bool = False) -> None:
        self.chunk_tokens = chunk_tokens
        self.world_size = world_size
        self.held = [0] * world_size
        self.questions: list[dict[str, Any]] = []
        self._controller = controller
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["LmCacheStub"]:
        path, handler = ("/lookup", self._lookup) if self._controller else ("/directory/lookup", self._directory)
        async with serving(web.post(path, handler)) as self.url:
            yield self

    async def _directory(self, request: web.Request) -> web.Response:
        question = await request.json()
        self.questions.append(question)
        ids, model = question.get("token_ids", []), question.get("model_name", "")
        if bool(question.get("keys")) == bool(ids) or not model or question["world_size"] < 1:
            return web.json_response({"detail": "supply exactly one of 'keys' or 'token_ids'"}, status=422)
        results = []
        chunks = len(ids) // self.chunk_tokens
        for number in range(chunks):
            covered = repr(ids[: (number + 1) * self.chunk_tokens]).encode()
            for rank in range(question["world_size"]):
                key = {
                    "model_name": model,
                    "kv_rank": rank,
                    "chunk_hash_hex": hashlib.sha256(covered).hexdigest(),
                    "object_group_id": 0,
                    "cache_salt": question.get("cache_salt", ""),
                }
                placement = {"instance_id": "mp-1", "tier": "l1", "backend": "dram", "size_bytes": 1, "shared": False}
                has = rank < len(self.held) and number < self.held[rank]
                results.append(
                    {
                        "key": key,
                        "placements": [{**placement, "incarnation": 1}] if has else [],
                        "token_ids": ids[number * self.chunk_tokens : (number + 1) * self.chunk_tokens] if has else [],
                        "access_count": 0,
                    }
                )
        return web.json_response({"chunks": chunks, "results": results})

    async def _lookup(self, request: web.Request) -> web.Response:
        question = await request.json()
        self.questions.append(question)
        end = min(self.held[0], len(question["tokens"]) // self.chunk_tokens) * self.chunk_tokens
        layout = {"lmcache_default_instance": ["LocalCPUBackend", end]} if end else {}
        return web.json_response({"event_id": "Lookup-1", "layout_info": layout})


@asynccontextmanager
async def serving(*routes: web.RouteDef) -> AsyncIterator[str]:
    """Serve some routes on a free port of 127.0.0.1; yield the URL."""
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def mooncake_answer(held: dict[str, list[str]], keys: list[str]) -> dict[str, Any]:
    """Return the answer of a Mooncake master 0.3.13 about ``keys``; ``held`` are the holders of each key."""
    found = {
        key: {
            "ok": True,
            "error": None,
            "values": [
                {"size_": 64, "buffer_address_": 140498379472896, "protocol_": "tcp", "transport_endpoint_": each}
                for each in held[key]
            ],
            "disk_values": None,
            "local_disk_values": None,
            "nof_values": None,
        }
        if key in held
        else {
            "ok": False,
            "error": "OBJECT_NOT_FOUND",
            "values": None,
            "disk_values": None,
            "local_disk_values": None,
            "nof_values": None,
        }
        for key in keys
    }
    return {"success": True, "data": found}
