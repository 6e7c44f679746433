"""Tests of moved queued requests after their member leaves, fails or is overloaded."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import request, text_of
from core.queue_pools import SPEED, ask, ask_all, decided, held, slow_pool
from dualmap.fleet.suspension import FAILURES_IN_A_ROW, FIRST_SUSPENSION_S
from dualmap.pools.pool import MemberState, Pool
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedLoad
from dualmap.requests import Decision, Effects, Queued, Reason, Rejection
from dualmap.router import PoolRouter

EVENTS = (
    *("ask", "ask", "ask", "ask one", "ask session", "token", "finish", "abort", "fail", "wait"),
    *("drain", "move", "window", "weigh", "empty", "back", "news"),
)


def changed(of: Pool, pick: int, **change: Any) -> Pool:
    """Return the pool with one changed member."""
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


class TestRemovedAndFailingMembers:
    @pytest.mark.parametrize("leaves", ["gone", "draining", "restarted elsewhere"])
    def test_queued_requests_of_a_removed_member_move_at_once(self, leaves: str) -> None:
        router = PoolRouter(slow_pool(2, policy="cache_affinity"))
        outcomes = {str(n): ask(router, str(n)) for n in range(12)}
        before = {each.id: each.held for each in router.status().endpoints}
        assert all(before.values()), before
        waiting = {id for id, outcome in outcomes.items() if isinstance(outcome, Queued)}
        first, second = router.pool.members
        changed = {
            "gone": (second,),
            "draining": (replace(first, state=MemberState.DRAINING), second),
            "restarted elsewhere": (replace(first, address="10.0.0.77"), second),
        }[leaves]
        effects = router.on_pool(0.5, replace(router.pool, members=changed, ring_version=2))
        after = {each.id: each.held for each in router.status().endpoints}
        handed_over = decided(effects)
        assert sum(after.values()) + len(handed_over) == len(waiting)
        assert leaves == "restarted elsewhere" or after.get(first.id, 0) == 0

    def test_restarted_member_dispatches_queued_requests_in_order(self) -> None:
        router = PoolRouter(slow_pool())
        for n in range(6):
            ask(router, str(n))
        outcomes = router.on_pool(0.5, with_window(changed(router.pool, 0, address="10.0.0.77"), inf)).outcomes
        assert [each.request_id for each in outcomes] == ["1", "2", "3", "4", "5"]
        assert all(isinstance(each, Decision) and each.endpoints == ("10.0.0.77:8000",) for each in outcomes)

    def test_failing_member_keeps_requests_without_other_candidate(self) -> None:
        router = PoolRouter(slow_pool(2, policy="cache_affinity"))
        only = frozenset({"10.0.0.1:8000"})
        for n in range(8):
            router.on_request(0.0, request(str(n), text_of(300, f"p{n}"), subset=only))
        released = [each for id in ("0", "1", "2") for each in decided(router.on_failed(0.1, id))]
        assert router.status().endpoints[0].suspended
        assert held(router) + len(released) == 4

    def test_queued_requests_of_removed_last_member_are_rejected(self) -> None:
        router = PoolRouter(slow_pool())
        ask(router, "1")
        ask(router, "2")
        assert router.on_pool(1.0, slow_pool(0)).outcomes == (
            Rejection(request_id="2", reason=Reason.NO_ENDPOINT, retry_after_s=30.0),
        )

    def test_failing_member_is_suspended_then_tried_again(self) -> None:
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

    def test_queued_requests_of_a_suspended_member_move(self) -> None:
        router = PoolRouter(slow_pool(2, policy="cache_affinity", dispatch_window_s=4.0))
        outcomes = [ask(router, str(n), 1000) for n in range(30)]
        at_first = [each.request_id for each in outcomes if isinstance(each, Decision) and each.receipt.chosen == "m-0"]
        for id in at_first[:FAILURES_IN_A_ROW]:
            router.on_failed(0.1, id)
        status = {each.id: each for each in router.status().endpoints}
        assert status["m-0"].suspended
        assert status["m-0"].held == 0
        assert status["m-1"].held > 0

    def test_successful_request_resets_the_failure_count(self) -> None:
        router = PoolRouter(slow_pool(2, policy="round_robin"))
        for n in range(4 * FAILURES_IN_A_ROW):
            outcome = ask(router, str(n), 10, now=float(n))
            assert isinstance(outcome, Decision)
            if outcome.receipt.chosen == "m-0" and n % (2 * FAILURES_IN_A_ROW) >= 2:
                router.on_failed(float(n), str(n))
            else:
                router.on_finished(float(n), str(n))
            assert not any(each.suspended for each in router.status().endpoints)

    def test_burst_of_failures_counts_as_one_failure(self) -> None:
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

    def test_failures_of_all_members_suspend_no_member(self) -> None:
        router = PoolRouter(slow_pool(1))
        for n in range(FAILURES_IN_A_ROW + 1):
            assert isinstance(ask(router, str(n), 10), Decision)
            router.on_failed(0.1, str(n))
        assert isinstance(ask(router, "again", 10, now=0.2), Decision)


class TestRebalancing:
    def crowded(self, *, rebalance: bool = True, policy: str = "dualmap_paper") -> PoolRouter:
        """Return a router with six queued requests at m-0 and an idle m-1, the pair of all keys.

        The requests queue at one member under a policy that ignores load. Then the published DualMap rule decides.
        """
        crowding = slow_pool(2, policy="cache_affinity", slo_ttft_s=6.0, rebalance=rebalance)
        router = PoolRouter(crowding)
        n = 0
        while router.status().endpoints[0].held < 6:
            outcome = ask(router, f"small {n}", 1500)
            assert isinstance(outcome, Decision | Queued)
            if router.status().endpoints[1].in_flight:
                router.on_aborted(0.0, f"small {n}")
            n += 1
        router.on_pool(0.0, replace(crowding, routing=replace(crowding.routing, policy=policy)))
        return router

    def test_rebalance_moves_requests_until_the_rest_meets_the_slo(self) -> None:
        router = self.crowded()
        # No member can meet the SLO with this prompt, so both members of its pair count as overloaded.
        answer, outcomes = ask_all(router, "huge", 9000)
        assert isinstance(answer, Queued)
        moved = [each for each in outcomes if isinstance(each, Decision)]
        assert moved
        for each in moved:
            assert (each.receipt.rule, each.receipt.chosen) == ("rebalanced", "m-1")
            assert each.receipt.address == each.endpoints[0]
        first, second = router.status().endpoints
        left = 6 - second.in_flight - second.held
        assert 0 < left < 6
        # The remaining requests at m-0, except the huge prompt, meet the SLO.
        assert (first.pending_prefill_tokens + 1500 * left) / SPEED <= 6.0

    def test_rebalance_moves_request_with_largest_gain_first(self) -> None:
        router = self.crowded()
        moved = [int(each.request_id.split()[1]) for each in ask_all(router, "huge", 9000).outcomes]
        left = [each.request_id for each in router.on_deadline(100.0).outcomes if each.request_id.startswith("small ")]
        # The newest request has the longest expected wait, and so gains the most from a move.
        assert moved[0] > max(int(id.split()[1]) for id in left)

    def test_rebalance_disabled_moves_no_request(self) -> None:
        router = self.crowded(rebalance=False)
        assert ask_all(router, "huge", 9000).outcomes == ()
        assert router.status().endpoints[0].held >= 6

    @pytest.mark.parametrize("policy", ["cache_affinity", "least_loaded", "dualmap_no_rebalance"])
    def test_rebalance_with_another_policy_moves_no_request(self, policy: str) -> None:
        router = self.crowded(policy=policy)
        assert ask_all(router, "huge", 9000).outcomes == ()
        assert router.status().endpoints[0].held >= 6

    def test_rebalance_moves_nothing_if_a_member_of_pair_meets_slo(self) -> None:
        router = self.crowded()
        assert ask_all(router, "small", 1000).outcomes == ()

    @given(
        st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 30)), max_size=60),
        st.sampled_from(["dualmap", "dualmap_paper", "cache_affinity", "round_robin"]),
        st.sampled_from(["Fcfs", "Deadline"]),
    )
    @settings(max_examples=300)
    def test_queue_ends_every_request_exactly_once_in_any_event_order(
        self, events: list[tuple[str, int]], policy: str, order: str
    ) -> None:
        whole = slow_pool(3, policy=policy, slo_ttft_s=3.0, max_held=8, max_wait_s=20.0, order=order)
        router = PoolRouter(whole)
        now, open_ids, waiting = 0.0, [], set()

        def collect(effects: Effects[object]) -> None:
            for outcome in effects.outcomes:
                waiting.remove(outcome.request_id)
                if isinstance(outcome, Decision):
                    open_ids.append(outcome.request_id)

        for n, (event, pick) in enumerate(events):
            now += 0.1
            effects: Effects[object] = Effects(None)
            any_open = open_ids[pick % len(open_ids)] if open_ids else None
            if event.startswith("ask"):
                asked = request(str(n), text_of(100 + 150 * pick, f"prompt {n}"), now=now)
                if event == "ask one":
                    asked = asked._replace(subset=frozenset({f"10.0.0.{pick % 3 + 1}"}))
                elif event == "ask session":
                    asked = asked._replace(session=pick % 3, streamed=bool(pick % 2))
                effects = router.on_request(now, asked)
                if isinstance(effects.answer, Queued):
                    waiting.add(str(n))
                elif isinstance(effects.answer, Decision):
                    open_ids.append(str(n))
            elif event == "wait":
                now += pick
                effects = router.on_deadline(now)
            elif event in CHANGES:
                effects = router.on_pool(now, CHANGES[event](router.pool, pick))
            elif event == "news":
                load = SharedLoad(pending_prefill_tokens=pick * 100, backlog_s=pick * 0.1, in_flight=1)
                update = ReplicaUpdate(hotness=HotnessCounts(requests=1, nodes={}), loads={f"m-{pick % 3}": load})
                effects = router.on_update(now, f"peer {pick % 2}", update, 0.0)
            elif event == "back":
                effects = router.on_pool(now, whole)
            elif event == "abort" and waiting and pick % 2:
                gone = sorted(waiting)[pick % len(waiting)]
                effects = router.on_aborted(now, gone)
                waiting.remove(gone)
            elif any_open is not None:
                if event == "token":
                    effects = router.on_first_token(now, any_open)
                else:
                    ends = {"finish": router.on_finished, "abort": router.on_aborted, "fail": router.on_failed}
                    effects = ends[event](now, any_open)
                    open_ids.remove(any_open)
            collect(effects)
            status = router.status()
            assert status.held == len(waiting)
            # Requests at a removed member stay in the member's load, which is not in the status, until they end.
            in_flight = sum(each.in_flight for each in status.endpoints)
            assert in_flight == len(open_ids) if status.endpoints else in_flight == 0
        while open_ids or waiting:
            now += 1.0
            for id in list(open_ids):
                collect(router.on_first_token(now, id))
                collect(router.on_finished(now, id))
                open_ids.remove(id)
            collect(router.on_deadline(now))
            assert now < 1000.0 + len(events), "held requests were forgotten"
        for each in router.status().endpoints:
            assert (each.in_flight, each.held) == (0, 0)
            assert (each.pending_prefill_tokens, each.held_prefill_tokens, each.active_kv_tokens) == (0, 0, 0)
