"""A wait for a coroutine or a stop event; ``control`` and ``process`` use it."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finished_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work`` until it is complete or ``stop`` is set; return whether ``work`` is complete."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
