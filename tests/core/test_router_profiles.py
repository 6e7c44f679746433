"""Tests of what a pool's router does with what its members' engines say."""

from dataclasses import replace

import pytest

from builders import members, pool, request, text_of
from core.routers import decide, dispatched_s
from dualmap.engines.profile import ADAPTERS_MAX, EngineProfile
from dualmap.engines.profiles import ADAPTER_KEPT_S, DISCOVERED_LENGTH_MAX, POOL_ADAPTERS_MAX, Profiles
from dualmap.pools.pool import Discovery, Engine, Pool, Queue, Routing
from dualmap.requests import Decision, EndpointStatus, Queued, Request
from dualmap.router import PoolRouter

IDLE = EngineProfile(waiting=0, running=0, asleep=False)


def status(router: PoolRouter, member: str = "m-0") -> EndpointStatus:
    return next(each for each in router.status().endpoints if each.id == member)


def chosen(router: PoolRouter, count: int = 20, now: float = 0.0) -> set[str]:
    """Return the members of ``count`` requests with different prompts, which end at once."""
    found = set()
    for n in range(count):
        found.add(decide(router, f"{now}-{n}", text_of(400, f"seed {n}"), now).receipt.chosen)
        router.on_aborted(now, f"{now}-{n}")
    return found


def queueing(engine: Engine | None = None) -> Pool:
    return pool(1, engine=engine, routing=Routing(queue=Queue()))


class TestMemory:
    def test_prompt_waits_for_room_in_discovered_memory(self) -> None:
        router = PoolRouter(queueing())
        router.on_profile(0.0, "m-0", EngineProfile(kv_tokens=5000))
        decide(router, "a", text_of(400, "a"))
        assert isinstance(router.on_request(0.0, request("b", text_of(4500, "b"))).answer, Queued)

    def test_specified_memory_overrules_the_engine(self) -> None:
        router = PoolRouter(queueing(Engine(kv_tokens=50_000)))
        router.on_profile(0.0, "m-0", EngineProfile(kv_tokens=5000))
        decide(router, "a", text_of(400, "a"))
        assert isinstance(router.on_request(0.0, request("b", text_of(1000, "b"))).answer, Decision)

    def test_more_discovered_memory_dispatches_queued_requests(self) -> None:
        router = PoolRouter(queueing())
        router.on_profile(0.0, "m-0", EngineProfile(kv_tokens=1500))
        decide(router, "a", text_of(400, "a"))
        router.on_first_token(0.1, "a")
        assert isinstance(router.on_request(0.1, request("b", text_of(1000, "b"))).answer, Queued)
        _, (outcome,) = router.on_profile(0.2, "m-0", EngineProfile(kv_tokens=50_000))
        assert outcome.request_id == "b"

    def test_index_has_the_discovered_capacity(self) -> None:
        router = PoolRouter(pool(1))
        decide(router, "a", text_of(128 * 20, "a"))
        router.on_profile(0.0, "m-0", EngineProfile(cache_tokens=128 * 4 + 5))
        assert status(router).indexed_blocks == 4
        decide(router, "b", text_of(128 * 20, "b"))
        assert status(router).indexed_blocks == 4

    def test_specified_cache_overrules_the_engine(self) -> None:
        engine = Engine(cache_tokens=128 * 10, discovery=Discovery(cache_tokens=False))
        router = PoolRouter(pool(1, engine=engine))
        router.on_profile(0.0, "m-0", EngineProfile(cache_tokens=128 * 4))
        decide(router, "a", text_of(128 * 20, "a"))
        assert status(router).indexed_blocks == 10
        assert router.pool.engine.cache_tokens == 128 * 10

    def test_new_member_index_has_the_specified_capacity(self) -> None:
        """An index has its own engine's capacity, or the specification's, and not that of another engine."""
        of = pool(1, engine=Engine(cache_tokens=128 * 6))
        router = PoolRouter(of)
        router.on_profile(0.0, "m-0", EngineProfile(cache_tokens=128 * 4))
        router.on_pool(1.0, replace(of, members=members(2), ring_version=2))
        for n in range(20):
            decide(router, f"r{n}", text_of(128 * 20, f"{n}"), 1.0)
        assert [status(router, each).indexed_blocks for each in ("m-0", "m-1")] == [4, 6]


class TestLength:
    def test_pool_counts_the_longest_discovered_prompt(self) -> None:
        router = PoolRouter(pool(2))
        assert router.on_profile(0.0, "m-0", EngineProfile(max_model_len=1024)).answer
        assert router.on_profile(0.0, "m-1", EngineProfile(max_model_len=2048)).answer
        assert router.pool.engine.max_model_len == 2048
        assert not router.on_profile(0.0, "m-0", EngineProfile(max_model_len=512)).answer

    def test_discovered_length_is_bounded(self) -> None:
        router = PoolRouter(pool(2))
        router.on_profile(0.0, "m-0", EngineProfile(max_model_len=1024))
        router.on_profile(0.0, "m-1", EngineProfile(max_model_len=10**8))
        assert router.pool.engine.max_model_len == DISCOVERED_LENGTH_MAX

    def test_specified_length_has_no_bound_of_discovery(self) -> None:
        engine = Engine(max_model_len=10**7, discovery=Discovery(max_model_len=False))
        router = PoolRouter(pool(1, engine=engine))
        router.on_profile(0.0, "m-0", EngineProfile(max_model_len=512))
        assert router.pool.engine.max_model_len == 10**7

    def test_specified_length_overrules_engines(self) -> None:
        engine = Engine(max_model_len=9000, discovery=Discovery(max_model_len=False))
        router = PoolRouter(pool(1, engine=engine))
        assert not router.on_profile(0.0, "m-0", EngineProfile(max_model_len=512)).answer
        assert router.pool.engine.max_model_len == 9000

    def test_length_is_kept_by_a_new_version_of_the_pool(self) -> None:
        router = PoolRouter(pool(1))
        router.on_profile(0.0, "m-0", EngineProfile(max_model_len=1024))
        router.on_pool(1.0, replace(pool(2), ring_version=2))
        assert router.pool.engine.max_model_len == 1024


class TestAdapters:
    def test_adapters_of_any_member_are_served(self) -> None:
        router = PoolRouter(pool(2))
        router.on_profile(0.0, "m-0", EngineProfile(adapters=("sql",)))
        assert router.on_profile(0.0, "m-1", EngineProfile(adapters=("math", "m", "sql"))).answer
        assert router.pool.model.names == ("m", "math", "sql")
        assert router.pool.model.adapter_of("sql") == "sql"
        assert router.pool.model.adapter_of("m") == ""

    def test_specified_adapters_stay_first(self) -> None:
        of = pool(1)
        router = PoolRouter(replace(of, model=replace(of.model, aliases=("b",), adapters=("z",))))
        router.on_profile(0.0, "m-0", EngineProfile(adapters=("a", "b", "z")))
        assert router.pool.model.adapters == ("z", "a")

    def test_adapter_of_another_namespace_is_not_served(self) -> None:
        router = PoolRouter(replace(pool(1), foreign_names=frozenset({"sql"})))
        router.on_profile(0.0, "m-0", EngineProfile(adapters=("sql", "math")))
        assert router.pool.served_names == ("m", "math")


class TestLostAdapters:
    def router(self) -> PoolRouter:
        router = PoolRouter(pool(2))
        router.on_profile(0.0, "m-0", EngineProfile(adapters=("sql",)))
        router.on_profile(0.0, "m-1", IDLE)
        return router

    def test_adapter_of_a_restarting_engine_stays_for_a_while(self) -> None:
        router = self.router()
        router.on_profile(10.0, "m-0", EngineProfile(reason="no answer"))
        assert router.pool.model.adapters == ("sql",)
        assert not router.on_profile(9.0 + ADAPTER_KEPT_S, "m-1", IDLE).answer
        assert router.pool.model.adapters == ("sql",)
        assert router.on_profile(10.0 + ADAPTER_KEPT_S, "m-1", IDLE).answer
        assert router.pool.model.adapters == ()

    def test_adapter_that_returns_stays(self) -> None:
        router = self.router()
        router.on_profile(10.0, "m-0", IDLE)
        router.on_profile(200.0, "m-1", EngineProfile(adapters=("sql",)))
        assert not router.on_profile(1000.0, "m-0", IDLE).answer
        assert router.pool.model.adapters == ("sql",)

    def test_adapter_of_another_incarnation_stays_for_a_while(self) -> None:
        router = self.router()
        again = replace(members(1)[0], incarnation="other")
        router.on_pool(10.0, replace(pool(2), members=(again, members(2)[1]), ring_version=2))
        assert router.pool.model.adapters == ("sql",)
        assert not router.on_profile(11.0, "m-1", IDLE).answer
        assert router.on_profile(11.0 + ADAPTER_KEPT_S, "m-1", IDLE).answer
        assert router.pool.model.adapters == ()

    def test_pool_scaled_to_zero_keeps_its_adapters(self) -> None:
        """A request for an adapter must reach the queue, so that an instance starts for it."""
        router = self.router()
        router.on_pool(10.0, replace(pool(2), members=(), ring_version=2))
        router.on_pool(9000.0, replace(pool(2), ring_version=3))
        router.on_profile(9001.0, "m-0", IDLE)
        assert router.pool.model.adapters == ("sql",)

    def test_discovery_that_is_switched_off_forgets_lost_adapters(self) -> None:
        router = self.router()
        router.on_profile(10.0, "m-0", IDLE)
        router.on_pool(11.0, replace(pool(2), engine=Engine(discovery=Discovery(enabled=False))))
        assert router.pool.model.adapters == ()

    def test_adapters_of_a_pool_are_bounded_and_earlier_ones_stay(self) -> None:
        router = PoolRouter(pool(8))
        router.on_profile(0.0, "m-0", EngineProfile(adapters=("z",)))
        for n in range(1, 8):
            names = tuple(f"a-{n}-{k}" for k in range(ADAPTERS_MAX))
            router.on_profile(0.0, f"m-{n}", EngineProfile(adapters=names))
        assert len(router.pool.model.adapters) == POOL_ADAPTERS_MAX
        assert router.pool.model.adapter_of("z") == "z"

    def test_engine_that_changes_its_adapters_displaces_only_lost_ones(self) -> None:
        router = self.router()
        for at in range(10):
            names = tuple(f"a-{at}-{k}" for k in range(ADAPTERS_MAX))
            router.on_profile(float(at), "m-1", EngineProfile(adapters=names))
            assert len(router.pool.model.adapters) <= POOL_ADAPTERS_MAX
        assert {"sql", "a-9-0", "a-9-255"} <= set(router.pool.model.adapters)


class TestForeignWork:
    def router(self, count: int = 2) -> PoolRouter:
        return PoolRouter(pool(count, policy="least_requests"))

    def test_foreign_work_counts_from_the_second_report(self) -> None:
        router = self.router()
        router.on_profile(0.0, "m-0", EngineProfile(waiting=2, running=6))
        assert chosen(router) == {"m-0", "m-1"}
        router.on_profile(1.0, "m-0", EngineProfile(waiting=2, running=6))
        assert chosen(router, now=1.0) == {"m-1"}
        router.on_profile(2.0, "m-0", IDLE)
        assert chosen(router, now=2.0) == {"m-0", "m-1"}

    def test_one_observation_in_two_profiles_counts_once(self) -> None:
        router = self.router()
        first = EngineProfile(waiting=2, running=6, at_s=1.0)
        router.on_profile(1.0, "m-0", first)
        router.on_profile(1.1, "m-0", replace(first, version="0.32.0"))
        assert chosen(router, now=1.1) == {"m-0", "m-1"}
        assert status(router).engine.version == "0.32.0"
        router.on_profile(2.0, "m-0", replace(first, at_s=2.0))
        assert chosen(router, now=2.0) == {"m-1"}

    def test_requests_of_this_router_are_no_foreign_work(self) -> None:
        router = self.router(1)
        for n in range(3):
            decide(router, f"r{n}", text_of(400, f"{n}"))
        before = candidate(router)
        for now in (0.0, 1.0):
            router.on_profile(now, "m-0", EngineProfile(waiting=2, running=1))
        assert candidate(router) == before
        router.on_profile(2.0, "m-0", IDLE)  # Fewer than ours: never negative.
        assert candidate(router) == before

    def test_foreign_prompts_have_the_mean_length(self) -> None:
        router = self.router(1)
        for now in (0.0, 1.0):
            router.on_profile(now, "m-0", EngineProfile(waiting=2, running=3))
        assert candidate(router, 1.0) == (5, 2000, 5000)
        for n in range(300):
            decide(router, f"r{n}", text_of(200, f"{n}"), 1.0)
            router.on_aborted(1.0, f"r{n}")
        for now in (1.5, 2.0):
            router.on_profile(now, "m-0", EngineProfile(waiting=2, running=3))
        in_flight, pending, active_kv = candidate(router, 2.0)
        assert (in_flight, pending, active_kv) == (5, pytest.approx(400, rel=0.1), pytest.approx(1000, rel=0.1))

    def test_silent_engine_has_no_foreign_work(self) -> None:
        router = self.router()
        for now in (0.0, 1.0):
            router.on_profile(now, "m-0", EngineProfile(waiting=0, running=9))
        for now in (1.5, 5.0, 11.0):
            router.on_profile(now, "m-0", EngineProfile(reason="no answer"))
        router.on_deadline(11.0)
        assert chosen(router, now=11.0) == {"m-0", "m-1"}

    def test_foreign_work_expires_without_reports(self) -> None:
        router = self.router()
        for now in (0.0, 1.0):
            router.on_profile(now, "m-0", EngineProfile(waiting=0, running=9))
        deadline = router.next_deadline()
        assert deadline == 11.0
        router.on_deadline(deadline)
        assert chosen(router, now=11.0) == {"m-0", "m-1"}

    def test_foreign_work_delays_requests_but_cannot_close_a_member(self) -> None:
        router = PoolRouter(queueing())
        lie = EngineProfile(waiting=10**6, running=10**6)
        for now in (0.0, 1.0):
            router.on_profile(now, "m-0", lie)
        assert isinstance(router.on_request(1.0, request("a", text_of(400, "a"), now=1.0)).answer, Queued)
        assert dispatched_s(router, lie) <= 4.0

    def test_discovery_that_is_switched_off_forgets_everything(self) -> None:
        router = self.router()
        for now in (0.0, 1.0):
            router.on_profile(now, "m-0", EngineProfile(waiting=0, running=9, max_model_len=1024, adapters=("a",)))
        off = replace(router.pool, model=pool(1).model, engine=Engine(discovery=Discovery(enabled=False)))
        router.on_pool(1.0, off)
        assert chosen(router, now=1.0) == {"m-0", "m-1"}
        assert (router.pool, status(router).engine) == (off, EngineProfile())
        assert not router.on_profile(2.0, "m-0", EngineProfile(max_model_len=1024)).answer
        assert router.pool == off


def candidate(router: PoolRouter, now: float = 0.0) -> tuple[int, int, int]:
    """Return a member's load as decisions see it: requests, pending prompt tokens and KV tokens."""
    view = router._fleet.candidates.view(now, request("x", text_of(400, "x")).chain).candidate("m-0")
    return view.in_flight, view.pending_tokens, view.active_kv_tokens


class TestSleep:
    def test_asleep_member_is_picked_only_if_all_are_asleep(self) -> None:
        router = PoolRouter(pool(2))
        router.on_profile(0.0, "m-0", EngineProfile(asleep=True))
        assert chosen(router) == {"m-1"}
        router.on_profile(1.0, "m-1", EngineProfile(asleep=True))
        assert chosen(router, now=1.0) == {"m-0", "m-1"}
        router.on_profile(2.0, "m-0", IDLE)
        assert chosen(router, now=2.0) == {"m-0"}

    def test_bodiless_request_avoids_asleep_members(self) -> None:
        router = PoolRouter(pool(2))
        router.on_profile(0.0, "m-0", EngineProfile(asleep=True))
        assert router.any_endpoints(None) == ("10.0.0.2:8000",)

    def test_suspended_member_is_picked_before_an_asleep_one(self) -> None:
        router = PoolRouter(pool(2))
        router.on_profile(0.0, "m-0", EngineProfile(asleep=True))
        for n in range(3):
            decide(router, f"r{n}", text_of(400, f"{n}"), 0.1)
            router.on_failed(0.2, f"r{n}")
        assert status(router, "m-1").suspended
        assert chosen(router, now=0.3) == {"m-1"}

    def test_queued_requests_leave_an_engine_that_falls_asleep(self) -> None:
        of = pool(2, routing=Routing(queue=Queue()))
        router = PoolRouter(replace(of, members=of.members[:1]))
        decide(router, "a", text_of(9000, "a"))
        assert isinstance(router.on_request(0.0, request("b", text_of(400, "b"))).answer, Queued)
        router.on_pool(0.0, of)
        _, (outcome,) = router.on_profile(0.1, "m-0", EngineProfile(asleep=True))
        assert isinstance(outcome, Decision)
        assert outcome.receipt.chosen == "m-1"

    def test_sleep_empties_the_index(self) -> None:
        router = PoolRouter(pool(1))
        router.on_profile(0.0, "m-0", IDLE)
        decide(router, "a", text_of(1000, "a"))
        router.on_profile(1.0, "m-0", EngineProfile(asleep=True))
        assert status(router).indexed_blocks == 0
        decide(router, "b", text_of(1000, "b"))
        router.on_profile(2.0, "m-0", EngineProfile(asleep=True))
        assert status(router).indexed_blocks == 7


class TestProcess:
    def test_new_start_time_empties_the_index(self) -> None:
        router = PoolRouter(pool(1))
        router.on_profile(0.0, "m-0", EngineProfile(started_s=100.0))
        decide(router, "a", text_of(1000, "a"))
        router.on_profile(1.0, "m-0", EngineProfile(started_s=100.4))
        assert status(router).indexed_blocks == 7
        router.on_profile(2.0, "m-0", EngineProfile(started_s=160.0))
        assert status(router).indexed_blocks == 0

    def test_profile_of_a_former_incarnation_is_forgotten(self) -> None:
        router = PoolRouter(pool(1))
        router.on_profile(0.0, "m-0", EngineProfile(version="1", max_model_len=1024))
        again = replace(members(1)[0], incarnation="other")
        router.on_pool(1.0, replace(pool(1), members=(again,), ring_version=2))
        assert status(router).engine == EngineProfile()
        assert router.pool.engine.max_model_len == Engine().max_model_len

    def test_unknown_member_is_ignored(self) -> None:
        router = PoolRouter(pool(1))
        assert not router.on_profile(0.0, "gone", EngineProfile(max_model_len=1024)).answer
        assert router.pool == pool(1)

    def test_status_shows_the_profile(self) -> None:
        router = PoolRouter(pool(1))
        profile = EngineProfile(version="0.32.0", kv_tokens=9)
        router.on_profile(0.0, "m-0", profile)
        assert status(router).engine is profile


def test_router_without_profiles_decides_as_before() -> None:
    def decisions(router: PoolRouter, profiled: bool) -> list[object]:
        made: list[object] = []
        for n in range(200):
            if profiled and n % 10 == 0:
                router.on_profile(n / 10, f"m-{n % 8}", EngineProfile(reason="no answer"))
            of: Request = request(f"r{n}", text_of(900, f"{n % 7}"), now=n / 10)
            made.append(router.on_request(n / 10, of).answer)
        return made

    assert decisions(PoolRouter(pool(8)), True) == decisions(PoolRouter(pool(8)), False)


def test_members_asleep_stay_immutable_when_a_member_leaves() -> None:
    first = pool(2)
    profiles = Profiles(first)
    for each in first.members:
        profiles.put(0.0, each.id, EngineProfile(asleep=True))
    profiles.adopt(replace(first, members=first.members[:1]))
    assert profiles.asleep == {first.members[0].id}
    assert isinstance(profiles.asleep, frozenset)
