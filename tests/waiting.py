"""Waiting for what will become true in a server or another task, where there is no event to wait for."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

WAIT_S = 60.0


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return once ``holds`` does; TimeoutError after a time in which it surely should have."""
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = holds()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(0.01)
