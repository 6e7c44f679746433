"""Requests with priorities: higher ones leave the queue first, the lowest lose their place in a full queue."""

from dataclasses import replace

from builders import request, text_of
from core.queue_pools import decided, slow_pool
from dualmap.pools.pool import Objectives, Pool
from dualmap.requests import Decision, Effects, Queued, Reason, Rejection
from dualmap.router import PoolRouter

BATCH, NORMAL, URGENT = -10, 0, 10


def rated(**queue: int) -> Pool:
    """Return a pool of one slow member with objectives."""
    pool = slow_pool(max_wait_s=1e9, **queue)
    return replace(pool, objectives=Objectives((("batch", BATCH), ("urgent", URGENT))))


def send(
    router: PoolRouter, id: str, priority: int = NORMAL, *, client: int = 0, now: float = 0.0
) -> Effects[Decision | Queued | Rejection]:
    plain = request(id, text_of(2000, f"prompt {id}"), now=now, client=client)
    return router.on_request(now, plain._replace(priority=priority))


def in_order(router: PoolRouter, *, first: str) -> list[str]:
    """Answer each request in turn; return the queued ones as they were dispatched."""
    order, current, now = list[str](), first, 0.0
    while True:
        now += 100.0
        released = decided(router.on_first_token(now, current))
        router.on_finished(now, current)
        if not released:
            return order
        (current,) = released
        order.append(current)


class TestTurns:
    def test_higher_priority_leaves_the_queue_first(self) -> None:
        router = PoolRouter(rated())
        send(router, "first")
        for name, priority in (("a", BATCH), ("b", NORMAL), ("c", URGENT), ("d", NORMAL), ("e", URGENT)):
            send(router, name, priority)
        assert in_order(router, first="first") == ["c", "e", "b", "d", "a"]

    def test_priority_precedes_the_fair_share_of_a_client(self) -> None:
        router = PoolRouter(rated())
        send(router, "first", client=1)
        for n in range(3):
            send(router, f"urgent {n}", URGENT, client=1)
        send(router, "light", client=2)
        assert in_order(router, first="first") == ["urgent 0", "urgent 1", "urgent 2", "light"]

    def test_prediction_leaves_out_requests_of_lower_priority(self) -> None:
        router = PoolRouter(rated())
        first = send(router, "first").answer
        assert isinstance(first, Decision)
        for n in range(5):
            send(router, f"batch {n}", BATCH)
        send(router, "urgent", URGENT)
        (urgent,) = router.on_first_token(2.0, "first").outcomes
        assert isinstance(urgent, Decision)
        assert urgent.request_id == "urgent"
        # Two prefills of two seconds: its own, and that of the request in flight.
        assert urgent.receipt.predicted_ttft_s < 5.0

    def test_requests_without_a_member_leave_by_priority(self) -> None:
        pool = rated(hold_when_empty=True)
        router = PoolRouter(replace(pool, members=()))
        for name, priority in (("a", BATCH), ("b", NORMAL), ("c", URGENT)):
            send(router, name, priority)
        assert decided(router.on_pool(1.0, pool)) == ["c"]


class TestFullQueue:
    def test_negative_priority_is_rejected_first(self) -> None:
        router = PoolRouter(rated(max_held=2))
        for name, priority in (("first", NORMAL), ("batch", BATCH), ("a", NORMAL)):
            send(router, name, priority)
        answer, outcomes = send(router, "b")
        assert isinstance(answer, Queued)
        assert [(each.request_id, each.reason) for each in outcomes if isinstance(each, Rejection)] == [
            ("batch", Reason.QUEUE_FULL)
        ]

    def test_lowest_priority_does_not_displace_another(self) -> None:
        router = PoolRouter(rated(max_held=2))
        for name in ("first", "a", "b"):
            send(router, name)
        answer, outcomes = send(router, "batch", BATCH, client=1)
        assert isinstance(answer, Rejection)
        assert outcomes == ()

    def test_equal_priorities_share_a_full_queue_between_clients(self) -> None:
        router = PoolRouter(rated(max_held=4))
        send(router, "first", client=1)
        for n in range(4):
            send(router, f"heavy {n}", client=1)
        answer, outcomes = send(router, "light", client=2)
        assert isinstance(answer, Queued)
        assert [each.request_id for each in outcomes] == ["heavy 3"]
        assert all(isinstance(each, Rejection) and each.limited for each in outcomes)

    def test_displaced_request_of_the_same_client_is_not_limited(self) -> None:
        router = PoolRouter(rated(max_held=1))
        send(router, "first")
        send(router, "batch", BATCH)
        (rejected,) = send(router, "urgent", URGENT).outcomes
        assert isinstance(rejected, Rejection)
        assert not rejected.limited
