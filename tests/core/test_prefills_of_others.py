"""Tests of a prefill that waits behind prefills of other replicas: it is no stall of the member."""

from builders import pool, request, text_of
from dualmap.pools.pool import Engine, Queue, Routing
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedLoad
from dualmap.router import PoolRouter

POOL = pool(1, engine=Engine(prefill_tokens_per_second=1000.0), routing=Routing(queue=Queue(dispatch_window_s=1e9)))
(MEMBER,) = POOL.members
STALL_S = POOL.routing.rebalance.decode_stall_s


def router_with_prefill() -> PoolRouter:
    """Return a router that sent a prefill of about one second to the member at time 0."""
    router = PoolRouter(POOL, replicated=True)
    router.on_request(0.0, request("1", text_of(1000, "a")))
    return router


def hear(router: PoolRouter, now: float, pending_tokens: int) -> None:
    load = SharedLoad(pending_prefill_tokens=pending_tokens, in_flight=3)
    update = ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads={MEMBER.id: load})
    router.on_update(now, "peer", update, 0.0)


def backlog_s(router: PoolRouter, now: float) -> float:
    return router._fleet.backlog_s(now, MEMBER.id)


def test_prefill_behind_prefills_of_others_is_no_stall() -> None:
    router = router_with_prefill()
    for second in range(10):
        hear(router, float(second), 20_000 - 1000 * second)
    assert backlog_s(router, 9.5) == 0.0


def test_member_without_ended_prefills_of_others_is_stalled() -> None:
    router = router_with_prefill()
    for second in range(10):
        hear(router, float(second), 20_000 + 1000 * second)
    assert backlog_s(router, 9.5) == 9.5


def test_stall_begins_after_the_last_prefill_of_others() -> None:
    router = router_with_prefill()
    hear(router, 1.0, 3000)
    hear(router, 5.0, 2000)
    assert backlog_s(router, 5.0 + STALL_S + 0.9) == 0.0
    assert backlog_s(router, 5.0 + STALL_S + 1.5) == STALL_S + 1.5


def test_late_report_of_others_changes_no_stall() -> None:
    router = router_with_prefill()
    hear(router, 1.0, 3000)
    router.on_update(
        9.0, "peer", ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads={MEMBER.id: SharedLoad()}), 8.5
    )
    assert backlog_s(router, 9.5) == 9.5
