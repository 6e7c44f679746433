"""Tests of the queue's bounds: number of requests and waiting time, also in a pool without members."""

from dataclasses import replace

from builders import members, request
from core.queue_pools import ask, decided, held, slow_pool
from dualmap.pools.pool import MemberState
from dualmap.requests import Decision, Queued, Reason, Rejection
from dualmap.router import PoolRouter


class TestBounds:
    def test_full_queue_rejects_requests(self) -> None:
        router = PoolRouter(slow_pool(max_held=2))
        outcomes = [ask(router, str(n)) for n in range(4)]
        assert [type(each) for each in outcomes] == [Decision, Queued, Queued, Rejection]
        refusal = outcomes[-1]
        assert isinstance(refusal, Rejection)
        assert refusal.reason is Reason.QUEUE_FULL
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s > 5.0

    def test_queue_rejection_retry_after_is_at_most_the_maximum_wait(self) -> None:
        router = PoolRouter(slow_pool(max_held=1, max_wait_s=3.0))
        for n in range(2):
            ask(router, str(n), 40_000)
        full = ask(router, "full")
        (late,) = router.on_deadline(3.0).outcomes
        for refusal in (full, late):
            assert isinstance(refusal, Rejection)
            assert refusal.retry_after_s == 3.0

    def test_queued_request_is_rejected_after_the_maximum_wait(self) -> None:
        router = PoolRouter(slow_pool(max_wait_s=3.0))
        ask(router, "1", 20_000)
        ask(router, "2")
        ask(router, "3", now=1.0)
        assert router.next_deadline() == 3.0
        (refusal,) = router.on_deadline(3.0).outcomes
        assert isinstance(refusal, Rejection)
        assert (refusal.request_id, refusal.reason) == ("2", Reason.WAITED_TOO_LONG)
        assert [each.request_id for each in router.on_deadline(4.0).outcomes] == ["3"]
        assert held(router) == 0

    def test_aborted_request_is_removed_from_the_queue(self) -> None:
        router = PoolRouter(slow_pool(max_held=1))
        ask(router, "1")
        ask(router, "2")
        assert isinstance(ask(router, "3"), Rejection)
        assert router.on_aborted(0.5, "2").answer is None
        assert held(router) == 0
        assert isinstance(ask(router, "4"), Queued)
        assert decided(router.on_first_token(2.0, "1")) == ["4"]

    def test_abort_in_flight_dispatches_the_next_queued_request(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1", 20_000)
        ask(router, "2")
        assert decided(router.on_aborted(0.5, "1")) == ["2"]


class TestEmptyPool:
    def test_empty_pool_queues_requests_until_the_first_member(self) -> None:
        router = PoolRouter(replace(slow_pool(0), routing=slow_pool(hold_when_empty=True).routing))
        for n in range(3):
            assert isinstance(ask(router, str(n)), Queued)
        assert held(router) == 3
        first = decided(router.on_pool(5.0, replace(router.pool, members=members(2))))
        assert first
        assert held(router) == 3 - len(first)

    def test_empty_pool_rejects_request_after_the_maximum_wait(self) -> None:
        router = PoolRouter(replace(slow_pool(0), routing=slow_pool(hold_when_empty=True, max_wait_s=2.0).routing))
        ask(router, "1")
        assert router.on_deadline(2.0).outcomes == (
            Rejection(request_id="1", reason=Reason.NO_ENDPOINT, retry_after_s=2.0),
        )

    def test_empty_pool_with_full_queue_rejects_requests(self) -> None:
        routing = slow_pool(hold_when_empty=True, max_held=1, max_wait_s=9.0).routing
        router = PoolRouter(replace(slow_pool(0), routing=routing))
        ask(router, "1")
        assert ask(router, "2") == Rejection(request_id="2", reason=Reason.NO_ENDPOINT, retry_after_s=9.0)

    def test_empty_pool_counts_queued_prompts(self) -> None:
        router = PoolRouter(replace(slow_pool(0), routing=slow_pool(hold_when_empty=True, max_wait_s=2.0).routing))
        ask(router, "1", 300)
        ask(router, "2", 500, now=1.0)
        assert router.status().unplaced_prefill_tokens == 800
        router.on_aborted(1.0, "1")
        assert router.status().unplaced_prefill_tokens == 500
        router.on_pool(1.0, replace(router.pool, ring_version=2))
        assert router.status().unplaced_prefill_tokens == 500
        router.on_pool(1.0, replace(router.pool, members=members(1)))
        assert router.status().unplaced_prefill_tokens == 0

    def test_empty_pool_without_queue_rejects_with_retry_after(self) -> None:
        router = PoolRouter(slow_pool(0, max_wait_s=7.0))
        assert ask(router, "1") == Rejection(request_id="1", reason=Reason.NO_ENDPOINT, retry_after_s=7.0)

    def test_empty_pool_rejects_request_with_subset_hint(self) -> None:
        router = PoolRouter(replace(slow_pool(0), routing=slow_pool(hold_when_empty=True).routing))
        refusal = router.on_request(0.0, request("1", "hello", subset=frozenset({"10.9.9.9:1"}))).answer
        assert refusal == Rejection(request_id="1", reason=Reason.NO_ENDPOINT, retry_after_s=30.0)

    def test_request_without_eligible_member_gets_no_retry_after(self) -> None:
        refusal = (
            PoolRouter(slow_pool()).on_request(0.0, request("1", "hello", subset=frozenset({"10.9.9.9:1"}))).answer
        )
        assert refusal == Rejection(request_id="1", reason=Reason.NO_ENDPOINT)

    def test_last_member_draining_queues_old_and_new_requests(self) -> None:
        router = PoolRouter(slow_pool(hold_when_empty=True))
        ask(router, "1")
        ask(router, "2")
        draining = replace(router.pool, members=members(1, state=MemberState.DRAINING))
        router.on_pool(1.0, draining)
        assert isinstance(ask(router, "3", now=1.5), Queued)
        assert held(router) == 2
        assert [each.in_flight for each in router.status().endpoints] == [1]
        assert decided(router.on_pool(2.0, slow_pool(2, hold_when_empty=True))) == ["2", "3"]
