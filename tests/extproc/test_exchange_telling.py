"""Tests of a router's exchange with the store: the contents and times of updates, and the updates that a joining
replica reads.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dualmap.replicas.peers import PEER_TTL_S
from dualmap.replicas.update import HotnessCounts, Placement, SharedLoad
from dualmap_extproc.store.contract import PAGE_ENTRIES, Answer, Failure, Post, Question, StoreError
from dualmap_extproc.store.exchange import INTERVAL_S, SHORTEST_HISTORY_S
from dualmap_extproc.store.memory import MemoryStore
from dualmap_extproc.store.unsent import HEARTBEAT_S, LOADS_INTERVAL_S
from extproc.exchanges import LOADS, POOL, QUIET, REPORT, Clock, Joined, binding

NO_LOADS = replace(QUIET, loads={})


class Refusing(MemoryStore):
    """A replica that sends its updates and receives no updates."""

    refuses = True

    async def publish(self, peer: str, posts: Sequence[Post]) -> None:
        if self.refuses:
            raise StoreError(Failure.FULL, "full")
        await super().publish(peer, posts)


class TestExchangedUpdates:
    """The store is in memory and uses the test's clock."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def pair(self, clock: Clock) -> tuple[Joined, Joined]:
        store = MemoryStore(clock)
        return Joined("one", store, clock), Joined("other", store, clock)

    async def test_demand_report_is_sent_once_and_shows_the_replica(self, pair, clock):
        one, other = pair
        one.replica.due[POOL.id] = REPORT
        for _ in range(3):
            await one.exchange.exchange()
            clock.now += 0.25
            await other.exchange.exchange()
        assert other.replica.reports_heard == [(POOL.id, "one", REPORT, 0.25)]
        assert one.replica.reports_heard == []
        assert one.replica.due == {}
        assert {(pool, peer) for pool, peer, _ in other.replica.peers} == {(POOL.id, "one")}
        assert one.replica.exchanges == 3

    async def test_failed_demand_report_is_sent_again(self, clock):
        store = Refusing(clock)
        one = Joined("one", store, clock)
        one.replica.due[POOL.id] = REPORT
        assert not await one.exchange.exchange()
        assert one.replica.due == {POOL.id: REPORT}
        assert one.replica.exchanges == 0
        store.refuses = False
        assert await one.exchange.exchange()
        assert one.replica.due == {}
        assert one.replica.exchanges == 1

    async def test_replication_update_reaches_only_the_other_replica(self, pair):
        one, other = pair
        one.replica.tell(placements=(Placement(endpoint="10.0.0.1:8000", hashes=(1, 2)),), loads=LOADS)
        one.replica.tell_requests(3)
        assert await one.exchange.exchange()
        assert await other.exchange.exchange()
        assert await one.exchange.exchange()
        assert [(pool, peer, age_s) for pool, peer, _, age_s in other.replica.heard] == [(POOL.id, "one", 0.0)] * 2
        # First the update with the loads arrives, then the update with hotness and placements, which has no loads.
        assert [update.loads for _, _, update, _ in other.replica.heard] == [LOADS, None]
        assert other.replica.heard[0][2] == replace(QUIET, loads=LOADS)
        update = other.replica.heard[1][2]
        assert update.hotness == HotnessCounts(requests=3, nodes={7: 3})
        assert update.placements[0].hashes == (1, 2)
        assert all(peer == "other" for _, peer, _, _ in one.replica.heard)

    async def test_joining_replica_reads_minutes_of_updates_and_fresh_loads(self, pair, clock):
        one, other = pair
        for number in range(1, 7):
            one.replica.tell(placements=(Placement(endpoint=f"10.0.0.{number}:8000", hashes=(number,)),), loads=LOADS)
            await one.exchange.exchange()
            clock.now += 80.0
        clock.now -= 78.0
        await other.exchange.exchange()
        heard = [(update.placements, update.loads, age_s) for _, _, update, age_s in other.replica.heard]
        assert heard[0] == ((), LOADS, 2.0)
        told = [(placements[0].hashes[0], loads, age_s) for placements, loads, age_s in heard[1:]]
        # The oldest update is first; old updates contain no loads.
        assert told == [(3, None, 242.0), (4, None, 162.0), (5, None, 82.0), (6, None, 2.0)]
        late = Joined("late", one.store, clock)
        clock.now += PEER_TTL_S - 2.0
        await late.exchange.exchange()
        assert all(not update.loads for _, _, update, _ in late.replica.heard)

    async def test_exchange_has_read_history_after_the_store_answered(self, clock):
        class Lost(MemoryStore):
            async def read(self, peer: str, questions: Sequence[Question]) -> list[Answer]:
                raise StoreError(Failure.CONNECTION, "lost")

        lost, joined = Joined("one", Lost(clock), clock), Joined("one", MemoryStore(clock), clock)
        await lost.exchange.exchange()
        assert not lost.exchange.has_read_history
        assert not joined.exchange.has_read_history
        await joined.exchange.exchange()
        assert joined.exchange.has_read_history

    async def test_joining_replica_reads_the_complete_hotness_window(self, clock):
        routing = replace(POOL.routing, prefix=replace(POOL.routing.prefix, window_s=2 * SHORTEST_HISTORY_S))
        pool = replace(POOL, routing=routing)
        store = MemoryStore(clock)
        one, other = Joined("one", store, clock, pool), Joined("other", store, clock, pool)
        for requests in (1, 2, 3):
            one.replica.tell_requests(requests)
            await one.exchange.exchange()
            clock.now += SHORTEST_HISTORY_S + 1.0
        await other.exchange.exchange()
        assert other.replica.requests == 3
        clock.now -= 2.0
        late = Joined("late", store, clock, pool)
        await late.exchange.exchange()
        assert late.replica.requests == 2 + 3

    async def test_idle_replica_sends_a_heartbeat_every_second(self, pair, clock):
        one, other = pair
        for _ in range(20):
            await one.exchange.exchange()
            await other.exchange.exchange()
            assert all(update == NO_LOADS for _, _, update, _ in other.replica.heard)
            clock.now += HEARTBEAT_S / 8
        assert len(other.replica.heard) == 3

    async def test_replica_loads_are_sent_on_change_and_as_heartbeats(self, pair, clock):
        one, other = pair
        for loads in (LOADS, LOADS, {}, {}, LOADS):
            one.replica.tell(loads=loads)
            await one.exchange.exchange()
            await other.exchange.exchange()
            clock.now += LOADS_INTERVAL_S
        assert [update.loads for _, _, update, _ in other.replica.heard] == [LOADS, {}, LOADS]

    async def test_replica_loads_are_sent_at_most_four_times_a_second(self, pair, clock):
        one, other = pair
        told_s: list[float] = []
        for tick in range(64):
            one.replica.tell(loads={"m-0": SharedLoad(in_flight=tick)})
            one.replica.tell_requests(1)
            await one.exchange.exchange()
            (answer,) = await one.store.read("listener", [Question(pool=POOL.id, window_s=0.0)])
            told_s += [clock.now for entry in answer.loads if entry.age_s == 0.0]
            clock.now += 1 / 16
        assert told_s == [1000.0 + LOADS_INTERVAL_S * number for number in range(16)]
        # Every exchange sends updates.
        await other.exchange.exchange()
        assert other.replica.requests == 64

    async def test_replication_update_without_loads_keeps_the_last_loads(self, pair, clock):
        one, other = pair
        one.replica.tell(loads=LOADS)
        for _ in range(3):
            one.replica.tell_requests(1)
            await one.exchange.exchange()
            await other.exchange.exchange()
            clock.now += LOADS_INTERVAL_S / 4
        assert [update.loads for _, _, update, _ in other.replica.heard] == [LOADS, None, None, None]

    async def test_session_binding_that_loses_a_conflict_is_replaced(self, pair):
        one, other = pair
        one.replica.tell(bindings=(binding("m-0"),))
        other.replica.tell(bindings=(binding("m-1"), binding("m-1", session=2)))
        await one.exchange.exchange()
        await other.exchange.exchange()
        await one.exchange.exchange()
        assert other.replica.hosts == ["m-0"]
        assert one.replica.hosts == []
        told = [(each.session, each.host) for _, _, update, _ in one.replica.heard for each in update.bindings]
        assert told == [(2, "m-1")]
        assert [each.host for _, _, update, _ in other.replica.heard for each in update.bindings] == ["m-0"]

    async def test_session_binding_moved_twice_sends_the_last_move(self, pair):
        one, other = pair
        one.replica.tell(bindings=(binding("m-0"), binding("m-2", version=1)))
        await one.exchange.exchange()
        other.replica.tell(wanted=(1,))
        await other.exchange.exchange()
        assert other.replica.hosts == ["m-2"]

    async def test_requested_sessions_are_answered_once(self, pair):
        one, other = pair
        one.replica.tell(bindings=(binding("m-0"),))
        await one.exchange.exchange()
        other.replica.tell(wanted=(1, 2))
        for _ in range(3):
            await other.exchange.exchange()
        assert other.replica.hosts == ["m-0"]

    async def test_exchange_includes_added_and_excludes_removed_pools(self, clock):
        store = MemoryStore(clock)
        a, b = replace(POOL, name="a"), replace(POOL, name="b")
        one, other = Joined("one", store, clock, a, b), Joined("other", store, clock, b)
        for pool in (a, b):
            one.replica.tell(pool, hotness=HotnessCounts(requests=1, nodes={}))
        await one.exchange.exchange()
        await other.exchange.exchange()
        assert {pool for pool, *_ in other.replica.heard} == {b.id}
        other.replica.pools = (a,)
        other.replica.update = {a.id: QUIET}
        await other.exchange.exchange()
        assert {pool for pool, *_ in other.replica.heard} == {b.id, a.id}

    async def test_leaving_replica_publishes_empty_loads(self, pair):
        one, other = pair
        one.replica.tell(loads=LOADS)
        await one.exchange.exchange()
        await other.exchange.exchange()
        await one.exchange.leave()
        await other.exchange.exchange()
        assert [update.loads for _, _, update, _ in other.replica.heard] == [LOADS, {}]

    async def test_long_update_history_is_applied_between_requests(self, pair):
        one, other = pair
        turns = 0

        async def request() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        for _ in range(200):
            one.replica.tell_requests(1)
            await one.exchange.exchange()
        task = asyncio.create_task(request())
        await other.exchange.exchange()
        task.cancel()
        assert other.replica.requests == 200
        assert turns >= 200 // 4

    async def test_update_history_of_many_pages_is_read_in_one_exchange(self, pair):
        one, other = pair
        for _ in range(3 * PAGE_ENTRIES + 1):
            one.replica.tell_requests(1)
            await one.exchange.exchange()
        await other.exchange.exchange()
        assert other.replica.requests == 3 * PAGE_ENTRIES + 1

    async def test_router_sends_updates_while_reading_a_long_history(self, pair, clock):
        one, other = pair
        for _ in range(3 * PAGE_ENTRIES):
            one.replica.tell_requests(1)
            await one.exchange.exchange()
        taken = other.replica.on_update

        def takes_long(*arguments: object) -> None:
            clock.now += INTERVAL_S / PAGE_ENTRIES
            taken(*arguments)

        other.replica.on_update = takes_long
        other.replica.tell_requests(1000)
        assert await other.exchange.exchange()
        assert other.replica.requests == PAGE_ENTRIES
        await one.exchange.exchange()
        assert one.replica.requests == 1000
        while other.replica.requests < 3 * PAGE_ENTRIES:
            assert await other.exchange.exchange()
