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

from dualmap_extproc.store.redis import ADDRESSES_KEY, loads_key, reports_key, updates_key
from harness.replicated_system import POOL, ReplicatedSystem
from harness.stack import Router
from harness.traffic import Traffic, failed
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOST = "Lost shared state"
BACK = "Shared state recovered"
REQUESTS = 40
UPDATE_STREAMS = tuple(key(f"llm/{POOL}") for key in (updates_key, loads_key, reports_key))


async def wait_for_store(system: ReplicatedSystem, up: int) -> None:
    for number in range(2):
        await system.replicas.wait_for_metric("dualmap_store_up", up, of=number)


async def wait_for_peers(system: ReplicatedSystem) -> None:
    for number in range(2):
        await system.replicas.wait_for_metric("dualmap_pool_peers", 1, of=number)


async def logged_and_failed(router: Router) -> tuple[float, float, float]:
    """Return how often a router logged the loss and the recovery of Redis, and the number of failed exchanges."""
    failures = await router.metric("dualmap_store_errors_total")
    return router.output().count(LOST), router.output().count(BACK), failures


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
    routers = system.replicas.routers
    await wait_for_store(system, 1)
    before = [await logged_and_failed(router) for router in routers]
    async with without_harm(system, fault) as traffic:
        errors = [await router.metric("dualmap_store_errors_total", kind=kind) for router in routers]
        await asyncio.to_thread(spoil)
        await wait_for_store(system, 0)
        await traffic.flowing(REQUESTS)
        for router, count in zip(routers, errors, strict=True):
            assert await router.metric("dualmap_store_errors_total", kind=kind) > count
        await asyncio.to_thread(mend)
    for router, old in zip(routers, before, strict=True):
        lost, back, failed_exchanges = (
            now - then for now, then in zip(await logged_and_failed(router), old, strict=True)
        )
        # On a busy machine, a router may lose Redis again for a moment.
        assert 1 <= back <= lost < failed_exchanges, "the router logs each loss once"


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
    routers, keys = system.replicas.routers, (*UPDATE_STREAMS, ADDRESSES_KEY)

    def spoil() -> None:
        with system.redis.admin as admin:
            for key in keys:
                admin.set(key, b"not a stream")

    def are_streams() -> bool:
        with system.redis.admin as admin:
            return all(admin.type(key) == b"stream" for key in keys)

    def add_to_streams() -> None:
        with system.redis.admin as admin:
            for key in keys:
                admin.xadd(key, {"n": b"\xff" * 100, b"\x00": b"{}"})

    async def unreadable() -> list[float]:
        return [await router.metric("dualmap_store_unreadable_entries_total") for router in routers]

    async with without_harm(system, "holds junk"):
        await asyncio.to_thread(spoil)
        # Redis appends no entry to a key of another type, so the routers must first replace every such key.
        await until(lambda: asyncio.to_thread(are_streams), "the routers replace all invalid keys")
        before = await unreadable()
        await asyncio.to_thread(add_to_streams)

        async def noticed() -> bool:
            # The routers do not count invalid addresses.
            counted = zip(await unreadable(), before, strict=True)
            return all(count - old >= len(UPDATE_STREAMS) for count, old in counted)

        await until(noticed, "both routers count every unreadable entry")


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
