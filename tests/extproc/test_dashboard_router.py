"""Tests that the dashboard of a running router shows sources that do not answer."""

import asyncio
import json
from pathlib import Path

import aiohttp

from dualmap_extproc.store.contract import Failure, StoreError
from dualmap_extproc.store.memory import MemoryStore
from extproc.exchanges import Clock, Joined
from extproc.router_processes import WAIT_S, running, write_pool
from redis_server import redis_server
from waiting import until


async def test_dashboard_reports_a_hung_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as redis:
        async with (
            running(write_pool(tmp_path / "pool.yaml"), options=("--redis", redis.unix_url)) as served,
            aiohttp.ClientSession() as session,
        ):

            async def is_up() -> bool:
                return b"dualmap_store_up 1.0" in await served.get("/metrics")

            await until(is_up)
            async with session.get(f"http://{served.metrics}/events") as events, asyncio.timeout(WAIT_S):
                await said(events, without="Redis has been unreachable for")
                redis.pause()
                try:
                    await said(events, with_="Redis has been unreachable for")
                finally:
                    redis.resume()
                await said(events, without="Redis has been unreachable for")


async def said(events: aiohttp.ClientResponse, *, with_: str = "", without: str = "\n") -> None:
    """Wait for a snapshot with problems that contain some texts and lack other texts."""
    async for line in events.content:
        if line.startswith(b"data: "):
            problems = json.loads(line.removeprefix(b"data: "))["pool"]["verdict"]["problems"]
            text = " ".join(problem["text"] for problem in problems)
            if with_ in text and without not in text:
                return
    raise AssertionError("the stream ended")


async def test_exchange_counts_the_time_since_the_store_was_lost() -> None:
    class Away(MemoryStore):
        async def read(self, peer, questions):
            raise StoreError(Failure.TIMEOUT, "away")

    clock = Clock()
    exchange = Joined("one", Away(clock), clock).exchange
    assert exchange.lost_for_s is None
    await exchange.exchange()
    clock.now += 5.0
    await exchange.exchange()
    assert exchange.lost_for_s == 5.0
