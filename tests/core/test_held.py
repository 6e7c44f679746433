"""Requests that wait in the router: windows, order, bounds, rebalancing, and members that leave or fail."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import members, pool, request, text_of
from dualmap.held import HeldQueue, Waiting
from dualmap.hotness import HotnessCounts
from dualmap.load import FAILURES_IN_A_ROW, FIRST_SUSPENSION_S
from dualmap.news import News, SharedLoad
from dualmap.pool import Engine, MemberState, Pool, Queue, Rebalance, Routing, Slo
from dualmap.receipt import Key
from dualmap.requests import Decision, Held, Reason, Refusal, Usage
from dualmap.router import PoolRouter

SPEED = 1000.0
EVENTS = (
    *("ask", "ask", "ask", "ask one", "ask session", "token", "finish", "abort", "fail", "wait"),
    *("drain", "move", "window", "weigh", "empty", "back", "news"),
)


def changed(of: Pool, pick: int, **change: Any) -> Pool:
    """The pool with one of its members changed."""
    at = pick % max(1, len(of.members))
    return replace(of, members=tuple(replace(m, **change) if n == at else m for n, m in enumerate(of.members)))


def with_window(of: Pool, window_s: float) -> Pool:
    return replace(of, routing=replace(of.routing, queue=replace(of.routing.queue, dispatch_window_s=window_s)))


CHANGES: dict[str, Callable[[Pool, int], Pool]] = {
    "drain": lambda of, pick: changed(of, pick, state=MemberState.DRAINING),
    "move": lambda of, pick: changed(of, pick, address=f"10.1.0.{pick + 1}"),
    "weigh": lambda of, pick: changed(of, pick, weight=pick % 2 * 100),
    "window": lambda of, pick: with_window(of, (0.001, 1.0, 50.0)[pick % 3]),
    "empty": lambda of, _: replace(of, members=()),
}


def slow_pool(
    count: int = 1,
    *,
    policy: str = "dualmap",
    slo_ttft_s: float = 600.0,
    rebalance: bool = True,
    **queue: Any,
) -> Pool:
    """Members that prefill 1000 tokens a second, with a window of one second."""
    routing = Routing(
        policy=policy,
        queue=replace(Queue(dispatch_window_s=1.0), **queue),
        rebalance=Rebalance(enabled=rebalance),
    )
    engine = Engine(prefill_tokens_per_second=SPEED)
    return replace(pool(count, routing=routing, engine=engine), slo=Slo(ttft_s=slo_ttft_s))


def ask(router: PoolRouter, id: str, tokens: int = 2000, *, now: float = 0.0) -> Decision | Held | Refusal:
    return router.on_request(now, request(id, text_of(tokens, f"prompt {id}"), now=now))


def decided(router: PoolRouter) -> list[str]:
    """The held requests that were handed over since the last call."""
    outcomes = router.take_outcomes()
    assert all(isinstance(each, Decision) for each in outcomes), outcomes
    return [each.request_id for each in outcomes]


def held(router: PoolRouter) -> int:
    status = router.status()
    assert status.held >= sum(each.held for each in status.endpoints)
    return status.held


class TestWindow:
    def test_what_exceeds_the_window_waits_and_goes_when_the_prefill_ahead_ends(self) -> None:
        router = PoolRouter(slow_pool())
        assert isinstance(ask(router, "1"), Decision)
        assert ask(router, "2") == Held(request_id="2")
        assert ask(router, "3") == Held(request_id="3")
        (endpoint,) = router.status().endpoints
        assert (endpoint.in_flight, endpoint.held, endpoint.held_prefill_tokens) == (1, 2, 4000)
        router.on_first_token(2.0, "1")
        assert decided(router) == ["2"]
        router.on_first_token(4.0, "2")
        assert decided(router) == ["3"]
        assert held(router) == 0

    def test_the_window_opens_by_the_progress_of_the_prefill_at_its_head(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1", 3000)
        ask(router, "2")
        opens_s = router.next_deadline()
        # A prefill of 3000 tokens and its attention take a little more than three seconds.
        assert opens_s == pytest.approx(3000 / SPEED + 1.5e-5 * 3000**2 / SPEED - 1.0)
        router.on_deadline(opens_s - 0.001)
        assert decided(router) == []
        router.on_deadline(opens_s)
        assert decided(router) == ["2"]

    def test_an_answer_that_is_not_streamed_opens_it_when_its_prefill_should_end(self) -> None:
        router = PoolRouter(slow_pool(dispatch_window_s=0.001))
        router.on_request(0.0, replace(request("1", text_of(2000, "a")), streamed=False))
        ask(router, "2")
        opens_s = router.next_deadline()
        assert opens_s is not None
        router.on_deadline(opens_s)
        assert decided(router) == ["2"]

    def test_unlimited_never_holds(self) -> None:
        router = PoolRouter(slow_pool(dispatch_window_s=inf))
        assert all(isinstance(ask(router, str(n)), Decision) for n in range(50))

    def test_a_prompt_that_another_one_held_will_leave_cached_is_expected_to_be(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1")
        for id in ("2", "3"):
            router.on_request(0.0, request(id, text_of(2048, "shared")))
        (endpoint,) = router.status().endpoints
        assert endpoint.held_prefill_tokens == 2048

    def test_a_stalled_instance_is_given_no_more(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1")
        ask(router, "2", now=4.9)
        assert decided(router) == []
        ask(router, "3", now=6.0)
        router.on_deadline(6.0)
        assert held(router) >= 1
        deadline = router.next_deadline()
        assert deadline is not None
        assert deadline > 6.0


class TestOrder:
    def test_first_come_first_served(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=3.0))
        for n in range(5):
            ask(router, str(n), now=n * 0.01)
        served = []
        for n in range(5):
            router.on_first_token(2.0 * (n + 1), str(n))
            served += decided(router)
        assert served == ["1", "2", "3", "4"]

    def test_deadline_prefers_who_can_still_make_it(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=4.0, order="Deadline"))
        ask(router, "head", 6000)
        ask(router, "late", 3000, now=0.1)
        ask(router, "fresh", 1000, now=5.0)
        router.on_first_token(6.0, "head")
        assert decided(router)[0] == "fresh"

    def test_dualmap_defers_whatever_the_order_and_others_do_not(self) -> None:
        first = {}
        for policy in ("dualmap", "dualmap_paper"):
            router = PoolRouter(slow_pool(policy=policy, slo_ttft_s=4.0))
            ask(router, "head", 6000)
            ask(router, "late", 3000, now=0.1)
            ask(router, "fresh", 1000, now=5.0)
            router.on_first_token(6.0, "head")
            first[policy] = decided(router)[0]
        assert first == {"dualmap": "fresh", "dualmap_paper": "late"}

    def test_the_longest_is_put_off_where_not_all_can_make_it(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=10.0, dispatch_window_s=0.001))
        ask(router, "head", 2000)
        for n, tokens in enumerate((1500, 5000, 2500, 2500)):
            ask(router, str(n), tokens, now=0.1)
        served = []
        for now in (2.0, 3.5, 6.0, 8.5):
            router.on_first_token(now, served[-1] if served else "head")
            served += decided(router)
        # 2 s and 1.5 + 5 + 2.5 + 2.5 s are more than 10 s: without the longest the other three are in time.
        assert served == ["0", "2", "3", "1"]

    def test_nobody_is_overtaken_where_the_pool_forbids_it(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=4.0, max_overtaken=0))
        ask(router, "head", 6000)
        ask(router, "late", 3000, now=0.1)
        ask(router, "fresh", 1000, now=5.0)
        router.on_first_token(6.0, "head")
        assert decided(router)[0] == "late"

    def test_deadline_starves_nobody(self) -> None:
        router = PoolRouter(slow_pool(slo_ttft_s=4.0, order="Deadline", dispatch_window_s=0.001))
        ask(router, "head", 6000)
        ask(router, "late", 6000, now=0.1)
        served: list[str] = []
        now, running = 6.0, "head"
        for n in range(20):
            ask(router, f"fresh {n}", 1500, now=now)
            router.on_first_token(now + 0.01, running)
            served += decided(router)
            running = served[-1]
            now += 1.5
            if "late" in served:
                break
        assert served.index("late") == Queue().max_overtaken


class TestKvMemory:
    def roomy(self, kv_tokens: int | None) -> PoolRouter:
        of = slow_pool()
        return PoolRouter(replace(of, engine=replace(of.engine, kv_tokens=kv_tokens)))

    def test_a_prompt_waits_here_until_the_engine_has_room_for_it(self) -> None:
        router = self.roomy(5000)
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        assert isinstance(ask(router, "two", 2001, now=3.0), Held)
        router.on_finished(9.0, "one")
        assert decided(router) == ["two"]

    def test_what_fits_with_what_will_be_generated_is_handed_over(self) -> None:
        router = self.roomy(5000)
        for n in range(400):
            ask(router, f"short {n}", 10)
            router.on_first_token(0.0, f"short {n}")
            router.on_finished(0.0, f"short {n}", Usage(prompt_tokens=10, completion_tokens=100, cached_tokens=0))
        # Two requests are taken to generate 150 tokens each: half as much again as the mean.
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        assert isinstance(ask(router, "two", 1701, now=3.0), Held)
        assert isinstance(ask(router, "three", 1500, now=3.0), Held)
        router.on_aborted(3.0, "two")
        assert decided(router) == ["three"]

    def test_one_that_is_given_up_lets_in_who_waits_behind_it(self) -> None:
        of = slow_pool(max_wait_s=20.0)
        router = PoolRouter(replace(of, engine=replace(of.engine, kv_tokens=5000)))
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        ask(router, "large", 4000, now=3.0)
        ask(router, "small", 1000, now=3.0)
        router.on_deadline(23.0)
        assert {each.request_id: type(each) for each in router.take_outcomes()} == {"large": Refusal, "small": Decision}

    def test_a_small_one_goes_at_once_where_a_large_one_has_no_hope_and_no_room(self) -> None:
        of = slow_pool(slo_ttft_s=5.0)
        router = PoolRouter(replace(of, engine=replace(of.engine, kv_tokens=6000)))
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        ask(router, "large", 5100, now=3.0)
        ask(router, "small", 1000, now=3.05)
        assert decided(router) == ["small"]

    def test_one_that_was_moved_keeps_its_place_by_arrival(self) -> None:
        queue = HeldQueue()
        for id, arrived_s in (("second", 2.0), ("first", 1.0)):
            queue.add(
                Waiting(
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

    def test_one_alone_always_fits(self) -> None:
        assert isinstance(ask(self.roomy(1000), "one", 3000), Decision)

    def test_without_a_size_nothing_waits_for_memory(self) -> None:
        router = self.roomy(None)
        ask(router, "one", 3000)
        router.on_first_token(3.0, "one")
        assert isinstance(ask(router, "two", 90_000, now=3.0), Decision)


class TestBounds:
    def test_a_full_queue_refuses(self) -> None:
        router = PoolRouter(slow_pool(max_held=2))
        outcomes = [ask(router, str(n)) for n in range(4)]
        assert [type(each) for each in outcomes] == [Decision, Held, Held, Refusal]
        refusal = outcomes[-1]
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.QUEUE_FULL
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s > 5.0

    def test_nobody_is_told_to_stay_away_for_longer_than_anybody_waits(self) -> None:
        router = PoolRouter(slow_pool(max_held=1, max_wait_s=3.0))
        for n in range(2):
            ask(router, str(n), 40_000)
        full = ask(router, "full")
        router.on_deadline(3.0)
        (late,) = router.take_outcomes()
        for refusal in (full, late):
            assert isinstance(refusal, Refusal)
            assert refusal.retry_after_s == 3.0

    def test_nobody_waits_for_longer_than_agreed(self) -> None:
        router = PoolRouter(slow_pool(max_wait_s=3.0))
        ask(router, "1", 20_000)
        ask(router, "2")
        ask(router, "3", now=1.0)
        assert router.next_deadline() == 3.0
        router.on_deadline(3.0)
        (refusal,) = router.take_outcomes()
        assert isinstance(refusal, Refusal)
        assert (refusal.request_id, refusal.reason) == ("2", Reason.WAITED_TOO_LONG)
        router.on_deadline(4.0)
        assert [each.request_id for each in router.take_outcomes()] == ["3"]
        assert held(router) == 0

    def test_a_client_that_goes_away_frees_its_place(self) -> None:
        router = PoolRouter(slow_pool(max_held=1))
        ask(router, "1")
        ask(router, "2")
        assert isinstance(ask(router, "3"), Refusal)
        assert router.on_aborted(0.5, "2") is None
        assert held(router) == 0
        assert isinstance(ask(router, "4"), Held)
        router.on_first_token(2.0, "1")
        assert decided(router) == ["4"]

    def test_an_abort_at_the_instance_makes_room(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1", 20_000)
        ask(router, "2")
        router.on_aborted(0.5, "1")
        assert decided(router) == ["2"]


class TestEmptyPool:
    def test_requests_wait_for_the_first_member(self) -> None:
        router = PoolRouter(replace(slow_pool(0), routing=slow_pool(hold_when_empty=True).routing))
        for n in range(3):
            assert isinstance(ask(router, str(n)), Held)
        assert held(router) == 3
        router.on_pool(5.0, replace(router.pool, members=members(2)))
        first = decided(router)
        assert first
        assert held(router) == 3 - len(first)

    def test_they_wait_only_so_long(self) -> None:
        router = PoolRouter(replace(slow_pool(0), routing=slow_pool(hold_when_empty=True, max_wait_s=2.0).routing))
        ask(router, "1")
        router.on_deadline(2.0)
        assert router.take_outcomes() == (Refusal(request_id="1", reason=Reason.NO_ENDPOINT, retry_after_s=2.0),)

    def test_and_only_so_many(self) -> None:
        routing = slow_pool(hold_when_empty=True, max_held=1, max_wait_s=9.0).routing
        router = PoolRouter(replace(slow_pool(0), routing=routing))
        ask(router, "1")
        assert ask(router, "2") == Refusal(request_id="2", reason=Reason.NO_ENDPOINT, retry_after_s=9.0)

    def test_their_prompts_are_counted_while_they_wait(self) -> None:
        router = PoolRouter(replace(slow_pool(0), routing=slow_pool(hold_when_empty=True, max_wait_s=2.0).routing))
        ask(router, "1", 300)
        ask(router, "2", 500, now=1.0)
        assert router.status().homeless_prefill_tokens == 800
        router.on_aborted(1.0, "1")
        assert router.status().homeless_prefill_tokens == 500
        router.on_pool(1.0, replace(router.pool, ring_version=2))
        assert router.status().homeless_prefill_tokens == 500
        router.on_pool(1.0, replace(router.pool, members=members(1)))
        assert router.status().homeless_prefill_tokens == 0

    def test_without_a_place_to_wait_they_are_told_when_to_come_back(self) -> None:
        router = PoolRouter(slow_pool(0, max_wait_s=7.0))
        assert ask(router, "1") == Refusal(request_id="1", reason=Reason.NO_ENDPOINT, retry_after_s=7.0)

    def test_a_request_that_may_use_only_others_is_refused(self) -> None:
        router = PoolRouter(replace(slow_pool(0), routing=slow_pool(hold_when_empty=True).routing))
        refusal = router.on_request(0.0, request("1", "hello", subset=frozenset({"10.9.9.9:1"})))
        assert refusal == Refusal(request_id="1", reason=Reason.NO_ENDPOINT, retry_after_s=30.0)

    def test_a_request_that_may_use_no_member_of_those_there_are_need_not_come_back(self) -> None:
        refusal = PoolRouter(slow_pool()).on_request(0.0, request("1", "hello", subset=frozenset({"10.9.9.9:1"})))
        assert refusal == Refusal(request_id="1", reason=Reason.NO_ENDPOINT)

    def test_when_the_last_member_drains_its_requests_and_new_ones_wait_for_another(self) -> None:
        router = PoolRouter(slow_pool(hold_when_empty=True))
        ask(router, "1")
        ask(router, "2")
        draining = replace(router.pool, members=members(1, state=MemberState.DRAINING))
        router.on_pool(1.0, draining)
        assert isinstance(ask(router, "3", now=1.5), Held)
        assert held(router) == 2
        assert [each.in_flight for each in router.status().endpoints] == [1]
        router.on_pool(2.0, slow_pool(2, hold_when_empty=True))
        assert decided(router) == ["2", "3"]


class TestMembersThatLeaveOrFail:
    @pytest.mark.parametrize("leaves", ["gone", "draining", "restarted elsewhere"])
    def test_its_held_requests_move_at_once(self, leaves: str) -> None:
        router = PoolRouter(slow_pool(2, policy="cache_affinity"))
        outcomes = {str(n): ask(router, str(n)) for n in range(12)}
        before = {each.id: each.held for each in router.status().endpoints}
        assert all(before.values()), before
        waiting = {id for id, outcome in outcomes.items() if isinstance(outcome, Held)}
        first, second = router.pool.members
        changed = {
            "gone": (second,),
            "draining": (replace(first, state=MemberState.DRAINING), second),
            "restarted elsewhere": (replace(first, address="10.0.0.77"), second),
        }[leaves]
        router.on_pool(0.5, replace(router.pool, members=changed, ring_version=2))
        after = {each.id: each.held for each in router.status().endpoints}
        handed_over = decided(router)
        assert sum(after.values()) + len(handed_over) == len(waiting)
        assert leaves == "restarted elsewhere" or after.get(first.id, 0) == 0

    def test_they_go_in_order_when_their_instance_comes_back_elsewhere_with_room_for_all(self) -> None:
        router = PoolRouter(slow_pool())
        for n in range(6):
            ask(router, str(n))
        router.on_pool(0.5, with_window(changed(router.pool, 0, address="10.0.0.77"), inf))
        outcomes = router.take_outcomes()
        assert [each.request_id for each in outcomes] == ["1", "2", "3", "4", "5"]
        assert all(isinstance(each, Decision) and each.endpoints == ("10.0.0.77:8000",) for each in outcomes)

    def test_those_that_may_go_nowhere_else_stay_with_an_instance_that_fails(self) -> None:
        router = PoolRouter(slow_pool(2, policy="cache_affinity"))
        only = frozenset({"10.0.0.1:8000"})
        for n in range(8):
            router.on_request(0.0, request(str(n), text_of(300, f"p{n}"), subset=only))
        for id in ("0", "1", "2"):
            router.on_failed(0.1, id)
        assert router.status().endpoints[0].suspended
        assert held(router) + len(decided(router)) == 4

    def test_without_another_member_they_are_refused(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1")
        ask(router, "2")
        router.on_pool(1.0, slow_pool(0))
        assert router.take_outcomes() == (Refusal(request_id="2", reason=Reason.NO_ENDPOINT, retry_after_s=30.0),)

    def test_an_instance_that_keeps_failing_is_left_alone_and_tried_again(self) -> None:
        router = PoolRouter(slow_pool(2, policy="cache_affinity"))
        handed_over = {"m-0": [], "m-1": []}
        for n in range(40):
            outcome = ask(router, str(n), 10)
            assert isinstance(outcome, Decision)
            handed_over[outcome.receipt.chosen].append(str(n))
        for id in handed_over["m-0"][:FAILURES_IN_A_ROW]:
            assert {each.id: each.suspended for each in router.status().endpoints} == {"m-0": False, "m-1": False}
            router.on_failed(1.0, id)
        assert {each.id: each.suspended for each in router.status().endpoints} == {"m-0": True, "m-1": False}
        chosen = set()
        for n in range(40, 60):
            outcome = ask(router, str(n), 10, now=1.1)
            assert isinstance(outcome, Decision)
            chosen.add(outcome.receipt.chosen)
        assert chosen == {"m-1"}
        back_s = router.next_deadline()
        assert back_s == 1.0 + FIRST_SUSPENSION_S
        chosen = set()
        for n in range(60, 80):
            outcome = ask(router, str(n), 10, now=back_s)
            assert isinstance(outcome, Decision)
            chosen.add(outcome.receipt.chosen)
        assert chosen == {"m-0", "m-1"}

    def test_held_requests_leave_a_suspended_instance(self) -> None:
        router = PoolRouter(slow_pool(2, policy="cache_affinity", dispatch_window_s=4.0))
        outcomes = [ask(router, str(n), 1000) for n in range(30)]
        at_first = [each.request_id for each in outcomes if isinstance(each, Decision) and each.receipt.chosen == "m-0"]
        for id in at_first[:FAILURES_IN_A_ROW]:
            router.on_failed(0.1, id)
        status = {each.id: each for each in router.status().endpoints}
        assert status["m-0"].suspended
        assert status["m-0"].held == 0
        assert status["m-1"].held > 0

    def test_a_success_ends_the_row(self) -> None:
        router = PoolRouter(slow_pool(2, policy="round_robin"))
        for n in range(4 * FAILURES_IN_A_ROW):
            outcome = ask(router, str(n), 10, now=float(n))
            assert isinstance(outcome, Decision)
            if outcome.receipt.chosen == "m-0" and n % (2 * FAILURES_IN_A_ROW) >= 2:
                router.on_failed(float(n), str(n))
            else:
                router.on_finished(float(n), str(n))
            assert not any(each.suspended for each in router.status().endpoints)

    def test_a_burst_of_failures_counts_as_one_suspension(self) -> None:
        router = PoolRouter(slow_pool(2, policy="round_robin"))
        ids = [str(n) for n in range(24)]
        at_first = []
        for id in ids:
            outcome = ask(router, id, 5)
            assert isinstance(outcome, Decision)
            at_first += [id] if outcome.receipt.chosen == "m-0" else []
        for id in at_first:
            router.on_failed(0.1, id)
        assert router.status().endpoints[0].suspended
        router.on_deadline(0.1 + FIRST_SUSPENSION_S)
        assert not router.status().endpoints[0].suspended

    def test_if_all_fail_none_is_left_alone(self) -> None:
        router = PoolRouter(slow_pool(1))
        for n in range(FAILURES_IN_A_ROW + 1):
            assert isinstance(ask(router, str(n), 10), Decision)
            router.on_failed(0.1, str(n))
        assert isinstance(ask(router, "again", 10, now=0.2), Decision)


class TestRebalancing:
    def crowded(self, *, rebalance: bool = True, policy: str = "dualmap_paper") -> PoolRouter:
        """Of two members, which are everybody's pair, m-0 has six requests waiting and m-1 has nothing to do.

        They crowd under a policy that does not care; from then on it is DualMap that decides, as published.
        """
        crowding = slow_pool(2, policy="cache_affinity", slo_ttft_s=6.0, rebalance=rebalance)
        router = PoolRouter(crowding)
        n = 0
        while router.status().endpoints[0].held < 6:
            outcome = ask(router, f"small {n}", 1500)
            assert isinstance(outcome, Decision | Held)
            if router.status().endpoints[1].in_flight:
                router.on_aborted(0.0, f"small {n}")
            n += 1
        router.on_pool(0.0, replace(crowding, routing=replace(crowding.routing, policy=policy)))
        return router

    def test_an_overloaded_pair_is_relieved_until_the_rest_meets_the_slo(self) -> None:
        router = self.crowded()
        # Nowhere can such a prompt meet the SLO: both of its pair count as overloaded.
        assert isinstance(ask(router, "huge", 9000), Held)
        moved = [each for each in router.take_outcomes() if isinstance(each, Decision)]
        assert moved
        for each in moved:
            assert (each.receipt.rule, each.receipt.chosen) == ("rebalanced", "m-1")
            assert each.receipt.address == each.endpoints[0]
        first, second = router.status().endpoints
        left = 6 - second.in_flight - second.held
        assert 0 < left < 6
        # What is left at m-0, but for the huge one, is computed within the SLO.
        assert (first.pending_prefill_tokens + 1500 * left) / SPEED <= 6.0

    def test_the_most_to_gain_goes_first(self) -> None:
        router = self.crowded()
        ask(router, "huge", 9000)
        moved = [int(each.request_id.split()[1]) for each in router.take_outcomes()]
        router.on_deadline(100.0)
        left = [each.request_id for each in router.take_outcomes() if each.request_id.startswith("small ")]
        # The one at the tail has the longest wait ahead, and so the most to gain; it was the newest.
        assert moved[0] > max(int(id.split()[1]) for id in left)

    def test_not_when_switched_off(self) -> None:
        router = self.crowded(rebalance=False)
        ask(router, "huge", 9000)
        assert router.take_outcomes() == ()
        assert router.status().endpoints[0].held >= 6

    @pytest.mark.parametrize("policy", ["cache_affinity", "least_loaded", "dualmap_no_rebalance"])
    def test_not_under_a_policy_that_does_not_rebalance(self, policy: str) -> None:
        router = self.crowded(policy=policy)
        ask(router, "huge", 9000)
        assert router.take_outcomes() == ()
        assert router.status().endpoints[0].held >= 6

    def test_not_while_one_of_the_pair_would_do(self) -> None:
        router = self.crowded()
        ask(router, "small", 1000)
        assert router.take_outcomes() == ()

    @given(
        st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 30)), max_size=60),
        st.sampled_from(["dualmap", "dualmap_paper", "cache_affinity", "round_robin"]),
        st.sampled_from(["Fcfs", "Deadline"]),
    )
    @settings(max_examples=300)
    def test_whatever_happens_every_request_ends_once_and_the_books_close(
        self, events: list[tuple[str, int]], policy: str, order: str
    ) -> None:
        whole = slow_pool(3, policy=policy, slo_ttft_s=3.0, max_held=8, max_wait_s=20.0, order=order)
        router = PoolRouter(whole)
        now, open_ids, waiting = 0.0, [], set()

        def collect() -> None:
            for outcome in router.take_outcomes():
                waiting.remove(outcome.request_id)
                if isinstance(outcome, Decision):
                    open_ids.append(outcome.request_id)

        for n, (event, pick) in enumerate(events):
            now += 0.1
            any_open = open_ids[pick % len(open_ids)] if open_ids else None
            if event.startswith("ask"):
                asked = request(str(n), text_of(100 + 150 * pick, f"prompt {n}"), now=now)
                if event == "ask one":
                    asked = replace(asked, subset=frozenset({f"10.0.0.{pick % 3 + 1}"}))
                elif event == "ask session":
                    asked = replace(asked, session=pick % 3, streamed=bool(pick % 2))
                outcome = router.on_request(now, asked)
                if isinstance(outcome, Held):
                    waiting.add(str(n))
                elif isinstance(outcome, Decision):
                    open_ids.append(str(n))
            elif event == "wait":
                now += pick
                router.on_deadline(now)
            elif event in CHANGES:
                router.on_pool(now, CHANGES[event](router.pool, pick))
            elif event == "news":
                load = SharedLoad(pending_prefill_tokens=pick * 100, backlog_s=pick * 0.1, in_flight=1)
                news = News(hotness=HotnessCounts(requests=1, nodes={}), loads={f"m-{pick % 3}": load})
                router.on_news(now, f"peer {pick % 2}", news, 0.0)
            elif event == "back":
                router.on_pool(now, whole)
            elif event == "abort" and waiting and pick % 2:
                gone = sorted(waiting)[pick % len(waiting)]
                router.on_aborted(now, gone)
                waiting.remove(gone)
            elif any_open is not None:
                if event == "token":
                    router.on_first_token(now, any_open)
                else:
                    ends = {"finish": router.on_finished, "abort": router.on_aborted, "fail": router.on_failed}
                    ends[event](now, any_open)
                    open_ids.remove(any_open)
            collect()
            status = router.status()
            assert status.held == len(waiting)
            # Those at a member that has left are in its books, which nobody shows, until they end.
            in_flight = sum(each.in_flight for each in status.endpoints)
            assert in_flight == len(open_ids) if status.endpoints else in_flight == 0
        while open_ids or waiting:
            now += 1.0
            for id in list(open_ids):
                router.on_first_token(now, id)
                router.on_finished(now, id)
                open_ids.remove(id)
            router.on_deadline(now)
            collect()
            assert now < 1000.0 + len(events), "held requests were forgotten"
        for each in router.status().endpoints:
            assert (each.in_flight, each.held) == (0, 0)
            assert (each.pending_prefill_tokens, each.held_prefill_tokens, each.active_kv_tokens) == (0, 0, 0)
