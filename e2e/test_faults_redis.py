"""Tests of an absent, killed, hung, full, slow, empty or corrupted Redis, under streamed and plain requests.

The tests use the system of ``test_faults_routers``, with two routers that replicate through Redis. No request waits for
Redis, so no fault of Redis may fail a request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import redis

from harness.replicated_system import ReplicatedSystem
from harness.traffic import Traffic, failed
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOST = "Lost shared state"
BACK = "Shared state recovered"
REQUESTS = 40


async def wait_for_store(system: ReplicatedSystem, up: int) -> None:
    for number in range(2):
        await system.replicas.wait_for_metric("dualmap_store_up", up, of=number)


async def wait_for_peers(system: ReplicatedSystem) -> None:
    for number in range(2):
        await system.replicas.wait_for_metric("dualmap_pool_peers", 1, of=number)


def lines(system: ReplicatedSystem, sentence: str) -> list[int]:
    """Return the number of times that each router has logged a message."""
    return [router.output().count(sentence) for router in system.replicas.routers]


@asynccontextmanager
async def without_harm(system: ReplicatedSystem, fault: str) -> AsyncIterator[Traffic]:
    """Run traffic while the context's body breaks and repairs Redis; check that no request fails and the routers
    recover.
    """
    traffic = system.traffic()
    async with traffic.running():
        await wait_for_store(system, 1)
        await traffic.streaming(4)
        incident = traffic.incident()
        yield traffic
        await traffic.flowing(REQUESTS)
        await wait_for_store(system, 1)
        await wait_for_peers(system)
    incident.report(f"Redis {fault}")
    assert failed(incident.everyone) == []
    assert all(each.routed for each in incident.later)


async def lost_and_found(
    system: ReplicatedSystem, fault: str, kind: str, spoil: Callable[[], None], mend: Callable[[], None]
) -> None:
    """Break Redis until both routers have detected the fault and routed requests without Redis, then repair Redis."""
    told = [lines(system, sentence) for sentence in (LOST, BACK)]
    async with without_harm(system, fault) as traffic:
        errors = [await router.metric("dualmap_store_errors_total", kind=kind) for router in system.replicas.routers]
        await asyncio.to_thread(spoil)
        await wait_for_store(system, 0)
        await traffic.flowing(REQUESTS)
        for router, before in zip(system.replicas.routers, errors, strict=True):
            assert await router.metric("dualmap_store_errors_total", kind=kind) > before
        await asyncio.to_thread(mend)
    for sentence, counts in zip((LOST, BACK), told, strict=True):
        assert lines(system, sentence) == [count + 1 for count in counts], "each router logs it once"


async def test_redis_restart_with_empty_database_fails_no_request(system: ReplicatedSystem) -> None:
    await lost_and_found(system, "killed and restarted empty", "connection", system.redis.kill, system.redis.start)


async def test_hung_redis_fails_no_request(system: ReplicatedSystem) -> None:
    await lost_and_found(system, "stopped", "timeout", system.redis.pause, system.redis.resume)


async def test_full_redis_fails_no_request(system: ReplicatedSystem) -> None:
    def limit(memory: str) -> None:
        with system.redis.admin as admin:
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", memory)

    await lost_and_found(system, "full", "full", lambda: limit("1"), lambda: limit("0"))


async def test_missing_redis_at_router_start_fails_no_request(system: ReplicatedSystem) -> None:
    replicas, traffic = system.replicas, system.traffic()
    async with traffic.running():
        await traffic.streaming(4)
        await asyncio.to_thread(system.redis.kill)
        for number in range(2):
            await replicas.end_router(number)
            await replicas.restart_router(number)
            await replicas.in_use(number)
        # Another test covers the restart of a router.
        incident = traffic.incident()
        await wait_for_store(system, 0)
        await asyncio.to_thread(system.redis.start)
        await wait_for_store(system, 1)
        await wait_for_peers(system)
    incident.report("Redis absent when routers start")
    assert failed(incident.everyone) == []
    assert all(each.routed for each in incident.later)


async def test_redis_with_invalid_data_fails_no_request(system: ReplicatedSystem) -> None:
    routers = system.replicas.routers

    def spoil() -> None:
        with system.redis.admin as admin:
            streams = [key for key in admin.scan_iter() if admin.type(key) == b"stream"]
            assert streams, "the routers have written no stream"
            for key in streams:
                admin.delete(key)
                admin.set(key, b"not a stream")

    def add_to_streams() -> bool:
        with system.redis.admin as admin:
            streams = [key for key in admin.scan_iter() if admin.type(key) == b"stream"]
            for key in streams:
                admin.xadd(key, {"n": b"\xff" * 100, b"\x00": b"{}"})
            return bool(streams)

    before = [await router.metric("dualmap_store_unreadable_entries_total") for router in routers]
    async with without_harm(system, "holds junk"):
        await asyncio.to_thread(spoil)
        # After the routers have recreated the Redis streams, the test adds invalid entries to the streams.
        await until(lambda: asyncio.to_thread(add_to_streams), "the routers write streams again")

        async def noticed() -> bool:
            now = [await router.metric("dualmap_store_unreadable_entries_total") for router in routers]
            return all(count > old for count, old in zip(now, before, strict=True))

        await until(noticed, "both routers count unreadable entries", timeout_s=30.0)


async def test_slow_redis_fails_no_request(system: ReplicatedSystem) -> None:
    async def keep_slow(stop: asyncio.Event) -> None:
        """Delay every command by up to 0.3 s until ``stop`` is set."""

        def hold() -> None:
            with contextlib.suppress(redis.RedisError), system.redis.admin as admin:
                admin.client_pause(300, all=True)

        while not stop.is_set():
            await asyncio.to_thread(hold)
            await asyncio.sleep(0.35)

    stop = asyncio.Event()
    async with without_harm(system, "slow") as traffic:
        slowing = asyncio.create_task(keep_slow(stop))
        await traffic.flowing(2 * REQUESTS)
        stop.set()
        await slowing
