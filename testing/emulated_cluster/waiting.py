"""Polls a condition on another process until the condition is true or a time limit is over."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

_POLL_S: Final = 0.02


async def until(check: Callable[[], Awaitable[bool]], what: str, *, timeout_s: float = 60.0) -> None:
    """Return when ``check`` returns True; after ``timeout_s``, raise AssertionError with ``what`` in the message."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not await check():
        assert loop.time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(_POLL_S)
