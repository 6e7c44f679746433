"""Tests of engines that crash, hang, are slow or answer 503, under streamed and plain requests.

The tests use the system of ``test_faults_routers``. Envoy retries an unanswered request at the second candidate, but
cannot retry a stream that has started.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from harness.replicated_system import ReplicatedSystem
from harness.stack import Engine, Router
from harness.traffic import NEXT_AFTER_S, Exchange, Outcome, failed, tally
from harness.upstream import Received, Upstream
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The time limit for the engine's restart and the end of its suspension.
RECOVERY_TIMEOUT_S = 60.0


async def unavailable(_request: web.Request, _received: Received) -> web.StreamResponse:
    return web.json_response({"error": {"message": "overloaded", "type": "x", "code": 503}}, status=503)


@asynccontextmanager
async def sick(engines: list[Engine]) -> AsyncIterator[list[Upstream]]:
    """Replace engines with servers that immediately answer 503 while the context is open."""
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(engine.kill() for engine in engines))
        places = [Upstream(name=engine.name, port=engine.port, answer=unavailable) for engine in engines]
        yield [await stack.enter_async_context(place) for place in places]
    await asyncio.gather(*(engine.start() for engine in engines))


async def wait_until_used(system: ReplicatedSystem, engine: Engine) -> None:
    """Wait until every router sends requests to an engine again."""

    async def sent(router: Router) -> float:
        return await router.metric("dualmap_requests_total", endpoint=engine.name)

    before = [await sent(router) for router in system.replicas.routers]

    async def used() -> bool:
        more = [await sent(router) - count for router, count in zip(system.replicas.routers, before, strict=True)]
        suspended = [
            await router.metric("dualmap_endpoint_suspended", endpoint=engine.name)
            for router in system.replicas.routers
        ]
        return min(more) >= 3 and not any(suspended)

    await until(used, f"{engine.name} is used again", timeout_s=RECOVERY_TIMEOUT_S)


async def busiest(system: ReplicatedSystem) -> Engine:
    """Return the engine with the most requests in flight. An engine that lost its cache may get few requests."""

    async def in_flight(engine: Engine) -> float:
        routers = system.replicas.routers
        return sum(
            [await router.metric("dualmap_endpoint_in_flight_requests", endpoint=engine.name) for router in routers]
        )

    loads = {engine.name: await in_flight(engine) for engine in system.engines}
    return max(system.engines, key=lambda engine: loads[engine.name])


def left_behind(exchanges: list[Exchange], engine: Engine) -> int:
    """Count the requests for which an engine takes so long that their clients have started the next request."""
    return sum(each.took_s > NEXT_AFTER_S and each.engine == engine.endpoint for each in exchanges)


async def test_killed_engine_cuts_only_its_own_requests(system: ReplicatedSystem) -> None:
    traffic, engine = system.traffic(), system.engines[0]
    async with traffic.running():
        await traffic.streaming(6)
        incident = traffic.incident()
        begun = {each.number for each in incident.caught if each.began}
        await engine.kill()
        await traffic.flowing(60)
        await engine.start()
        await wait_until_used(system, engine)
    incident.report("one of three engines killed")
    assert {each.outcome for each in failed(incident.everyone)} <= {Outcome.CUT}
    cut = {each.number for each in failed(incident.everyone)}
    assert cut <= begun | {each.number for each in incident.caught}, "only requests that it was serving"
    assert len(cut) < len(incident.caught)


async def test_hung_engine_gets_few_new_requests(system: ReplicatedSystem) -> None:
    traffic = system.traffic()
    async with traffic.running():
        await traffic.streaming(4)
        engine = await busiest(system)
        incident = traffic.incident()
        engine.pause()
        # The routers' load estimate for this engine grows, because its first tokens do not arrive.
        await traffic.flowing(80)
        since = traffic.incident()
        await traffic.flowing(80)
        engine.resume()
        await wait_until_used(system, engine)
    stuck, late = left_behind(incident.everyone, engine), left_behind(since.later, engine)
    incident.report(f"one of three engines hung ({stuck} waited for it, {late} of them sent later)")
    assert stuck > 0
    assert late <= len(since.later) / 10, "it gets few new requests"
    assert failed(incident.everyone) == []


async def test_killed_hung_engine_unanswered_requests_are_retried(system: ReplicatedSystem) -> None:
    """The kill is like the kubelet's after a failed liveness probe."""
    traffic = system.traffic()
    async with traffic.running():
        await traffic.streaming(4)
        engine = await busiest(system)
        incident = traffic.incident()
        engine.pause()
        await traffic.flowing(80)
        waiting = {each.number for each in incident.everyone if each.outcome is None and not each.status}
        await traffic.flowing(24)
        prefilling = [each for each in incident.everyone if each.number in waiting and each.outcome is None]
        await engine.kill()
        await traffic.flowing(40)
        await engine.start()
        await wait_until_used(system, engine)
    incident.report(f"a hung engine is killed ({len(prefilling)} waited for it)")
    assert prefilling
    assert tally(prefilling) == {"ok": len(prefilling)}, "another engine answered them"
    assert {each.outcome for each in failed(incident.everyone)} <= {Outcome.CUT}
    assert failed(incident.later) == []


async def test_single_engine_answering_503_gets_few_requests(system: ReplicatedSystem) -> None:
    traffic = system.traffic()
    async with traffic.running():
        async with sick(system.engines[:1]) as (place,):
            incident = traffic.incident()

            async def tried() -> bool:
                return len(place.received) >= 3

            await until(tried, "three requests reach the failing engine", timeout_s=RECOVERY_TIMEOUT_S)
            await traffic.flowing(60)
            drawn = len(place.received)
        answered = incident.everyone
        await wait_until_used(system, system.engines[0])
    incident.report(f"one of three engines answers 503 ({drawn} requests tried there)")
    assert failed(incident.later) == []
    assert drawn <= len(answered) / 4, "a fast-failing engine draws no traffic"


async def test_request_with_all_engines_answering_503_is_retried_once(system: ReplicatedSystem) -> None:
    traffic = system.traffic()
    async with traffic.running():
        async with sick(system.engines) as places:
            incident, before = traffic.incident(), sum(len(place.received) for place in places)

            async def refused() -> bool:
                return len(failed(incident.later)) >= 40

            await until(refused, "40 requests get 503")
            tries = (sum(len(place.received) for place in places) - before) / len(incident.everyone)
            assert {each.status for each in failed(incident.later)} == {503}
            assert all('"message": "overloaded"' in each.error for each in failed(incident.later))
        await traffic.flowing(40)
        healed = traffic.incident()
        await traffic.flowing(40)
    incident.report(f"every engine answers 503 ({tries:.1f} tries a request)")
    assert tries <= 2, "at most one retry each"
    assert tally(healed.later) == {"ok": len(healed.later)}


async def test_slow_engine_gets_fewer_requests(system: ReplicatedSystem) -> None:
    traffic, routers = system.traffic(), system.replicas.routers

    async def sent() -> float:
        return sum([await router.metric("dualmap_requests_total", endpoint="engine-0") for router in routers])

    async with traffic.running():
        await traffic.streaming(4)
        await system.restart_engine(0, speed="0.05")
        await traffic.flowing(40)
        before, incident = await sent(), traffic.incident()
        await traffic.flowing(120)
        share = (await sent() - before) / len(incident.later)
        await system.restart_engine(0)
    incident.report(f"one of three engines is 40 times slower ({share:.0%} of the requests went there)")
    assert {each.outcome for each in failed(incident.everyone)} <= {Outcome.CUT}, (
        "only requests that the killed engine was serving"
    )
    assert share < 1 / 3
