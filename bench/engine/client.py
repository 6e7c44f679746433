"""Requests streamed completions from a real engine and records the time of each token, for ``record.py``."""

import asyncio
import json
import time
from types import TracebackType
from typing import Any, Self

import aiohttp
from bench.engine.recording import Seen
from bench.engine.scenarios import Ask, token_ids

TIMEOUT_S = 120.0


class EngineError(Exception):
    """The engine's answer is not in vLLM's format; the message contains the answer."""


class Client:
    """An OpenAI client for prompts of token ids. Use it as an async context manager."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._model = ""

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=aiohttp.TCPConnector(limit=0)
        )
        try:
            self._model = (await self.get("/v1/models"))["data"][0]["id"]
        except EngineError:
            await self._http.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def get(self, path: str) -> dict[str, Any]:
        """Return a JSON answer. Raises EngineError."""
        try:
            async with self._http.get(self._url + path) as response:
                response.raise_for_status()
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(f"GET {self._url}{path}: {error} ({type(error).__name__})") from error

    async def line(self, path: str, beginning: str) -> str:
        """Return the first line of a page that begins with ``beginning``. Raises EngineError."""
        async with self._http.get(self._url + path) as response:
            for line in (await response.text()).splitlines():
                if line.startswith(beginning):
                    return line
        raise EngineError(f"GET {self._url}{path}: the answer has no line that begins with {beginning!r}")

    async def wave(self, asks: tuple[Ask, ...], *, number: int, began_s: float) -> list[Seen]:
        """Send the requests of one wave, each at its time, and return them after all have ended.

        Recorded times count from ``began_s``, a value of ``time.monotonic``. Raises EngineError.
        """
        bodies = [(ask, self._body(ask)) for ask in asks]
        now_s = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._ask(ask, body, at_s=now_s + ask.after_s, wave=number, began_s=began_s))
                    for ask, body in bodies
                ]
        except ExceptionGroup as errors:
            # One failure ends the recording. The engine's own failures become an EngineError; other errors are raised
            # unchanged.
            first = errors.exceptions[0]
            if not isinstance(first, EngineError | aiohttp.ClientError | TimeoutError):
                raise
            raise EngineError(f"POST {self._url}/v1/completions: {first!s} ({type(first).__name__})") from errors
        return [task.result() for task in tasks]

    def _body(self, ask: Ask) -> bytes:
        return json.dumps(
            {
                "model": self._model,
                "prompt": token_ids(ask.pieces),
                "max_tokens": ask.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                # The usage in every chunk shows how many tokens the chunk contains.
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        ).encode()

    async def _ask(self, ask: Ask, body: bytes, *, at_s: float, wave: int, began_s: float) -> Seen:
        await asyncio.sleep(at_s - time.monotonic())
        sent_s = time.monotonic()
        token_s: list[float] = []
        usage: dict[str, Any] = {}
        headers = {"content-type": "application/json"}
        async with self._http.post(f"{self._url}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                raise EngineError(f"status {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now_s = time.monotonic()
                    usage = json.loads(line[6:])["usage"]
                    token_s += [now_s - began_s] * (usage["completion_tokens"] - len(token_s))
        if len(token_s) != ask.output_tokens:
            raise EngineError(f"the engine returned {len(token_s)} output tokens instead of {ask.output_tokens}")
        details = usage.get("prompt_tokens_details")
        if details is None:
            raise EngineError(
                "the engine does not report cached tokens; start vLLM with --enable-prompt-tokens-details"
            )
        return Seen(
            pieces=ask.pieces,
            cached_tokens=details.get("cached_tokens") or 0,
            sent_s=sent_s - began_s,
            token_s=tuple(token_s),
            setup=ask.setup,
            wave=wave,
        )
