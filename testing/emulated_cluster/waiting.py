"""Waits for another process: polls a condition until it holds, up to a limit, with a reason on failure."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

_POLL_S: Final = 0.02


async def until(check: Callable[[], Awaitable[bool]], what: str, *, timeout_s: float = 10.0) -> None:
    """Return once ``check`` returns True; raise AssertionError that names ``what`` after ``timeout_s``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not await check():
        assert loop.time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(_POLL_S)
