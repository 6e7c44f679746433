"""The handover of KV between simulated engines: one request to the other engine, which answers after the transfer.

The other engine models the transfer by its duration. A transfer that breaks hands over nothing. An engine hands over
the prompts that it keeps as a prefiller (``kv_transfer.py`` has the messages), and what its prefix cache holds of any
prompt. In the second case, the decode engine gets the other engine's address in ``SOURCE_HEADER``.
"""

import asyncio
from collections.abc import Callable, Sequence
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
CACHE_PATH: Final = "/kv_cache"
SOURCE_HEADER: Final = "x-kv-cache-source-host-port"
_BLOCKS_MAX: Final = 100_000
_CONNECT_S: Final = 5.0


class KvHandover:
    """Both roles of one engine.

    ``release`` frees the memory of a request of the engine model. ``match`` returns how many leading blocks of a prompt
    the engine's prefix cache holds.
    """

    def __init__(
        self,
        settings: KvTransferSettings,
        *,
        speed: float,
        block_tokens: int,
        release: Callable[[str], None],
        match: Callable[[Sequence[int]], int],
    ) -> None:
        self._settings = settings
        self._speed = speed
        self._block_tokens = block_tokens
        self._match = match
        self._kept = KeptPrompts(uuid4().hex, block_tokens=block_tokens, release=release)
        # No engine keeps KV for longer, so a later answer would be of no use.
        timeout = aiohttp.ClientTimeout(total=settings.hold_s, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(timeout=timeout)
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
        await self._transfer(tokens)
        if not self._kept.has(remote):
            raise ApiError(404, "NotFoundError", "this engine no longer keeps these blocks")
        self._forget(remote.request_id)
        return web.json_response({})

    async def hand_over_cached(self, request: web.Request) -> web.StreamResponse:
        """Answer how many leading tokens of a prompt's ``blocks`` the cache holds, when they have been transferred.

        The first ``cached_tokens`` of them are not transferred. Raises ApiError 400.
        """
        fields = openai_api.parse_body(await request.read())
        blocks, cached = fields.get("blocks"), fields.get("cached_tokens")
        if not isinstance(blocks, list) or len(blocks) > _BLOCKS_MAX or not all(type(each) is int for each in blocks):
            raise ApiError(400, openai_api.BAD_REQUEST, "blocks is not a list of integers", param="blocks")
        if type(cached) is not int or cached < 0:
            raise ApiError(
                400, openai_api.BAD_REQUEST, "cached_tokens is not a number of tokens", param="cached_tokens"
            )
        tokens = self._match(blocks) * self._block_tokens
        await self._transfer(max(0, tokens - cached))
        return web.json_response({"tokens": tokens})

    async def pull(self, remote: RemoteKv, tokens: int) -> None:
        """Pull ``tokens`` tokens of another engine's KV. Raises KvNotPulled."""
        host = f"[{remote.host}]" if ":" in remote.host else remote.host
        await self._post(f"http://{host}:{remote.port}{PATH}", {**remote.fields, "tokens": tokens})

    async def pull_cached(self, source: str, blocks: Sequence[int], *, cached_tokens: int) -> int:
        """Pull what the cache of the engine at ``source`` (``ip:port``) holds of a prompt; return the tokens.

        Raises KvNotPulled.
        """
        answer = await self._post(
            f"http://{source}{CACHE_PATH}", {"blocks": list(blocks), "cached_tokens": cached_tokens}
        )
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if type(tokens) is not int or not 0 <= tokens <= len(blocks) * self._block_tokens:
            raise KvNotPulled("the other engine answers something else")
        return tokens

    async def _post(self, url: str, body: dict[str, object]) -> object:
        try:
            async with self._session.post(url, json=body) as response:
                if response.status != 200:
                    raise KvNotPulled(f"status {response.status}")
                answer: object = await response.json()
                return answer
        except TimeoutError as error:
            raise KvNotPulled(f"no answer within {self._settings.hold_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise KvNotPulled(str(error)) from error

    async def _transfer(self, tokens: int) -> None:
        await asyncio.sleep(tokens / self._settings.tokens_per_s / self._speed)

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
