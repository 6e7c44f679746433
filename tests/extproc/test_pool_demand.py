"""Tests of a pool's demand at several routers: pickers, their exchanges and one store in memory, with a simulated
clock.
"""

import json
from collections.abc import Sequence
from itertools import count

import pytest
from prometheus_client import CollectorRegistry

import builders
from dualmap.engines.profile import EngineProfile
from dualmap.pools.pool import Pool
from dualmap.replicas.peers import PEER_TTL_S
from dualmap.scaling.reports import REMEMBERED_S, Report, Share
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.autoscaling.pool_demand import REPORT_INTERVAL_S, DemandUnknown, PoolDemand
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.store.contract import Answer, Failure, Post, Question, StoreError
from dualmap_extproc.store.exchange import INTERVAL_S, Exchange
from dualmap_extproc.store.memory import MemoryStore
from dualmap_extproc.store.metrics import StoreMetrics
from extproc.envoy_messages import crowded_pool

POOL = builders.pool(4)
EMPTY = crowded_pool("qwen", members=0, hold_when_empty=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shelf(MemoryStore):
    """The routers' shared store; ``down`` makes the store unreachable, ``full`` makes all writes fail."""

    down = False
    full = False

    async def read(self, peer: str, questions: Sequence[Question]) -> tuple[Answer, ...]:
        if self.down:
            raise StoreError(Failure.CONNECTION, "away")
        return await super().read(peer, questions)

    async def publish(self, peer: str, posts: Sequence[Post]) -> None:
        if self.full:
            raise StoreError(Failure.FULL, "full")
        await super().publish(peer, posts)


class Router:
    """A router without its ports."""

    def __init__(self, name: str, clock: Clock, store: MemoryStore | None, pool: Pool) -> None:
        self.clock = clock
        self.pool = pool
        self.name = name
        self._asked = count()
        demand = Demand(clock)
        demand.set_pools((pool,))
        observations = FanOut()
        demand.subscribe(observations)
        self.traffic = demand
        self.picker = Picker(Limits(), observations.report, id_prefix=name, replicated=store is not None)
        self.picker.set_pools(clock(), (pool,))
        self.demand = PoolDemand(
            demand, self.picker.statuses, self.picker.pool, replicated=store is not None, clock=clock
        )
        self.changed: list[str] = []
        self.demand.on_change(self.changed.append)
        self.exchange = Exchange(
            self.picker,
            store or MemoryStore(clock),
            StoreMetrics(CollectorRegistry()),
            reporter=self.demand,
            peer=name,
            clock=clock,
            shown=name,
        )

    def ask(self, tokens: int = 1000) -> Picked | AnswerLater:
        now = self.clock()
        prompt = builders.text_of(tokens, f"{self.name} {next(self._asked)}")
        body = json.dumps({"model": self.pool.model.name, "prompt": prompt, "stream": True}).encode()
        outcome = self.picker.pick(now, body, None, now, headers={}, resume=lambda _: None)
        assert isinstance(outcome, Picked | AnswerLater)
        return outcome

    @property
    def desired(self) -> float:
        return self.demand.total(self.pool.id).desired_replicas

    @property
    def wish(self) -> float:
        """Return the router's own demand, as in a scrape."""
        (status,) = self.picker.statuses(None)
        return self.traffic.signals((status,))[self.pool.id].desired_replicas

    @property
    def active(self) -> bool:
        return self.demand.active(self.pool.id)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Shelf:
    return Shelf(clock)


async def pass_time(clock: Clock, seconds: float, *routers: Router, load: dict[Router, int] | None = None) -> None:
    """Advance the time while the routers exchange updates; each router receives ``load`` requests per second."""
    for _ in range(round(seconds / INTERVAL_S)):
        clock.now += INTERVAL_S
        for router, requests in (load or {}).items():
            if round(clock.now / INTERVAL_S) % round(1 / INTERVAL_S) == 0:
                for _ in range(requests):
                    picked = router.ask()
                    router.picker.first_token(clock(), picked.request_id)
                    router.picker.finished(clock(), picked.request_id, None)
        for router in routers:
            router.picker.on_deadline(clock())
            await router.exchange.exchange()


class TestDemandSum:
    async def test_demand_of_three_routers_is_the_same_sum_at_every_router(self, clock, store):
        routers = [Router(name, clock, store, POOL) for name in "abc"]
        for router, requests in zip(routers, (1, 2, 3), strict=True):
            for _ in range(requests):
                router.ask()
        await pass_time(clock, 1.5, *routers)

        totals = [router.demand.total(POOL.id) for router in routers]
        assert totals[0] == totals[1] == totals[2]
        assert totals[0].in_flight == 6
        assert totals[0].pending_prefill_tokens == 6000

    async def test_demand_sum_equals_demand_of_a_router_with_all_traffic(self, clock, store):
        alone = Router("alone", clock, None, POOL)
        pair = [Router(name, clock, store, POOL) for name in "ab"]
        await pass_time(clock, 70.0, *pair, load={alone: 40, pair[0]: 10, pair[1]: 30})
        assert alone.desired > 1.0
        assert pair[0].desired == pytest.approx(pair[1].desired, rel=0.02)
        assert pair[0].desired == pytest.approx(alone.desired, rel=0.05)

    async def test_demand_attainment_is_weighted_by_first_tokens(self, clock, store):
        one, other = (Router(name, clock, store, POOL) for name in "ab")
        for late, number, router in ((False, 3, one), (True, 1, other)):
            asked = [router.ask() for _ in range(number)]
            clock.now += POOL.slo.ttft_s + 1.0 if late else 0.0
            for picked in asked:
                router.picker.first_token(clock(), picked.request_id)
        await pass_time(clock, 1.5, one, other)
        assert one.demand.total(POOL.id).slo_attainment == other.demand.total(POOL.id).slo_attainment == 0.75

    async def test_demand_shows_missed_slo_with_few_first_tokens_per_router(self, clock, store):
        routers = [Router(name, clock, store, POOL) for name in "ab"]
        late: list[tuple[float, Router, str]] = []
        for second in range(150):
            if second % 5 == 0:
                late += [(clock() + POOL.slo.ttft_s + 1.0, router, router.ask().request_id) for router in routers]
            while late[0][0] <= clock():
                _, router, request_id = late.pop(0)
                router.picker.first_token(clock(), request_id)
                router.picker.finished(clock(), request_id, None)
            await pass_time(clock, 1.0, *routers)
        # Each router has twelve requests per minute, too few for a router alone to add instances.
        assert all(router.desired > len(POOL.members) for router in routers)

    async def test_demand_is_reported_once_a_second(self, clock, store):
        router = Router("a", clock, store, POOL)
        told: list[Post] = []

        async def publish(peer: str, posts: Sequence[Post]) -> None:
            told.extend(posts)

        store.publish = publish
        await pass_time(clock, 10 * REPORT_INTERVAL_S, router)
        assert sum(post.report is not None for post in told) == 10

    async def test_demand_of_a_removed_pool_is_not_reported(self, clock, store):
        router, other = Router("a", clock, store, POOL), Router("b", clock, store, POOL)
        await pass_time(clock, 0.1, router, other)
        router.picker.set_pools(clock(), ())
        assert router.demand.reports(()) == {}
        assert not router.demand.knows(POOL.id)

    async def test_demand_of_another_router_counts_up_to_the_discovered_length(self, clock, store):
        router = Router("a", clock, store, POOL)
        false = Share(pending_prefill_tokens=2**40, in_flight=2, held=1)
        router.demand.on_report(POOL.id, "b", Report(own=false, pool=false), 0.0)
        router.demand.exchanged()
        assert router.demand.total(POOL.id).pending_prefill_tokens == 3 * 131_072
        router.picker.on_profile(clock(), POOL.id, "m-0", EngineProfile(max_model_len=200_000))
        router.demand.on_report(POOL.id, "b", Report(own=false, pool=false), 0.0)
        assert router.demand.total(POOL.id).pending_prefill_tokens == 3 * 200_000


class TestStoreUnavailable:
    """Tests of two routers that miss the SLO with four instances. A router without the store must not add the other
    router's demand to its own.
    """

    async def late(
        self, clock: Clock, store: Shelf, names: str, *, away_s: float, trouble: str = "down", from_s: float = 120.0
    ) -> list[float]:
        """Return the sum of the routers' own desired replicas every second; the store fails at ``from_s`` for
        ``away_s``.
        """
        routers = [Router(name, clock, store, POOL) for name in names]
        asked: list[tuple[float, Router, str]] = []
        wishes = []
        for second in range(200):
            setattr(store, trouble, from_s <= second < from_s + away_s)
            # One of eight first tokens is late. This is slightly more than the SLO allows, so autoscaling adds only a
            # few instances per minute.
            answered_s = clock() + (POOL.slo.ttft_s + 1.0 if second % 8 == 0 else 0.0)
            asked += [(answered_s, router, router.ask().request_id) for router in routers]
            for each in [each for each in asked if each[0] <= clock()]:
                asked.remove(each)
                _, router, request_id = each
                router.picker.first_token(clock(), request_id)
                router.picker.finished(clock(), request_id, None)
            await pass_time(clock, 1.0, *routers)
            wishes.append(sum(router.wish for router in routers))
        return wishes

    @pytest.mark.parametrize("trouble", ["down", "full"])
    @pytest.mark.parametrize("away_s", [5.0, 80.0])
    async def test_demand_does_not_grow_while_the_store_is_unavailable(self, clock, store, away_s, trouble):
        calm = Clock()
        undisturbed = await self.late(calm, Shelf(calm), "ab", away_s=0.0)
        wishes = await self.late(clock, store, "ab", away_s=away_s, trouble=trouble)
        assert 4.0 <= wishes[119] < 4.2
        # The learnt speed still changes the wish a little.
        assert max(wishes[120:]) <= max(undisturbed[120:]) * 1.02

    async def test_demand_of_new_router_adds_nothing_without_the_store(self, clock, store):
        wishes = await self.late(clock, store, "ab", away_s=200.0, from_s=0.0)
        assert max(wishes) < 3.0

    async def test_demand_of_single_router_grows_despite_unavailable_store(self, clock, store):
        assert (await self.late(clock, store, "a", away_s=80.0))[-1] > len(POOL.members)


class TestUnknownDemand:
    async def test_demand_without_configured_store_is_known_at_once(self, clock):
        router = Router("a", clock, None, POOL)
        assert (router.desired, router.active) == (0.0, False)
        router.ask()
        assert router.desired > 0.0
        assert router.active

    async def test_demand_of_a_new_router_is_unknown_until_an_exchange(self, clock, store):
        busy, late = Router("busy", clock, store, POOL), Router("late", clock, store, POOL)
        busy.ask()
        await pass_time(clock, 0.1, busy)
        for unknown in (lambda: late.desired, lambda: late.active):
            with pytest.raises(DemandUnknown, match="shared state is unreachable"):
                unknown()
        await pass_time(clock, 0.1, late)
        assert late.desired == busy.desired > 0.0

    @pytest.mark.parametrize("trouble", ["down", "full"])
    async def test_demand_is_unknown_after_a_long_loss_of_the_store(self, clock, store, trouble):
        router = Router("a", clock, store, POOL)
        await pass_time(clock, 1.0, router)
        setattr(store, trouble, True)
        await pass_time(clock, PEER_TTL_S - 0.1, router)
        assert router.desired == 0.0
        await pass_time(clock, 2 * REPORT_INTERVAL_S, router)
        with pytest.raises(DemandUnknown):
            assert router.desired
        setattr(store, trouble, False)
        await pass_time(clock, 0.1, router)
        assert router.desired == 0.0

    async def test_unknown_demand_still_shows_own_activity(self, clock, store):
        store.down = True
        router = Router("a", clock, store, EMPTY)
        router.ask()
        await pass_time(clock, 10.0, router)
        assert router.active

    async def test_demand_is_unknown_while_an_older_router_reports_nothing(self, clock, store):
        router = Router("a", clock, store, POOL)
        await store.publish("older", [Post(pool=POOL.id, keep_s=60.0, loads={})])
        await pass_time(clock, 0.1, router)
        with pytest.raises(DemandUnknown, match="an older version"):
            assert router.desired
        await pass_time(clock, PEER_TTL_S, router)
        assert router.desired == 0.0


class TestStoppedRouter:
    """Tests of two or three routers under load after a kill of one router; its requests move to the other routers or to
    its restart.
    """

    async def test_demand_does_not_drop_if_one_of_three_routers_stops(self, clock, store):
        a, b, c = (Router(name, clock, store, POOL) for name in "abc")
        await pass_time(clock, 70.0, a, b, c, load={a: 10, b: 10, c: 10})
        before = a.desired
        for _ in range(100):
            await pass_time(clock, 1.0, a, b, load={a: 15, b: 15})
            assert before * 0.95 <= a.desired <= before * 1.15
            assert b.desired == pytest.approx(a.desired, rel=0.05)

    async def test_demand_does_not_drop_if_the_only_router_is_replaced(self, clock, store):
        old = Router("old", clock, store, POOL)
        await pass_time(clock, 70.0, old, load={old: 20})
        before = old.desired
        clock.now += 5.0
        new = Router("new", clock, store, POOL)
        await pass_time(clock, 0.1, new)
        for _ in range(100):
            assert before * 0.95 <= new.desired <= before * 1.15
            await pass_time(clock, 1.0, new, load={new: 20})

    async def test_demand_does_not_drop_in_a_rolling_router_update(self, clock, store):
        running = [Router(name, clock, store, POOL) for name in ("a0", "b0", "c0")]
        await pass_time(clock, 70.0, *running, load=dict.fromkeys(running, 10))
        before = running[0].desired
        for turn in range(3):
            stopped = running.pop(0)
            await stopped.exchange.leave()
            await pass_time(clock, 5.0, *running, load=dict.fromkeys(running, 15))
            running.append(Router(f"{turn}-1", clock, store, POOL))
            for _ in range(20):
                await pass_time(clock, 1.0, *running, load=dict.fromkeys(running, 10))
                assert all(before * 0.95 <= router.desired <= before * 1.3 for router in running)
        await pass_time(clock, 2 * REMEMBERED_S, *running, load=dict.fromkeys(running, 10))
        assert running[0].desired == pytest.approx(before, rel=0.1)


class TestActivation:
    async def test_demand_reports_a_queued_request_at_once(self, clock, store):
        one, other = (Router(name, clock, store, EMPTY) for name in "ab")
        await pass_time(clock, 5.0, one, other)
        assert not one.active
        assert not other.active
        one.changed.clear()

        assert isinstance(one.ask(), AnswerLater)

        assert one.changed == [EMPTY.id]
        assert one.active
        assert 0.0 < one.desired < 1.0
        assert one.demand.total(EMPTY.id).held == 1
        await pass_time(clock, 2 * INTERVAL_S, one, other)
        assert other.changed == [EMPTY.id]
        assert other.active

    async def test_demand_rejected_or_aborted_request_activates_the_pool(self, clock):
        for pool in (crowded_pool("qwen", members=0), crowded_pool("qwen", members=0, hold_when_empty=True)):
            router = Router("a", clock, None, pool)
            assert not router.active
            body = json.dumps({"model": pool.model.name, "prompt": "hello"}).encode()
            outcome = router.picker.pick(clock(), body, None, clock(), headers={}, resume=lambda _: None)
            if isinstance(outcome, AnswerLater):
                router.picker.aborted(clock(), outcome.request_id)
            assert router.changed == [pool.id]
            assert router.active
            clock.now += REMEMBERED_S - 6.0
            assert router.active
            clock.now += 6.0
            assert not router.active

    async def test_demand_request_without_prompt_activates_no_pool(self, clock):
        """The requests are health checks and model lists, which clients send constantly."""
        router = Router("a", clock, None, EMPTY)
        router.picker.pick_bodiless(clock(), None)
        assert (router.changed, router.active) == ([], False)

    async def test_demand_long_response_keeps_the_pool_active(self, clock):
        router = Router("a", clock, None, POOL)
        picked = router.ask()
        router.picker.first_token(clock(), picked.request_id)
        clock.now += 300.0
        assert router.active
        router.picker.finished(clock(), picked.request_id, None)
        assert not router.active

    async def test_demand_activity_is_reported_again_after_a_pause(self, clock):
        router = Router("a", clock, None, POOL)
        for _ in range(2):
            for _ in range(3):
                router.picker.finished(clock(), router.ask().request_id, None)
            assert router.active
            clock.now += REMEMBERED_S
            assert not router.active
        assert router.changed == [POOL.id] * 2
