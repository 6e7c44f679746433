"""Waits for a condition in a server or another task that has no event."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

WAIT_S = 60.0


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until ``holds`` returns True; raise TimeoutError after a long time."""
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = holds()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(0.01)
