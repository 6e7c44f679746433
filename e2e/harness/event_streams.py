"""A check of event streams through a gateway, with any picker and any gateway."""

import asyncio
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from harness.clients import opened
from harness.upstream import Received, Upstream

# No event is `data: 0`, because a JSON scalar as an event crashes Envoy 1.40 in its sse_to_metadata filter.
_EVENTS: Final = [b'data: {"number": %d}\n\n' % number for number in range(4)]


async def check_event_stream(engines: Sequence[Upstream], url: str, body: bytes) -> None:
    """Post ``body`` to ``url``; each event must arrive before the engine sends the next one.

    The headers must arrive before the first event. One of ``engines`` gets the request; their answers change during the
    check.
    """
    gates = [asyncio.Event() for _ in _EVENTS]

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for gate, event in zip(gates, _EVENTS, strict=True):
            await gate.wait()
            await response.write(event)
        return response

    before = [engine.answer for engine in engines]
    for engine in engines:
        engine.answer = answer
    try:
        async with opened(url, body) as response:
            assert response.status == 200
            for gate, event in zip(gates, _EVENTS, strict=True):
                gate.set()
                assert await response.content.readexactly(len(event)) == event
            assert await response.content.read() == b""
    finally:
        for engine, usual in zip(engines, before, strict=True):
            engine.answer = usual
