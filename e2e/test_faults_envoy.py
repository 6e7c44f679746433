"""Tests of an Envoy restart and of a lost access log, under streamed and plain requests.

The tests use the system of ``test_faults_routers``. After a stream's first token, only the access log reports the
stream's end to the routers. Without the access log, the routers expire the request after ten minutes. The tests move
the clocks to skip this time.
"""

import asyncio

import pytest

from harness.replicated_system import POOL, ReplicatedSystem
from harness.traffic import Outcome, failed
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

IN_FLIGHT = "dualmap_endpoint_in_flight_requests"
PENDING = "dualmap_endpoint_pending_prefill_tokens"
TEN_MINUTES_S = 600.0
# Longer than the interval of Envoy's batches of access log entries, because other work may delay a batch.
BATCH_S = 1.0
# Nothing listens on TCP port 9 (discard).
NOWHERE = "127.0.0.1:9"


async def wait_for_in_flight(system: ReplicatedSystem, most: int) -> float:
    """Wait until both routers have a total of at most ``most`` requests in flight; return the total."""
    found = 0.0

    async def counted() -> bool:
        nonlocal found
        found = sum([await router.metric(IN_FLIGHT) for router in system.replicas.routers])
        return found <= most

    await until(counted, f"at most {most} in flight", timeout_s=60.0)
    return found


async def forget(system: ReplicatedSystem) -> float:
    """Move the routers' clocks by ten minutes; return the number of expired requests."""
    routers = system.replicas.routers
    expired = [await router.metric("dualmap_completions_total", outcome="expired") for router in routers]
    for number, router in enumerate(routers):
        router.set_clock_offsets(monotonic_s=TEN_MINUTES_S)
        await system.replicas.wait_for_metric(IN_FLIGHT, 0, of=number)
    after = [await router.metric("dualmap_completions_total", outcome="expired") for router in routers]
    for number in range(len(routers)):
        # The routers restart, because a monotonic clock must not move back.
        await system.replicas.end_router(number)
        await system.replicas.restart_router(number)
    return sum(after) - sum(expired)


async def test_envoy_restart_loses_only_open_requests(system: ReplicatedSystem) -> None:
    traffic, replicas = system.traffic(), system.replicas
    async with traffic.running():
        await traffic.streaming(6)
        incident, killed_s = traffic.incident(), asyncio.get_running_loop().time()
        await replicas.envoy.child.kill()
        await replicas.envoy.start()
        back = traffic.incident()
        await traffic.flowing(40)
        for number in range(2):
            await replicas.in_use(number)
    incident.report("Envoy killed and restarted")
    assert {each.outcome for each in incident.caught} <= {Outcome.CUT, Outcome.LOST}
    assert {each.outcome for each in failed(incident.later)} <= {Outcome.LOST}
    assert failed(back.later) == []
    # Envoy reports the ends of streams in batches.
    ends_s = [each.started_s + each.took_s for each in traffic.exchanges if each.outcome is Outcome.OK]
    unreported = sum(killed_s - BATCH_S <= each <= killed_s for each in ends_s)
    cut = sum(each.outcome is Outcome.CUT for each in incident.caught)
    left = await wait_for_in_flight(system, cut + unreported)
    for router in replicas.routers:
        assert await router.metric(PENDING) == 0
    # These are the streams that Envoy broke after their first token, or whose end it had not reported.
    assert 0 < await forget(system) <= left


async def test_lost_access_log_entries_let_open_requests_expire(system: ReplicatedSystem) -> None:
    replicas = system.replicas
    async with replicas.another_envoy("mute", access_log=NOWHERE) as mute:
        traffic = system.traffic(envoy=mute)
        async with traffic.running():
            incident = traffic.incident()
            await traffic.flowing(60)
    incident.report("access log lost")
    assert failed(incident.everyone) == []
    streams = sum(each.kind == "stream" for each in incident.later)

    assert await wait_for_in_flight(system, streams) == streams
    for router in replicas.routers:
        assert await router.metric(PENDING) == 0, "the routers saw the first tokens"
        assert await router.metric("dualmap_pool_held_requests") == 0
        assert all(not endpoint["pending_prefill_tokens"] for endpoint in (await router.page(POOL)).values())
    assert await forget(system) == streams
