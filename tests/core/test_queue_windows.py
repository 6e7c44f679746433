"""Tests of the dispatch of queued requests and its order: windows, deadlines, and free KV memory."""

from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import ANY

import pytest

from builders import request, text_of
from core.queue_pools import SPEED, ask, ask_all, decided, held, slow_pool
from dualmap.pools.pool import Queue
from dualmap.queue.request_queue import MemberQueue, QueuedRequest
from dualmap.receipt import Key
from dualmap.requests import Decision, Queued, Rejection, Usage
from dualmap.router import PoolRouter


class TestWindow:
    def test_request_above_the_dispatch_window_waits_for_prefill_end(self) -> None:
        router = PoolRouter(slow_pool())
        assert isinstance(ask(router, "1"), Decision)
        assert ask(router, "2") == Queued(request_id="2")
        assert ask(router, "3") == Queued(request_id="3")
        (endpoint,) = router.status().endpoints
        assert (endpoint.in_flight, endpoint.held, endpoint.held_prefill_tokens) == (1, 2, 4000)
        assert decided(router.on_first_token(2.0, "1")) == ["2"]
        assert decided(router.on_first_token(4.0, "2")) == ["3"]
        assert held(router) == 0

    def test_dispatch_window_opens_with_progress_of_current_prefill(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1", 3000)
        ask(router, "2")
        opens_s = router.next_deadline()
        # A prefill of 3000 tokens takes a little more than three seconds, because of the attention cost.
        assert opens_s == pytest.approx(3000 / SPEED + 1.5e-5 * 3000**2 / SPEED - 1.0)
        assert decided(router.on_deadline(opens_s - 0.001)) == []
        assert decided(router.on_deadline(opens_s)) == ["2"]

    def test_dispatch_window_opens_at_predicted_end_without_stream(self) -> None:
        router = PoolRouter(slow_pool(dispatch_window_s=0.001))
        router.on_request(0.0, request("1", text_of(2000, "a"))._replace(streamed=False))
        ask(router, "2")
        opens_s = router.next_deadline()
        assert opens_s is not None
        assert decided(router.on_deadline(opens_s)) == ["2"]

    def test_unlimited_dispatch_window_queues_no_request(self) -> None:
        router = PoolRouter(slow_pool(dispatch_window_s=inf))
        assert all(isinstance(ask(router, str(n)), Decision) for n in range(50))

    def test_queued_prompt_counts_as_cached_for_a_later_prompt(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1")
        for id in ("2", "3"):
            router.on_request(0.0, request(id, text_of(2048, "shared")))
        (endpoint,) = router.status().endpoints
        assert endpoint.held_prefill_tokens == 2048

    def test_on_request_returns_the_requests_to_dispatch(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1")
        assert ask(router, "2") == Queued(request_id="2")
        # The dispatch window opens with time, without a call of `on_deadline`.
        effects = ask_all(router, "3", now=2.0)
        assert decided(effects) == ["2"]
        assert effects.answer == Queued(request_id="3")

    def test_dispatch_window_of_stalled_member_stays_closed(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1")
        assert ask_all(router, "2", now=4.9).outcomes == ()
        ask(router, "3", now=6.0)
        router.on_deadline(6.0)
        assert held(router) >= 1
        deadline = router.next_deadline()
        assert deadline is not None
        assert deadline > 6.0


class TestOrder:
    def test_queue_order_fcfs_dispatches_by_arrival(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=3.0))
        for n in range(5):
            ask(router, str(n), now=n * 0.01)
        served = []
        for n in range(5):
            served += decided(router.on_first_token(2.0 * (n + 1), str(n)))
        assert served == ["1", "2", "3", "4"]

    def test_queue_order_deadline_prefers_requests_within_the_slo(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=4.0, order="Deadline"))
        ask(router, "head", 6000)
        ask(router, "late", 3000, now=0.1)
        ask(router, "fresh", 1000, now=5.0)
        assert decided(router.on_first_token(6.0, "head"))[0] == "fresh"

    def test_queue_order_is_deferred_only_under_dualmap(self) -> None:
        first = {}
        for policy in ("dualmap", "dualmap_paper"):
            router = PoolRouter(slow_pool(policy=policy, slo_ttft_s=4.0))
            ask(router, "head", 6000)
            ask(router, "late", 3000, now=0.1)
            ask(router, "fresh", 1000, now=5.0)
            first[policy] = decided(router.on_first_token(6.0, "head"))[0]
        assert first == {"dualmap": "fresh", "dualmap_paper": "late"}

    def test_queue_order_defers_longest_prompt_if_slo_is_missed(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=10.0, dispatch_window_s=0.001))
        ask(router, "head", 2000)
        for n, tokens in enumerate((1500, 5000, 2500, 2500)):
            ask(router, str(n), tokens, now=0.1)
        served = []
        for now in (2.0, 3.5, 6.0, 8.5):
            served += decided(router.on_first_token(now, served[-1] if served else "head"))
        # 2 s and 1.5 + 5 + 2.5 + 2.5 s are more than 10 s. Without the longest request, the other three meet the SLO.
        assert served == ["0", "2", "3", "1"]

    def with_late_request(self, **settings: Any) -> PoolRouter:
        """Return a router at 6 s: "fresh" (1.5 s) was just sent, and "late" (3 s) is deferred."""
        router = PoolRouter(slow_pool(slo_ttft_s=4.0, **settings))
        ask(router, "head", 6000)
        ask(router, "late", 3000, now=0.1)
        ask(router, "fresh", 1500, now=5.0)
        router.on_first_token(6.0, "head")
        return router

    def test_deferred_request_does_not_delay_a_new_one(self) -> None:
        router = self.with_late_request()
        assert ask(router, "new", 500, now=6.0) == Queued(request_id="new")
        (decision, _) = router.on_first_token(7.5, "fresh").outcomes
        assert isinstance(decision, Decision)
        assert decision.request_id == "new"
        # 1.5 s of "fresh" and its own 0.5 s, without the 3 s of "late".
        assert decision.receipt.predicted_ttft_s == pytest.approx(2.0, rel=0.05)

    def test_deferred_request_delays_others_after_its_dispatch(self) -> None:
        router = self.with_late_request()
        assert decided(router.on_first_token(7.5, "fresh")) == ["late"]
        ask(router, "new", 500, now=7.5)
        (decision,) = router.on_first_token(10.5, "late").outcomes
        assert isinstance(decision, Decision)
        assert decision.receipt.predicted_ttft_s == pytest.approx(3.5, rel=0.05)

    def test_rejection_retry_after_counts_deferred_requests(self) -> None:
        router = self.with_late_request(max_held=2)
        ask(router, "waits", 500, now=6.0)
        refusal = ask(router, "new", 500, now=6.0)
        assert isinstance(refusal, Rejection)
        assert refusal.retry_after_s == pytest.approx(1.5 + 3.0 + 0.5, rel=0.05)

    def test_queue_without_overtaking_keeps_arrival_order(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=4.0, max_overtaken=0))
        ask(router, "head", 6000)
        ask(router, "late", 3000, now=0.1)
        ask(router, "fresh", 1000, now=5.0)
        assert decided(router.on_first_token(6.0, "head"))[0] == "late"

    def test_queue_order_deadline_dispatches_every_request(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=4.0, order="Deadline", dispatch_window_s=0.001))
        ask(router, "head", 6000)
        ask(router, "late", 6000, now=0.1)
        served: list[str] = []
        now, running = 6.0, "head"
        for n in range(20):
            ask(router, f"fresh {n}", 1500, now=now)
            served += decided(router.on_first_token(now + 0.01, running))
            running = served[-1]
            now += 1.4  # The engine is faster than the router believes, so no prefill ends before its first token.
            if "late" in served:
                break
        assert served.index("late") == Queue().max_overtaken


class TestKvMemory:
    def roomy(self, kv_tokens: int | None) -> PoolRouter:
        of = slow_pool()
        return PoolRouter(replace(of, engine=replace(of.engine, kv_tokens=kv_tokens)))

    def test_prompt_waits_until_the_member_has_kv_memory(self) -> None:
        router = self.roomy(5000)
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        assert isinstance(ask(router, "two", 2001, now=3.0), Queued)
        assert decided(router.on_finished(9.0, "one")) == ["two"]

    @pytest.mark.parametrize("streamed", [True, False])
    @pytest.mark.parametrize("late", [False, True], ids=["counts with the end", "counts after the end"])
    def test_dispatch_needs_kv_memory_for_prompt_and_predicted_output(self, late: bool, streamed: bool) -> None:
        router = self.roomy(5000)
        usage = Usage(prompt_tokens=10, completion_tokens=100, cached_tokens=0)
        for n in range(400):
            name = f"short {n}"
            router.on_request(0.0, request(name, text_of(10, name))._replace(streamed=streamed))
            if streamed:
                router.on_first_token(0.0, name)
            router.on_finished(0.0, name, None if late else usage)
            if late:
                router.on_usage(0.0, name, usage)
        # The rule assumes 150 output tokens for each of two requests, which is 1.5 times the mean.
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        assert isinstance(ask(router, "two", 1701, now=3.0), Queued)
        assert isinstance(ask(router, "three", 1500, now=3.0), Queued)
        assert decided(router.on_aborted(3.0, "two")) == ["three"]

    def test_output_counted_by_several_reports_is_one_request_of_the_mean(self) -> None:
        router = self.roomy(5000)
        ask(router, "short", 10)
        router.on_finished(0.0, "short")
        for _ in range(400):
            router.on_usage(0.0, "short", Usage(completion_tokens=100))
        # The mean of one request with 100 tokens is still nearly the assumed 200.
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        assert isinstance(ask(router, "two", 1500, now=3.0), Queued)

    def test_aborted_request_frees_kv_memory_for_the_next(self) -> None:
        of = slow_pool(max_wait_s=20.0)
        router = PoolRouter(replace(of, engine=replace(of.engine, kv_tokens=5000)))
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        ask(router, "large", 4000, now=3.0)
        ask(router, "small", 1000, now=3.0)
        assert {each.request_id: type(each) for each in router.on_deadline(23.0).outcomes} == {
            "large": Rejection,
            "small": Decision,
        }

    def test_small_prompt_overtakes_late_prompt_waiting_for_kv_memory(self) -> None:
        of = slow_pool(slo_ttft_s=5.0)
        router = PoolRouter(replace(of, engine=replace(of.engine, kv_tokens=6000)))
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        ask(router, "large", 5100, now=3.0)
        answer, outcomes = ask_all(router, "small", 1000, now=3.05)
        assert isinstance(answer, Decision)
        assert outcomes == ()

    def test_moved_request_waiting_for_kv_memory_keeps_arrival_order(self) -> None:
        queue = MemberQueue(lambda: None)
        for id, arrived_s in (("second", 2.0), ("first", 1.0)):
            queue.add(
                QueuedRequest(
                    request=request(id, text_of(100, id), now=arrived_s),
                    key=Key(hash=1, blocks=1, tokens=1),
                    pair=("a",),
                    member="a",
                    matched_tokens=0,
                    compute_s=0.1,
                    predicted_ttft_s=0.1,
                    receipt=ANY,
                )
            )
        assert [each.request.id for each in queue] == ["first", "second"]

    def test_single_request_is_dispatched_at_any_kv_memory_size(self) -> None:
        assert isinstance(ask(self.roomy(1000), "one", 3000), Decision)

    def test_unknown_kv_memory_size_queues_no_request(self) -> None:
        router = self.roomy(None)
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        assert isinstance(ask(router, "two", 90_000, now=3.0), Decision)
