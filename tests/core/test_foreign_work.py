"""Tests of the requests that came through no router: what counts as such, for how long, and in how much memory."""

from collections.abc import Iterable

import pytest

from builders import pool, request, text_of
from core.routers import decide, dispatched_s
from dualmap.dispatcher import Dispatcher
from dualmap.engines.profile import EngineProfile
from dualmap.fleet.foreign import FOREIGN_TTL_S, ForeignWork
from dualmap.pools.pool import Engine, Queue, Routing
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedLoad
from dualmap.requests import Decision, Effects, Queued, Rejection
from dualmap.router import PoolRouter

NO_COUNTS = HotnessCounts(requests=0, nodes={})
PROMPT_TOKENS = 1000
"""The mean prompt of a pool without requests."""


def report(router: PoolRouter, waiting: int, running: int, *, at_s: Iterable[float] = (0.0, 1.0)) -> None:
    for now in at_s:
        router.on_profile(now, "m-0", EngineProfile(waiting=waiting, running=running))


def requests_at(router: PoolRouter, now: float = 1.0) -> tuple[int, int]:
    """Return the requests and the pending prompt tokens at the first member, as decisions see them."""
    view = router._fleet.candidates.view(now, request("x", text_of(400, "x")).chain).candidate("m-0")
    return view.in_flight, view.pending_tokens


def heard(router: PoolRouter, now: float, load: SharedLoad) -> None:
    """Apply an update of another replica with a load at the first member."""
    router.on_update(now, "peer", ReplicaUpdate(hotness=NO_COUNTS, loads={"m-0": load}), 0.0)


class TestReplicas:
    def test_requests_of_other_replicas_are_no_foreign_work(self) -> None:
        router = PoolRouter(pool(1))
        heard(router, 0.0, SharedLoad(in_flight=7))
        report(router, 0, 7)
        assert requests_at(router) == (7, 0)

    def test_prefills_of_other_replicas_are_no_foreign_work(self) -> None:
        router = PoolRouter(pool(1))
        prompt_s = PROMPT_TOKENS / router.pool.engine.prefill_tokens_per_second
        decide(router, "own", text_of(PROMPT_TOKENS, "own"))
        heard(router, 0.0, SharedLoad(in_flight=4, backlog_s=1.9 * prompt_s, pending_prefill_tokens=1900))
        # One request of this router and two of the other replica wait, and so does one of five foreign requests.
        report(router, 4, 6)
        assert requests_at(router) == (1 + 4 + 5, PROMPT_TOKENS + 1900 + PROMPT_TOKENS)

    def test_replica_without_prefills_hides_no_waiting_request(self) -> None:
        router = PoolRouter(pool(1))
        heard(router, 0.0, SharedLoad(in_flight=50))
        report(router, 3, 50)
        assert requests_at(router) == (53, 3 * PROMPT_TOKENS)

    def test_foreign_work_and_replicas_load_are_summed(self) -> None:
        router = PoolRouter(pool(1))
        report(router, 2, 3)
        heard(router, 1.0, SharedLoad(in_flight=4, pending_prefill_tokens=10))
        assert requests_at(router) == (5 + 4, 2 * PROMPT_TOKENS + 10)
        report(router, 0, 4, at_s=(2.0,))
        assert requests_at(router, 2.0) == (4, 10)


class TestSequences:
    def test_answers_of_one_request_are_no_foreign_work(self) -> None:
        router = PoolRouter(pool(1))
        router.on_request(0.0, request("a", text_of(400, "a"))._replace(sequences=64))
        report(router, 60, 4)
        assert requests_at(router) == (1, 400)
        router.on_first_token(1.5, "a")
        report(router, 0, 66, at_s=(2.0, 3.0))
        assert requests_at(router, 3.0) == (1 + 2, 0)
        router.on_finished(3.5, "a")
        report(router, 0, 2, at_s=(4.0,))
        assert requests_at(router, 4.0) == (2, 0)

    def test_other_replicas_hear_of_every_answer(self) -> None:
        router, other = PoolRouter(pool(1)), PoolRouter(pool(1))
        router.on_request(0.0, request("a", text_of(400, "a"))._replace(sequences=64))
        other.on_update(0.0, "peer", router.take_update(0.0), 0.0)
        report(other, 60, 4)
        assert requests_at(other) == (64, 400)
        router.on_aborted(1.0, "a")
        assert router.take_update(1.0).loads == {}


class TestRelease:
    def test_report_dispatches_requests_of_its_member_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []
        monkeypatch.setattr(Dispatcher, "release_all", lambda *_: asked.append("all") or ())
        monkeypatch.setattr(Dispatcher, "release", lambda _self, _now, member: asked.append(member) or ())
        report(PoolRouter(pool(3)), 2, 3, at_s=(0.0, 1.0, 2.0))
        assert asked == ["m-0"] * 3

    def test_equal_report_leaves_the_load_valid(self) -> None:
        router = PoolRouter(pool(1))
        report(router, 2, 3)
        before = router._fleet._ledger.loads["m-0"].others.load
        report(router, 2, 3, at_s=(2.0,))
        assert router._fleet._ledger.loads["m-0"].others.load is before


class TestLateReports:
    def test_report_without_a_load_keeps_the_last_one(self) -> None:
        router = PoolRouter(pool(1))
        report(router, 0, 9)
        for now in (2.0, 4.5, 8.0):
            router.on_profile(now, "m-0", EngineProfile(reason="/metrics was not answered within 1 s"))
            router.on_deadline(now)
            assert requests_at(router, now) == (9, 0)

    def test_late_report_counts_at_once(self) -> None:
        router = PoolRouter(pool(1))
        report(router, 0, 9)
        router.on_profile(2.0, "m-0", EngineProfile(reason="/metrics was not answered within 1 s"))
        report(router, 0, 8, at_s=(9.0,))
        assert requests_at(router, 9.0) == (8, 0)
        router.on_deadline(1.0 + FOREIGN_TTL_S)
        assert requests_at(router, 1.0 + FOREIGN_TTL_S) == (8, 0)

    def test_new_process_of_the_engine_has_no_foreign_work(self) -> None:
        router = PoolRouter(pool(1))
        for now in (0.0, 1.0):
            router.on_profile(now, "m-0", EngineProfile(waiting=0, running=9, started_s=100.0))
        router.on_profile(2.0, "m-0", EngineProfile(waiting=0, running=9, started_s=160.0))
        assert requests_at(router, 2.0) == (0, 0)

    def test_oldest_reports_expire_first(self) -> None:
        work, load = ForeignWork(), SharedLoad(in_flight=1)
        assert work.put(0.0, "a", load)
        assert work.put(1.0, "b", load)
        assert not work.put(2.0, "a", load)
        assert work.next_expiry() == 1.0 + FOREIGN_TTL_S
        assert work.expire(1.0 + FOREIGN_TTL_S) == {"b"}
        assert (work.load("b"), work.load("a"), work.next_expiry()) == (None, load, 2.0 + FOREIGN_TTL_S)
        assert work.put(3.0, "a", None)
        assert not work.put(4.0, "a", None)


class TestMemory:
    """An engine stores a shared prefix once; its report of the memory in use shows this."""

    SHARED = text_of(2500, "shared")

    def router(self) -> PoolRouter:
        """Return a router of one member with 10 000 tokens of KV, on which three prompts with one prefix decode."""
        router = PoolRouter(pool(1, routing=Routing(queue=Queue())))
        self.report(router, 0.0, 0.0)
        for n in range(3):
            assert isinstance(self.send(router, n, 0.5).answer, Decision)
            router.on_first_token(0.6, f"r{n}")
        return router

    def report(self, router: PoolRouter, now: float, usage: float | None, running: int = 3) -> tuple[object, ...]:
        profile = EngineProfile(waiting=0, running=running, kv_tokens=10_000, kv_usage=usage)
        return router.on_profile(now, "m-0", profile).outcomes

    def send(self, router: PoolRouter, n: int, now: float) -> Effects[Decision | Queued | Rejection]:
        return router.on_request(now, request(f"r{n}", self.SHARED + text_of(100, f"{n}"), now=now))

    def test_shared_prefix_does_not_queue_requests(self) -> None:
        router = self.router()
        self.report(router, 1.0, 0.29)
        assert isinstance(self.send(router, 3, 1.1).answer, Decision)

    def test_engine_without_a_report_counts_prompts_in_full(self) -> None:
        router = self.router()
        self.report(router, 1.0, None)
        assert isinstance(self.send(router, 3, 1.1).answer, Queued)

    def test_report_of_free_memory_dispatches_queued_requests(self) -> None:
        router = self.router()
        self.report(router, 1.0, 0.95)
        assert isinstance(self.send(router, 3, 1.1).answer, Queued)
        (outcome,) = self.report(router, 2.0, 0.29)
        assert isinstance(outcome, Decision)

    def test_requests_after_the_report_count_in_full(self) -> None:
        router = self.router()
        self.report(router, 1.0, 0.29)
        assert isinstance(self.send(router, 3, 1.1).answer, Decision)
        router.on_first_token(1.2, "r3")
        # The report has 2900 tokens. Two prompts of 2600 tokens that were sent later leave no room for a third one.
        assert isinstance(self.send(router, 4, 1.3).answer, Decision)
        router.on_first_token(1.4, "r4")
        assert isinstance(self.send(router, 5, 1.5).answer, Queued)

    def test_request_that_ends_frees_its_memory_at_once(self) -> None:
        router = self.router()
        self.report(router, 1.0, 0.95)
        assert isinstance(self.send(router, 3, 1.1).answer, Queued)
        (outcome,) = router.on_finished(1.2, "r0").outcomes
        assert isinstance(outcome, Decision)

    def test_foreign_requests_use_no_more_than_the_engine_says(self) -> None:
        router = PoolRouter(pool(1))
        for now in (0.0, 1.0):
            self.report(router, now, 0.02, running=64)
        view = router._fleet.candidates.view(1.0, request("x", text_of(400, "x")).chain).candidate("m-0")
        assert (view.in_flight, view.active_kv_tokens) == (64, 200)

    def test_full_memory_delays_requests_but_cannot_close_a_member(self) -> None:
        router = PoolRouter(pool(1, engine=Engine(), routing=Routing(queue=Queue())))
        lie = EngineProfile(waiting=0, running=10**6, kv_tokens=10_000, kv_usage=1.0)
        for now in (0.0, 1.0):
            router.on_profile(now, "m-0", lie)
        assert isinstance(router.on_request(1.0, request("a", text_of(400, "a"), now=1.0)).answer, Queued)
        assert dispatched_s(router, lie) <= 4.0


@pytest.mark.parametrize("tokens", [0, 1])
def test_tiny_prompts_do_not_stop_the_count(tokens: int) -> None:
    router = PoolRouter(pool(1))
    for n in range(600):
        decide(router, f"r{n}", text_of(tokens, "a"))
        router.on_aborted(0.0, f"r{n}")
    report(router, 2, 3)
    assert requests_at(router)[0] == 5
