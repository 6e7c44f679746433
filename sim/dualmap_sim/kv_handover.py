"""The handover of KV between simulated engines: one request to the prefiller, which answers after the transfer.

The prefiller models the transfer by its duration. A transfer that breaks hands over nothing.
``kv_transfer.py`` has the messages.
"""

import asyncio
from collections.abc import Callable
from typing import Final
from uuid import uuid4

import aiohttp
from aiohttp import web

from dualmap_sim import openai_api
from dualmap_sim.engine_requests import EngineRequest
from dualmap_sim.errors import ApiError, KvNotPulled
from dualmap_sim.kv_transfer import KeptPrompts, RemoteKv
from dualmap_sim.server_settings import KvTransferSettings

PATH: Final = "/kv_transfer"
_CONNECT_S: Final = 5.0


class KvHandover:
    """Both roles of one engine. ``release`` frees the memory of a request of the engine model."""

    def __init__(
        self, settings: KvTransferSettings, *, speed: float, block_tokens: int, release: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._speed = speed
        self._kept = KeptPrompts(uuid4().hex, block_tokens=block_tokens, release=release)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S))
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def recomputes(self) -> bool:
        """Whether the engine computes a prompt whose KV it could not pull."""
        return self._settings.recompute

    def keep(self, request: web.Request, work: EngineRequest, answer_id: str) -> dict[str, object]:
        """Keep the KV of an ended request; return the parameters for the decode engine.

        The decode engine reaches this engine at the address at which the request arrived.
        """
        assert request.transport is not None
        host, port = request.transport.get_extra_info("sockname")[:2]
        name = f"{answer_id}-{work.request_id}"
        remote = self._kept.keep(work.request_id, name, work.prompt_tokens, host=host, port=port)
        self._timers[name] = asyncio.get_running_loop().call_later(self._settings.hold_s, self._forget, name)
        return {"do_remote_prefill": True, "do_remote_decode": False, **remote.fields, "tp_size": 1}

    async def hand_over(self, request: web.Request) -> web.StreamResponse:
        """Answer when the KV has been transferred. Raises ApiError 404 if the engine does not keep it."""
        fields = openai_api.parse_body(await request.read())
        remote, tokens = RemoteKv.read(fields), fields.get("tokens")
        if type(tokens) is not int or tokens < 0:
            raise ApiError(400, openai_api.BAD_REQUEST, "tokens is not a number of tokens", param="tokens")
        if not self._kept.has(remote):
            raise ApiError(404, "NotFoundError", "this engine does not keep these blocks")
        await asyncio.sleep(tokens / self._settings.tokens_per_s / self._speed)
        if not self._kept.has(remote):
            raise ApiError(404, "NotFoundError", "this engine no longer keeps these blocks")
        self._forget(remote.request_id)
        return web.json_response({})

    async def pull(self, remote: RemoteKv, tokens: int) -> None:
        """Pull ``tokens`` tokens of another engine's KV. Raises KvNotPulled."""
        host = f"[{remote.host}]" if ":" in remote.host else remote.host
        url = f"http://{host}:{remote.port}{PATH}"
        try:
            async with self._session.post(url, json={**remote.fields, "tokens": tokens}) as response:
                if response.status != 200:
                    raise KvNotPulled(f"status {response.status}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise KvNotPulled(str(error)) from error

    async def close(self) -> None:
        """Close the connections to other engines."""
        for timer in self._timers.values():
            timer.cancel()
        await self._session.close()

    def _forget(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        self._kept.forget(name)
