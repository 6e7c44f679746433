"""Tests of routers with crashes, hangs, restarts, different pools or clock jumps, under streamed and plain requests.

The system is two routers behind one Envoy (``ReplicatedSystem``). Most tests use the default message mode. The tests
count the outcomes at the clients; docs/operations.md has the counts.
"""

import asyncio
from pathlib import Path

import pytest

from dualmap_extproc.envoy.config.settings import Mode
from harness.replicated_system import POOL, ReplicatedSystem
from harness.traffic import NEXT_AFTER_S, Incident, Outcome, failed
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOUR_S = 3600.0


def unrouted(incident: Incident) -> int:
    return sum(not each.routed for each in incident.later if each.outcome is Outcome.OK)


async def wait_for_peers(system: ReplicatedSystem, count: int) -> None:
    for number in range(len(system.replicas.routers)):
        await system.replicas.wait_for_metric("dualmap_pool_peers", count, of=number)


async def test_single_router_kill_fails_no_request(system: ReplicatedSystem) -> None:
    traffic, replicas = system.traffic(), system.replicas
    async with traffic.running():
        await traffic.streaming(4)
        incident = traffic.incident()
        await replicas.routers[0].kill()
        await traffic.flowing(60)
        await replicas.wait_for_metric("dualmap_pool_peers", 0, of=1)
        await replicas.restart_router(0)
        await replicas.in_use(0)
    incident.report("one of two routers killed")
    assert len(incident.caught) >= 4
    assert failed(incident.everyone) == []
    assert unrouted(incident) == 0, "the other router picks for every request"
    await wait_for_peers(system, 1)


async def test_kill_of_both_routers_fails_no_request(system: ReplicatedSystem) -> None:
    traffic, replicas = system.traffic(), system.replicas
    async with traffic.running():
        await traffic.streaming(4)
        incident = traffic.incident()
        await asyncio.gather(*(router.kill() for router in replicas.routers))
        await traffic.flowing(40)
        alone = traffic.incident()
        await asyncio.gather(*(replicas.restart_router(number) for number in range(2)))
        await asyncio.gather(*(replicas.in_use(number) for number in range(2)))
    incident.report("both routers killed")
    assert failed(incident.everyone) == []
    assert not any(each.routed for each in alone.caught), "no router was running"


async def test_single_hung_router_fails_no_request(system: ReplicatedSystem) -> None:
    traffic, replicas, clock = system.traffic(), system.replicas, asyncio.get_running_loop().time
    async with traffic.running():
        await traffic.streaming(4)
        incident, paused_s = traffic.incident(), clock()
        replicas.routers[0].pause()
        await traffic.flowing(40)

        async def left_out() -> bool:
            stats = await replicas.envoy.stats(r"^cluster.dualmap-routers.membership_healthy$")
            return sum(stats.values()) == 1

        await until(left_out, "Envoy uses only the other router")
        noticed_after_s = clock() - paused_s
        since = traffic.incident()
        await traffic.flowing(40)
        assert unrouted(since) == 0
        replicas.routers[0].resume()
        await replicas.in_use(0)
    incident.report("one of two routers stopped")
    assert failed(incident.everyone) == []
    # A client whose request hangs at the router sends its next request after NEXT_AFTER_S.
    most = len(incident.caught) * (2 + noticed_after_s / NEXT_AFTER_S)
    assert unrouted(incident) <= most, "only requests sent to it before Envoy noticed"


async def test_rolling_router_restart_fails_no_request(system: ReplicatedSystem) -> None:
    traffic, replicas = system.traffic(), system.replicas
    async with traffic.running():
        await traffic.streaming(4)
        incident = traffic.incident()
        for number in range(2):
            await replicas.end_router(number)
            await replicas.restart_router(number)
            await replicas.in_use(number)
    incident.report("routers restarted in turn")
    assert len(incident.later) >= 40
    assert failed(incident.everyone) == []
    assert unrouted(incident) == 0


async def test_router_kill_in_full_duplex_mode_cuts_only_its_streams(system: ReplicatedSystem, tmp_path: Path) -> None:
    """In FULL_DUPLEX responses pass through the router, so a kill breaks its open responses."""
    async with system.another(Mode.FULL_DUPLEX, tmp_path) as replicas:
        traffic = system.traffic(of=replicas)
        async with traffic.running():
            await traffic.streaming(4)
            restarted = traffic.incident()
            await replicas.end_router(0)
            await replicas.restart_router(0)
            await replicas.in_use(0)
            await traffic.streaming(4)
            killed = traffic.incident()
            await replicas.routers[1].kill()
            await traffic.flowing(40)
            since = traffic.incident()
            await traffic.flowing(40)
        killed.report("full-duplex, one of two killed")
        untouched = set(restarted.everyone) - set(killed.everyone)
        assert len(untouched) >= 12
        assert failed(list(untouched)) == []
        # The failed requests are the killed router's open requests, and requests before Envoy detected the kill.
        assert len(failed(killed.everyone)) <= 2 * len(killed.caught)
        assert failed(since.later) == []
        await replicas.wait_for_rest()


async def test_routers_with_different_pool_versions_fail_no_request(system: ReplicatedSystem) -> None:
    traffic, replicas = system.traffic(), system.replicas
    fewer, everyone = system.document(*system.engines[:2], version=2), system.document(*system.engines, version=3)

    async def has_members(number: int, count: int) -> bool:
        return len(await replicas.routers[number].page(POOL)) == count

    async with traffic.running():
        await traffic.flowing(12)
        incident = traffic.incident()
        replicas.write(POOL, fewer, only=1)
        await until(lambda: has_members(1, 2), "router 1 has two members")
        assert await has_members(0, 3)
        await asyncio.gather(*(replicas.in_use(number, more=24) for number in range(2)))
        replicas.write(POOL, everyone)
        await until(lambda: has_members(1, 3), "router 1 has three members again")
        await replicas.envoy.wait_for_hosts(f"llm/{POOL}", {engine.endpoint for engine in system.engines})
        await traffic.flowing(24)
    incident.report("two pool versions")
    assert failed(incident.everyone) == []
    assert unrouted(incident) == 0


@pytest.mark.parametrize("wall_s", [HOUR_S, -HOUR_S], ids=["ahead", "back"])
async def test_wall_clock_jump_fails_no_request(system: ReplicatedSystem, wall_s: float) -> None:
    traffic, replicas = system.traffic(session="a session"), system.replicas
    router = replicas.routers[0]
    async with traffic.running():
        await asyncio.gather(*(replicas.in_use(number) for number in range(2)))
        await replicas.wait_for_metric("dualmap_pool_sessions", 1, of=0)
        expired = await router.metric("dualmap_completions_total", outcome="expired")
        incident = traffic.incident()
        router.set_clock_offsets(wall_s=wall_s)
        await asyncio.gather(*(replicas.in_use(number, more=24) for number in range(2)))
        assert await router.metric("dualmap_pool_sessions") == 1, "the session has not expired"
        # On a busy machine, a router may lose Redis for a moment.
        await wait_for_peers(system, 1)
        await replicas.wait_for_metric("dualmap_store_up", 1, of=0)
        router.set_clock_offsets()
        await replicas.in_use(0)
    incident.report(f"wall clock off by {wall_s:+.0f} s")
    assert failed(incident.everyone) == []
    assert unrouted(incident) == 0
    assert await router.metric("dualmap_completions_total", outcome="expired") == expired
