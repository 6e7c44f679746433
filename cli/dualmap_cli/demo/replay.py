"""Open-loop load: every request leaves at its arrival time, without waiting for earlier requests, like real traffic.

The load generator shares the cores with the engines, the router and Envoy, so it uses little CPU time. The load
generator measures its own delay as ``sent_s`` minus ``due_s``. TTFT ends at the first chunk of the response body,
because vLLM sends the headers earlier. Envoy and the router measure TTFT in the same way.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp

from dualmap_cli.demo.predictions import Prediction, read_prediction
from dualmap_extproc.names import DECISION_HEADER
from dualmap_sim.workloads.text import prompt_text
from dualmap_sim.workloads.trace import Trace, TraceRequest

DONE_EVENT: Final = b"data: [DONE]"
_TAIL_BYTES: Final = 4096
"""Bytes kept from the end of each response: enough for the usage event and the following [DONE]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one request, with times in wall-clock seconds since the replay began.

    ``error`` is None for a complete stream with status 200. ``first_byte_s`` is None without a response body.
    """

    due_s: float
    sent_s: float
    first_byte_s: float | None
    finished_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prediction: Prediction | None = None
    error: str | None = None


async def replay(
    url: str, model: str, trace: Trace, *, deadline_s: float, finished: Callable[[], None]
) -> tuple[Outcome, ...]:
    """Send ``trace`` to the chat completions of ``url`` at its arrival times and return one outcome per request.

    ``deadline_s`` limits the duration of each request. The replay calls ``finished`` at the end of each request.
    """
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        sender = _Sender(session, f"{url}/v1/chat/completions", model, trace, loop.time())
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request in trace.requests:
                await asyncio.sleep(sender.began + request.arrival_s - loop.time())
                task = group.create_task(sender.send(request))
                task.add_done_callback(lambda _: finished())
                tasks.append(task)
    return tuple(task.result() for task in tasks)


class _Sender:
    """Sends the requests of one replay."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, trace: Trace, began: float) -> None:
        self.began = began
        self._session = session
        self._url = url
        self._model = model
        self._block_tokens = trace.block_tokens
        self._clock = asyncio.get_running_loop().time

    async def send(self, request: TraceRequest) -> Outcome:
        body = chat_body(request, model=self._model, block_tokens=self._block_tokens)
        headers = {"content-type": "application/json"}
        sent_s = self._now_s()
        first_byte_s: float | None = None
        tail = b""
        prediction: Prediction | None = None
        error: str | None = None
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                prediction = read_prediction(response.headers.get(DECISION_HEADER, ""))
                async for chunk in response.content.iter_any():
                    if first_byte_s is None:
                        first_byte_s = self._now_s()
                    tail = (tail + chunk)[-_TAIL_BYTES:]
                if response.status != 200:
                    error = f"status {response.status}"
                elif DONE_EVENT not in tail:
                    error = "stream cut short"
        except TimeoutError:
            error = "deadline passed"
        except aiohttp.ClientError as problem:
            error = type(problem).__name__
        prompt_tokens, cached_tokens = read_usage(tail)
        return Outcome(
            due_s=request.arrival_s,
            sent_s=sent_s,
            first_byte_s=first_byte_s,
            finished_s=self._now_s(),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            prediction=prediction,
            error=error,
        )

    def _now_s(self) -> float:
        return self._clock() - self.began


def chat_body(request: TraceRequest, *, model: str, block_tokens: int) -> bytes:
    """Return the body of a streamed chat completion request whose last event reports the usage."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt_text(request, block_tokens=block_tokens)}],
        "max_tokens": request.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def read_usage(tail: bytes) -> tuple[int, int]:
    """Return (prompt tokens, cached tokens) from the end of an event stream, zeros without a usage event."""
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data: {") and b'"usage"' in line:
            usage = json.loads(line.removeprefix(b"data: ")).get("usage")
            if usage:
                details = usage.get("prompt_tokens_details") or {}
                return usage["prompt_tokens"], details.get("cached_tokens") or 0
    return 0, 0
