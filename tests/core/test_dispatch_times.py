"""Tests that the heap of dispatch times equals a search of all members."""

from dataclasses import replace
from random import Random

import pytest

from builders import pool, request, text_of
from dualmap.pools.pool import Engine, Queue, Routing
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedLoad
from dualmap.router import PoolRouter

SLO_S = 5.0


@pytest.mark.parametrize("peers", [False, True], ids=["alone", "with a peer"])
@pytest.mark.parametrize("seed", range(5))
def test_dispatch_times_return_the_earliest_time_of_all_members(seed: int, peers: bool) -> None:
    chance, now = Random(seed), 0.0
    engine = Engine(prefill_tokens_per_second=1000.0, kv_tokens=20_000)
    routing = Routing(policy="round_robin", queue=Queue(dispatch_window_s=1.0, max_wait_s=1e9, max_held=10_000))
    router = PoolRouter(replace(pool(16, routing=routing, engine=engine)))
    loads = dict(router._fleet._ledger.loads)
    seen = 0
    for number in range(600):
        now += chance.uniform(0.0, 0.5)
        router.on_request(now, request(str(number), text_of(chance.randint(100, 5000), str(number)), now=now))
        event = chance.choice([router.on_first_token, router.on_finished, router.on_aborted, router.on_heard])
        event(now, str(chance.randint(0, number)))
        if not number % 7:
            router.on_deadline(now)
        if peers and not number % 5:
            told = {member: SharedLoad(backlog_s=chance.uniform(0.0, 2.0)) for member in chance.sample(list(loads), 8)}
            router.on_update(now, "peer", ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads=told), 0.0)
        released_s = router._dispatcher._released_s
        queues = [load for load in loads.values() if load.queue]
        asked = [load.dispatches_s(1.0, after_s=released_s, share_after_s=SLO_S / 2) for load in queues]
        expected = min((each for each in asked if each is not None), default=None)
        assert router._fleet.capacity.next_dispatch_s(after_s=released_s) == expected
        seen += expected is not None
    assert seen > 100
