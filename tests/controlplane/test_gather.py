"""Tests of the operator's status requests to routers and engines: their contents and frequency, and the evidence for a
drain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from controlplane.fake_kube import Clock, Counts, FakeKube
from controlplane.operator_objects import KEY, member, pod_body, pool_body, pool_object
from dualmap.pools.claims import LostClaim
from dualmap_operator.decide.observed import EndpointReport, Observed, RouterReport
from dualmap_operator.decide.spec import read_spec
from dualmap_operator.observe.gather import Gatherer
from dualmap_operator.observe.routers import FixedRouters
from dualmap_operator.observe.status_clients import RouterAddress
from dualmap_operator.observe.watches import PoolObject, Watches, read_pod_object, read_pool

TOTALS = {
    "requests": 0,
    "refused": 0,
    "first_tokens": 0,
    "slo_met": 0,
    "prompt_tokens": 0,
    "predicted_cached_tokens": 0,
    "measured_cached_tokens": 0,
}


class FakeRouters:
    def __init__(self) -> None:
        self.asked = 0
        self.ring_version = 7
        self.answered = True
        self.in_flight = 0
        self.totals: dict[str, int] = dict(TOTALS)

    async def reports(
        self, pool_id: str, routers: Sequence[RouterAddress]
    ) -> tuple[tuple[RouterReport, Mapping[str, Any] | None], ...]:
        self.asked += 1
        assert pool_id == "llm/qwen"
        endpoints = {"qwen-1": EndpointReport(in_flight=self.in_flight)}
        return tuple(
            (
                RouterReport(
                    router=each.host, answered=self.answered, ring_version=self.ring_version, endpoints=endpoints
                ),
                self.totals,
            )
            for each in routers
        )


class FakeEngines:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.requests_at: int | None = 0

    async def requests(self, engine_type: str, address: str, port: int) -> int | None:
        self.asked.append((engine_type, address, port))
        return self.requests_at


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.routers = FakeRouters()
        self.engines = FakeEngines()
        self.kube = FakeKube()
        self.watches = watches = Watches(
            self.kube,  # type: ignore[arg-type]  # stands for it
            Counts(),
            namespace=None,
            wake=lambda _: None,
            clock=self.clock,
        )
        self.gatherer = Gatherer(
            "/".join(KEY),
            watches=watches,
            routers=FixedRouters([("router", 9090)]),
            router_client=self.routers,  # type: ignore[arg-type]  # stands for it
            engine_client=self.engines,  # type: ignore[arg-type]  # stands for it
            clock=self.clock,
        )

    async def look(self, pool: PoolObject, *, after_s: float = 0.0) -> Observed:
        self.clock.now_s += after_s
        return await self.gatherer.observe(pool, read_spec(pool.document), ())


def published(*states: str, version: int = 7) -> PoolObject:
    members = [member(f"qwen-{number}", state) for number, state in enumerate(states)]
    return pool_object(status={"ring": {"version": version, "members": members}})


async def test_gather_of_idle_pool_requests_routers_every_15_s() -> None:
    scene = Scene()
    for _ in range(31):
        await scene.look(published("Active", "Active"), after_s=1.0)

    assert scene.routers.asked == 3
    assert scene.engines.asked == []


async def test_gather_during_drain_always_requests_routers_and_engine() -> None:
    scene = Scene()
    await scene.look(published("Active", "Draining"))
    observed = await scene.look(published("Active", "Draining"), after_s=0.5)

    assert scene.routers.asked == 2
    assert scene.engines.asked == [("vLLM", "10.0.0.1", 8000)] * 2
    assert observed.engine_requests == {"qwen-1": 0}
    assert observed.idle_checks == {"qwen-1": 2}


async def test_gather_called_again_immediately_sends_no_request() -> None:
    scene = Scene()
    await scene.look(published("Active", "Draining"))
    observed = await scene.look(published("Active", "Draining"), after_s=0.05)

    assert scene.routers.asked == 1
    assert observed.idle_checks == {"qwen-1": 1}


async def test_gather_request_in_flight_resets_idle_checks() -> None:
    scene = Scene()
    await scene.look(published("Active", "Draining"))
    scene.routers.in_flight = 1
    observed = await scene.look(published("Active", "Draining"), after_s=0.5)
    assert observed.idle_checks == {"qwen-1": 0}

    scene.routers.in_flight = 0
    observed = await scene.look(published("Active", "Draining"), after_s=0.5)
    assert observed.idle_checks == {"qwen-1": 1}


async def test_gather_second_drain_starts_idle_checks_at_zero() -> None:
    scene = Scene()
    await scene.look(published("Active", "Draining"))
    await scene.look(published("Active", "Active"), after_s=0.1)
    observed = await scene.look(published("Active", "Draining"), after_s=0.5)

    assert observed.idle_checks == {"qwen-1": 1}


async def test_gather_drain_restarted_between_checks_resets_idle_checks() -> None:
    scene = Scene()
    await scene.look(published("Active", "Draining"))
    await scene.look(published("Active", "Active"), after_s=0.1)
    assert (await scene.look(published("Active", "Draining"), after_s=0.1)).idle_checks == {}

    assert (await scene.look(published("Active", "Draining"), after_s=0.3)).idle_checks == {"qwen-1": 1}
    assert (await scene.look(published("Active", "Draining"), after_s=0.5)).idle_checks == {"qwen-1": 2}


async def test_gather_router_with_old_ring_is_requested_every_second() -> None:
    scene = Scene()
    scene.routers.ring_version = 6
    await scene.look(published("Active", version=7))
    await scene.look(published("Active", version=7), after_s=1.0)
    assert scene.routers.asked == 2

    scene.routers.ring_version = 7
    await scene.look(published("Active", version=7), after_s=1.0)
    await scene.look(published("Active", version=7), after_s=1.0)
    assert scene.routers.asked == 3
    assert 13 < scene.gatherer.due_s() < 15


async def test_gather_computes_traffic_as_difference_of_totals() -> None:
    scene = Scene()
    await scene.look(published("Active"))
    scene.routers.totals = {**TOTALS, "requests": 20, "first_tokens": 20, "slo_met": 15, "prompt_tokens": 100}
    await scene.look(published("Active"), after_s=15.0)
    observed = await scene.look(published("Active"), after_s=31.0)

    assert observed.traffic.slo_attainment == "0.75"


async def test_gather_reports_the_invalid_spec() -> None:
    scene = Scene()
    observed = await scene.gatherer.observe(published("Active"), None, ("refused",))

    assert observed.pods == ()
    assert observed.failures == ("refused",)
    assert [each.id for each in observed.published.members] == ["qwen-0"]


async def unreadable(scene: Scene, pool: PoolObject) -> list[str]:
    observed = await scene.gatherer.observe(pool, None, ())
    return sorted(pod.name for pod in observed.pods)


def show(scene: Scene, *bodies: dict[str, Any]) -> None:
    for body in bodies:
        scene.watches.pods.put((("llm", body["metadata"]["name"]), read_pod_object(body)))


async def test_gather_with_invalid_spec_uses_pods_of_last_valid_spec() -> None:
    scene = Scene()
    adopting = pool_object(workload={"selector": {"matchLabels": {"app": "vllm"}}})
    await scene.look(adopting)
    show(scene, pod_body("a", app="vllm"), pod_body("b", app="web"))

    assert await unreadable(scene, adopting) == ["a"]


async def test_gather_without_valid_spec_uses_statefulset_and_members() -> None:
    scene = Scene()
    show(scene, pod_body("qwen-1", owner="qwen"), pod_body("qwen-0"), pod_body("stray"))

    assert await unreadable(scene, published("Active")) == ["qwen-0", "qwen-1"]


async def test_gather_version_floor_is_highest_published_ring_version() -> None:
    scene = Scene()
    scene.routers.ring_version = 0
    for pool in (published("Active", version=9), pool_object()):
        scene.watches.pools.put((KEY, pool))
    assert (await scene.look(pool_object())).version_floor == 9

    another = pool_object(uid="another of this name")
    scene.watches.pools.put((KEY, another))
    assert (await scene.look(another)).version_floor == 0


async def test_gather_version_floor_is_highest_router_ring_version() -> None:
    scene = Scene()
    scene.routers.ring_version = 12

    assert (await scene.look(pool_object())).version_floor == 12
    scene.routers.answered = False
    assert (await scene.look(pool_object(), after_s=15.0)).version_floor == 0


async def test_gather_reports_deletion_despite_invalid_spec() -> None:
    scene = Scene()
    pool = published("Active")
    going = replace(
        pool,
        document={
            **pool.document,
            "metadata": {**pool.document["metadata"], "deletionTimestamp": "2026-11-22T00:00:00Z"},
        },
    )

    assert not (await scene.gatherer.observe(pool, None, ())).deleting
    assert (await scene.gatherer.observe(going, None, ())).deleting


async def test_gather_finds_lost_name_claims_without_a_request() -> None:
    scene = Scene()
    young, older = pool_body(), pool_body(uid="an older one's")
    young["metadata"]["creationTimestamp"] = "2026-11-22T00:00:00Z"
    older["metadata"] |= {"name": "older", "creationTimestamp": "2026-11-21T00:00:00Z"}
    for name, body in (("older", older), (KEY[1], young)):
        scene.watches.pools.put(((KEY[0], name), read_pool(body)))

    observed = await scene.look(read_pool(young))

    assert observed.lost_claims == (LostClaim(pool="llm/qwen", name="qwen", owner="llm/older"),)
    assert scene.kube.requests == []
