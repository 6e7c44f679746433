"""Waiting for what another process does: asked again and again, within a bound, with a reason when it is not met."""

import asyncio
from collections.abc import Awaitable, Callable

POLL_S = 0.02


async def until(check: Callable[[], Awaitable[bool]], what: str, *, timeout_s: float = 10.0) -> None:
    """Return once ``check`` says so; fails naming ``what`` was waited for."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        if await check():
            return
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(POLL_S)
