"""Tests of two routers' pickers with a real Redis: each router uses the other router's state."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client import CollectorRegistry

import builders
from dualmap.pools.pool import Pool, Prefix, Queue, Routing, Session, SessionMigration
from dualmap.receipt import Receipt
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.autoscaling.pool_demand import DemandUnknown, PoolDemand
from dualmap_extproc.request.observations import FanOut, Routed
from dualmap_extproc.request.picked import Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits, RedisSettings
from dualmap_extproc.store.exchange import Exchange
from dualmap_extproc.store.metrics import StoreMetrics
from dualmap_extproc.store.redis import RedisStore, loads_key, reports_key, updates_key
from dualmap_extproc.store.target import target_of
from redis_server import RedisServer, redis_server
from waiting import until

POOL = builders.pool()
# The key length is fixed, independently of the number of requests.
FIXED = builders.pool(
    routing=Routing(
        prefix=Prefix(max_blocks=POOL.routing.prefix.initial_blocks), queue=Queue(dispatch_window_s=float("inf"))
    )
)
# Sessions stay at their member.
STICKY = builders.pool(routing=Routing(session=Session(migration=SessionMigration(enabled=True))))


class Observer:
    """A subscriber that keeps the receipt of the last decision."""

    def __init__(self) -> None:
        self.receipt: Receipt | None = None

    def routed(self, routed: Routed) -> None:
        self.receipt = routed.decision.receipt


class Router:
    """A router without its ports."""

    def __init__(self, name: str, server: RedisServer, pool: Pool) -> None:
        self.demand = Demand()
        self.demand.set_pools((pool,))
        self.observer = Observer()
        observations = FanOut()
        self.demand.subscribe(observations)
        observations.subscribe(Routed, self.observer.routed)
        self.picker = Picker(Limits(), observations.report, id_prefix=name, replicated=True)
        self.clock = asyncio.get_running_loop().time
        self.picker.set_pools(self.clock(), (pool,))
        store = RedisStore(target_of(RedisSettings(url=server.url)))
        metrics = StoreMetrics(CollectorRegistry())
        self.pool_demand = PoolDemand(self.demand, self.picker.statuses, self.picker.pool, replicated=True)
        self.exchange = Exchange(
            self.picker,
            store,
            metrics,
            reporter=self.pool_demand,
            peer=name,
            clock=self.clock,
            shown=server.url,
        )

    def pick(self, text: str, **fields: str) -> str:
        """Route a request; return its id."""
        body = json.dumps({"model": builders.MODEL, "prompt": text, **fields}).encode()
        now = self.clock()
        picked = self.picker.pick(now, body, None, now, headers={}, resume=lambda _: None)
        assert isinstance(picked, Picked)
        return picked.request_id

    def explain(self, text: str) -> Receipt:
        """Route a request and end it at once; return its receipt."""
        self.picker.finished(self.clock(), self.pick(text), None)
        assert self.observer.receipt is not None
        return self.observer.receipt

    def in_flight(self, text: str) -> int:
        """Return the number of requests in flight at the pair of a text, as a decision uses it."""
        return sum(each.in_flight for each in self.explain(text).candidates)

    @property
    def sessions(self) -> int:
        return self.picker.statuses()[0].sessions


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@contextlib.asynccontextmanager
async def routers(server: RedisServer, *names: str, pool: Pool = POOL) -> AsyncIterator[list[Router]]:
    started = [Router(name, server, pool) for name in names]
    tasks = [asyncio.create_task(router.exchange.run()) for router in started]
    try:
        yield started
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for router in started:
            await router.exchange.leave()


@pytest.fixture(autouse=True)
def _emptied(server: RedisServer) -> None:
    with server.admin as admin:
        admin.flushall()


async def test_replicas_agree_on_the_key_of_a_hot_prefix(server):
    prompt = builders.text_of(2048, "hot")
    async with routers(server, "one", "other") as (one, other):
        assert other.explain(prompt).key.blocks == POOL.routing.prefix.initial_blocks
        for _ in range(100):
            one.explain(prompt)
        hot = one.explain(prompt).key
        assert hot.blocks > POOL.routing.prefix.initial_blocks
        await until(lambda: other.explain(prompt).key == hot)
        assert one.explain(prompt).pair == other.explain(prompt).pair


async def test_joining_replica_agrees_on_the_key_of_a_hot_prefix(server):
    prompt = builders.text_of(2048, "hot")
    async with routers(server, "one") as (one,):
        for _ in range(100):
            one.explain(prompt)
        with server.admin as admin:
            await until(lambda: admin.xlen(updates_key(POOL.id)) >= 1)
        async with routers(server, "late") as (late,):
            await until(lambda: late.explain(prompt).key == one.explain(prompt).key)


async def test_starting_replica_reads_old_placements_but_not_old_loads(server):
    prompt = builders.text_of(4096, "old")
    ages_s = {updates_key(POOL.id): 240, loads_key(POOL.id): 4}
    with server.admin as admin:
        async with routers(server, "one", pool=FIXED) as (one,):
            one.pick(prompt)
            await until(lambda: all(admin.xlen(key) for key in ages_s))
            streams = {key: admin.xrange(key) for key in ages_s}
            assert one.observer.receipt is not None
            chosen = one.observer.receipt.chosen
        seconds, _ = admin.time()
        for key, entries in streams.items():
            admin.delete(key)
            for number, (_, fields) in enumerate(entries, start=1):
                admin.xadd(key, fields, id=f"{1000 * (seconds - ages_s[key])}-{number}")
    late = Router("late", server, FIXED)
    assert await late.exchange.exchange()
    candidates = late.explain(prompt).candidates
    await late.exchange.leave()
    assert [each.id for each in candidates if each.matched_tokens] == [chosen]
    assert all(each.in_flight == 0 for each in candidates)


async def test_replica_reads_session_bindings_of_other_replicas(server):
    async with routers(server, "one", "other") as (one, other):
        one.pick("turn one", session_id="u")
        await until(lambda: other.sessions == 1)


async def test_joining_replica_continues_the_version_of_an_earlier_session(server):
    async with routers(server, "one") as (one,):
        one.pick("turn one", session_id="u")
        assert one.observer.receipt is not None
        pair = one.observer.receipt.pair
        with server.admin as admin:
            await until(lambda: len(admin.keys("*session*")) == 1 and admin.xlen(updates_key(POOL.id)) >= 1)
            (key,) = admin.keys("*session*")
    with server.admin as admin:
        admin.delete(updates_key(POOL.id))
        # The version is as if the session had moved twice, to a member that the joining router does not choose.
        host = next(each.id for each in POOL.members if each.id not in pair)
        admin.set(key, f"1 2 0 5000 {host}", ex=60)
        async with routers(server, "late", pool=STICKY) as (late,):
            late.pick("turn two", session_id="u")
            assert late.observer.receipt is not None
            chosen = late.observer.receipt.chosen
            # The turn was sent before the store answered, so it has moved the session a third time.
            await until(lambda: admin.get(key).startswith(b"1 3 ") and admin.get(key).endswith(chosen.encode()))
            late.pick("turn three", session_id="u")
            assert late.observer.receipt.chosen == chosen


async def test_replicas_sum_loads_until_a_replica_leaves(server):
    prompt = builders.text_of(4096, "busy")
    async with routers(server, "other", pool=FIXED) as (other,):
        async with routers(server, "one", pool=FIXED) as (one,):
            one.pick(prompt)
            await until(lambda: other.in_flight(prompt) == 1)
            assert sum(each.pending_tokens for each in other.explain(prompt).candidates) >= 4000
            one.pick(prompt)
            await until(lambda: other.in_flight(prompt) == 2)
        await until(lambda: other.in_flight(prompt) == 0)
        # This router's report does not contain other routers' requests.
        assert all(endpoint.in_flight == 0 for endpoint in other.picker.statuses()[0].endpoints)


async def test_every_replica_reports_the_total_demand(server):
    async with routers(server, "one", "other", "third", pool=FIXED) as started:
        one, other, third = started
        one.pick(builders.text_of(1000, "a"))
        other.pick(builders.text_of(1000, "b"))
        other.pick(builders.text_of(1000, "c"))

        await until(lambda: all(_in_flight(router) == 3 for router in started))
        assert third.pool_demand.active(FIXED.id)
        for router in started:
            assert router.pool_demand.total(FIXED.id).desired_replicas > 0.0


async def test_starting_replica_reports_at_least_the_previous_demand(server):
    async with routers(server, "before", pool=FIXED) as (before,):
        for number in range(5):
            before.pick(builders.text_of(1000, f"{number}"))
        with server.admin as admin:
            # The first report may be older than the requests; later reports contain the requests.
            await until(lambda: admin.xlen(reports_key(FIXED.id)) >= 3)
    async with routers(server, "after", pool=FIXED) as (after,):
        with pytest.raises(DemandUnknown):
            after.pool_demand.total(FIXED.id)
        await until(lambda: _in_flight(after) == 5)
        assert after.pool_demand.active(FIXED.id)


async def test_replicas_have_unknown_demand_while_redis_is_unavailable(server):
    async with routers(server, "one", "other", pool=FIXED) as started:
        one, other = started
        other.pick(builders.text_of(1000, "b"))
        await until(lambda: _in_flight(one) == 1)
        server.pause()
        try:
            await until(lambda: all(_in_flight(router) is None for router in started))
        finally:
            server.resume()
        await until(lambda: all(_in_flight(router) == 1 for router in started))


def _in_flight(router: Router) -> int | None:
    """Return a router's count of requests in flight at all routers, or None without a count."""
    try:
        return router.pool_demand.total(FIXED.id).in_flight
    except DemandUnknown:
        return None
