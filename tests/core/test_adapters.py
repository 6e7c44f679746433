"""Tests of where requests for a LoRA adapter go: to members that have it loaded, within what the SLO permits."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from builders import pool, request, text_of
from core.queue_pools import slow_pool
from core.routers import decide
from dualmap.engines.profile import EngineProfile
from dualmap.pools.pool import MemberState, Model, Pool, ReceiptFields
from dualmap.requests import Decision, Request
from dualmap.router import PoolRouter

WITH = EngineProfile(models=("m", "sql"), adapters=("sql",))
WITHOUT = EngineProfile(models=("m",))
UNKNOWN = EngineProfile(reason="/v1/models was answered with 401")


def adapted(n: object, *, now: float = 0.0, tokens: int = 400, subset: frozenset[str] | None = None) -> Request:
    prompt = text_of(tokens, f"seed {n}")
    return request(f"{now}-{n}", prompt, now=now, subset=subset)._replace(adapter="sql")


def specified(count: int = 4) -> Pool:
    return replace(pool(count), model=Model(name="m", adapters=("sql",)))


def router_of(of: Pool, *profiles: EngineProfile) -> PoolRouter:
    """Return a router whose members' engines have these profiles."""
    router = PoolRouter(of)
    for n, profile in enumerate(profiles):
        router.on_profile(0.0, f"m-{n}", profile)
    return router


def decisions(router: PoolRouter, count: int = 40, now: float = 1.0) -> Iterator[Decision]:
    """Yield the decisions of requests with different prompts, which end at once."""
    for n in range(count):
        decision = router.on_request(now, adapted(n, now=now)).answer
        assert isinstance(decision, Decision)
        yield decision
        router.on_aborted(now, decision.request_id)


def chosen(router: PoolRouter, now: float = 1.0) -> set[str]:
    return {each.receipt.chosen for each in decisions(router, now=now)}


def states(router: PoolRouter) -> set[str]:
    return {each.receipt.adapter for each in decisions(router)}


class TestSpecified:
    """The specification names the adapter, so every member may serve it, perhaps after it loads the adapter."""

    def test_members_with_the_adapter_are_preferred(self) -> None:
        router = router_of(specified(), WITH, WITHOUT, WITH, UNKNOWN)
        assert chosen(router) == {"m-0", "m-2"}
        assert states(router) == {"loaded"}

    def test_fallback_of_the_destination_has_the_adapter(self) -> None:
        router = router_of(specified(), WITH, WITHOUT, WITH, UNKNOWN)
        assert {frozenset(each.endpoints) for each in decisions(router)} == {
            frozenset({"10.0.0.1:8000", "10.0.0.3:8000"})
        }

    @pytest.mark.parametrize("profiles", [(), (UNKNOWN,) * 4, (WITHOUT,) * 4])
    def test_all_members_are_possible_if_none_has_it(self, profiles: tuple[EngineProfile, ...]) -> None:
        assert chosen(router_of(specified(), *profiles)) == {"m-0", "m-1", "m-2", "m-3"}

    def test_overloaded_members_do_not_keep_the_adapter(self) -> None:
        router = router_of(specified(2), WITH, WITHOUT)
        slo_tokens = round(router.pool.slo.ttft_s * router.pool.engine.prefill_tokens_per_second)
        for n in range(2):
            busy = request(f"b{n}", text_of(slo_tokens, f"busy {n}"), subset=frozenset({"10.0.0.1"}))
            router.on_request(1.0, busy)
        decision = router.on_request(1.0, adapted("late", now=1.0)).answer
        assert isinstance(decision, Decision)
        assert (decision.receipt.chosen, decision.receipt.adapter) == ("m-1", "absent")

    def test_members_stay_preferred_if_all_are_overloaded(self) -> None:
        router = router_of(specified(2), WITH, WITHOUT)
        slo_tokens = round(router.pool.slo.ttft_s * router.pool.engine.prefill_tokens_per_second)
        for n in range(4):
            subset = frozenset({f"10.0.0.{1 + n % 2}"})
            router.on_request(1.0, request(f"b{n}", text_of(slo_tokens + n % 2, f"busy {n}"), subset=subset))
        assert chosen(router) == {"m-0"}

    def test_suspended_and_asleep_members_are_not_preferred(self) -> None:
        router = router_of(specified(3), WITH, replace(WITH, asleep=True), WITHOUT)
        for n in range(3):
            router.on_request(0.0, request(f"r{n}", text_of(400, f"{n}"), subset=frozenset({"10.0.0.1"})))
            router.on_failed(0.1, f"r{n}")
        assert chosen(router) == {"m-2"}

    def test_subset_without_the_adapter_is_served(self) -> None:
        router = router_of(specified(), WITH, WITHOUT, WITHOUT, WITHOUT)
        outcome = router.on_request(0.0, adapted(1, subset=frozenset({"10.0.0.2"}))).answer
        assert isinstance(outcome, Decision)
        assert (outcome.receipt.chosen, outcome.receipt.adapter) == ("m-1", "absent")

    def test_later_list_of_models_counts(self) -> None:
        router = router_of(specified(2), WITH, WITHOUT)
        assert chosen(router) == {"m-0"}
        router.on_profile(1.0, "m-1", WITH)
        assert chosen(router) == {"m-0", "m-1"}
        router.on_profile(2.0, "m-0", WITHOUT)
        assert chosen(router) == {"m-1"}


class TestDiscovered:
    """Only engines say that the pool has the adapter: an engine that does not list it would answer 404."""

    def test_members_without_the_adapter_are_excluded_under_load(self) -> None:
        router = router_of(pool(3), WITH, WITHOUT, WITH)
        slo_tokens = 3 * round(router.pool.slo.ttft_s * router.pool.engine.prefill_tokens_per_second)
        for n in range(2):
            subset = frozenset({f"10.0.0.{1 + 2 * n}"})
            router.on_request(1.0, request(f"b{n}", text_of(slo_tokens, f"busy {n}"), subset=subset))
        assert chosen(router) == {"m-0", "m-2"}

    def test_unknown_members_are_possible_beyond_the_slo(self) -> None:
        router = router_of(pool(3), WITH, WITHOUT, UNKNOWN)
        assert chosen(router) == {"m-0"}
        slo_tokens = 3 * round(router.pool.slo.ttft_s * router.pool.engine.prefill_tokens_per_second)
        router.on_request(1.0, request("b", text_of(slo_tokens, "busy"), subset=frozenset({"10.0.0.1"})))
        assert chosen(router) == {"m-2"}
        assert states(router) == {"unknown"}

    def test_suspended_member_is_better_than_one_without(self) -> None:
        router = router_of(pool(2), WITH, WITHOUT)
        for n in range(3):
            router.on_request(0.0, adapted(n))
            router.on_failed(0.1, f"0.0-{n}")
        assert chosen(router) == {"m-0"}

    def test_draining_member_does_not_keep_the_adapter(self) -> None:
        of = pool(2)
        router = router_of(of, WITH, WITHOUT)
        leaving = replace(of.members[0], state=MemberState.DRAINING)
        router.on_pool(1.0, replace(of, members=(leaving, of.members[1]), ring_version=2))
        assert chosen(router) == {"m-1"}

    def test_restarted_member_is_unknown(self) -> None:
        of = pool(2)
        router = router_of(of, WITH, WITH)
        again = replace(of.members[0], incarnation="2")
        router.on_pool(1.0, replace(of, members=(again, of.members[1]), ring_version=2))
        assert chosen(router) == {"m-1"}
        assert states(router) == {"loaded"}


class TestReceipt:
    def test_receipt_says_the_adapter_only_for_its_requests(self) -> None:
        router = router_of(specified(2), WITH, WITHOUT)
        (decision,) = decisions(router, 1)
        assert decision.receipt.header().endswith('source="records", adapter="loaded"')
        assert decision.receipt.as_json()["adapter"] == "loaded"
        assert "adapter" not in decision.receipt.header(ReceiptFields.CHOSEN)
        base = decide(router, "base", text_of(400, "base")).receipt
        assert "adapter" not in base.header()
        assert "adapter" not in base.as_json()

    def test_requests_of_the_model_use_all_members(self) -> None:
        router = router_of(specified(), WITH, WITHOUT, WITHOUT, WITHOUT)
        found = set()
        for n in range(40):
            found.add(decide(router, f"r{n}", text_of(400, f"{n}")).receipt.chosen)
        assert found == {"m-0", "m-1", "m-2", "m-3"}

    def test_moved_request_says_the_adapter_of_its_new_member(self) -> None:
        crowding = slow_pool(2, policy="cache_affinity", slo_ttft_s=6.0)
        router = router_of(replace(crowding, model=Model(name="m", adapters=("sql",))), UNKNOWN, WITHOUT)
        for n in range(200):
            router.on_request(0.0, adapted(n, tokens=1500))
            if router.status().endpoints[1].in_flight:
                router.on_aborted(0.0, f"0.0-{n}")
            if router.status().endpoints[0].held == 6:
                break
        router.on_pool(0.0, replace(router.pool, routing=replace(crowding.routing, policy="dualmap_paper")))
        moved = router.on_request(0.0, adapted("huge", tokens=9000)).outcomes
        assert moved
        for each in moved:
            assert isinstance(each, Decision)
            assert (each.receipt.rule, each.receipt.chosen) == ("rebalanced", "m-1")
            assert each.receipt.adapter == "absent"
