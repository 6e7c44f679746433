"""Tests of where requests for the base model go if engines list other models than their pool names."""

from dataclasses import replace

import pytest

from builders import pool, request, text_of
from dualmap.engines.profile import EngineProfile
from dualmap.pools.pool import Engine, Model, Pool, Queue, Routing
from dualmap.requests import Decision, Queued, Request
from dualmap.router import PoolRouter

RIGHT = EngineProfile(models=("m", "small"))
PARTLY = EngineProfile(models=("m",))
WRONG = EngineProfile(models=("other",))
UNKNOWN = EngineProfile(reason="/v1/models was answered with 401")


def named(count: int = 3, *, type: str = "vLLM") -> Pool:
    return replace(pool(count, engine=Engine(type=type)), model=Model(name="m", aliases=("small",), adapters=("sql",)))


def router_of(of: Pool, *profiles: EngineProfile) -> PoolRouter:
    """Return a router whose members' engines have these profiles."""
    router = PoolRouter(of)
    for n, profile in enumerate(profiles):
        router.on_profile(0.0, f"m-{n}", profile)
    return router


def asked(n: object, model: str = "m", *, now: float = 1.0, subset: frozenset[str] | None = None) -> Request:
    return request(f"{now}-{n}", text_of(400, f"seed {n}"), now=now, subset=subset)._replace(model=model)


def chosen(router: PoolRouter, model: str = "m", *, subset: frozenset[str] | None = None) -> set[str]:
    """Return the members of requests with different prompts, which end at once."""
    found = set()
    for n in range(40):
        decision = router.on_request(1.0, asked(n, model, subset=subset)).answer
        assert isinstance(decision, Decision)
        found.add(decision.receipt.chosen)
        router.on_aborted(1.0, decision.request_id)
    return found


def busy(router: PoolRouter, member: int) -> None:
    """Give a member prefills beyond the SLO."""
    tokens = 3 * round(router.pool.slo.ttft_s * router.pool.engine.prefill_tokens_per_second)
    router.on_request(
        1.0, request(f"b{member}", text_of(tokens, f"b{member}"), subset=frozenset({f"10.0.0.{member + 1}"}))
    )


class TestEnginesThatCheckNames:
    """vLLM answers 404 to a request for a name that it does not list."""

    def test_member_without_the_name_gets_no_request(self) -> None:
        router = router_of(named(), RIGHT, WRONG, UNKNOWN)
        assert chosen(router) == {"m-0", "m-2"}
        assert chosen(router, "small") == {"m-0", "m-2"}

    def test_member_without_the_alias_gets_requests_for_the_model(self) -> None:
        router = router_of(named(), RIGHT, PARTLY, UNKNOWN)
        assert chosen(router) == {"m-0", "m-1", "m-2"}
        assert chosen(router, "small") == {"m-0", "m-2"}

    def test_member_without_the_name_gets_no_request_under_load(self) -> None:
        router = router_of(named(2), RIGHT, WRONG)
        busy(router, 0)
        assert chosen(router) == {"m-0"}

    def test_destination_has_no_fallback_without_the_name(self) -> None:
        router = router_of(named(), RIGHT, WRONG, RIGHT)
        decision = router.on_request(1.0, asked(1)).answer
        assert isinstance(decision, Decision)
        assert set(decision.endpoints) == {"10.0.0.1:8000", "10.0.0.3:8000"}

    @pytest.mark.parametrize("profile", [RIGHT, WRONG, UNKNOWN])
    def test_all_members_count_if_all_are_alike(self, profile: EngineProfile) -> None:
        assert chosen(router_of(named(), profile, profile, profile)) == {"m-0", "m-1", "m-2"}

    def test_subset_of_members_without_the_name_is_served(self) -> None:
        router = router_of(named(), RIGHT, WRONG, RIGHT)
        assert chosen(router, subset=frozenset({"10.0.0.2"})) == {"m-1"}

    def test_suspended_member_is_better_than_one_without_the_name(self) -> None:
        router = router_of(named(2), RIGHT, WRONG)
        for n in range(3):
            router.on_request(0.0, asked(n, now=0.0))
            router.on_failed(0.1, f"0.0-{n}")
        assert chosen(router) == {"m-0"}

    def test_later_list_counts(self) -> None:
        router = router_of(named(2), RIGHT, RIGHT)
        router.on_profile(1.0, "m-1", WRONG)
        assert chosen(router) == {"m-0"}
        router.on_profile(2.0, "m-1", RIGHT)
        assert chosen(router) == {"m-0", "m-1"}

    def test_member_without_an_engine_counts_as_before(self) -> None:
        router = router_of(named(2), RIGHT, EngineProfile(mismatch="no vLLM engine answers"))
        assert chosen(router) == {"m-0", "m-1"}

    def test_specified_adapter_may_be_loaded_on_demand(self) -> None:
        router = router_of(named(2), WRONG, WRONG)
        found = {
            router.on_request(1.0, asked(n, "")._replace(adapter="sql")).answer.receipt.chosen  # type: ignore[union-attr]
            for n in range(40)
        }
        assert found == {"m-0", "m-1"}

    def test_request_without_a_prompt_goes_to_a_member_with_the_name(self) -> None:
        router = router_of(named(), RIGHT, WRONG, RIGHT)
        found = {each for _ in range(4) for each in router.any_endpoints(None)}
        assert found == {"10.0.0.1:8000", "10.0.0.3:8000"}

    def test_queued_requests_leave_a_member_that_lists_another_model(self) -> None:
        of = replace(named(2), routing=Routing(queue=Queue()))
        router = router_of(of, RIGHT, RIGHT)
        only = frozenset({"10.0.0.1", "10.0.0.2"})
        waiting: dict[str, str] = {}
        for n in range(40):
            answer = router.on_request(1.0, asked(n, subset=only)).answer
            if isinstance(answer, Queued):
                waiting[answer.request_id] = "queued"
        held = {each.id: each.held for each in router.status().endpoints}
        assert all(held.values())
        router.on_profile(1.0, "m-1", WRONG)
        held = {each.id: each.held for each in router.status().endpoints}
        assert held["m-0"] > 0
        assert held["m-1"] == 0


class TestOtherEngines:
    """Engines of other types usually answer a request for any name, so a mismatch is only a reason to prefer others."""

    @pytest.mark.parametrize("type", ["SGLang", "TensorRTLLM", "Generic"])
    def test_members_with_the_name_are_preferred_within_the_slo(self, type: str) -> None:
        router = router_of(named(type=type), RIGHT, WRONG, UNKNOWN)
        assert chosen(router) == {"m-0", "m-2"}
        busy(router, 0)
        busy(router, 2)
        assert chosen(router) == {"m-1"}

    def test_request_without_a_prompt_goes_to_a_member_with_the_name(self) -> None:
        router = router_of(named(type="SGLang"), RIGHT, WRONG, RIGHT)
        assert {each for _ in range(4) for each in router.any_endpoints(None)} == {"10.0.0.1:8000", "10.0.0.3:8000"}


class TestText:
    def test_names_that_an_engine_lacks_are_shown_with_its_own(self) -> None:
        assert WRONG.served_instead(("m",)) == "serves [other], not m"
        assert PARTLY.served_instead(("m", "small")) == "serves [m], not small"

    @pytest.mark.parametrize("profile", [RIGHT, UNKNOWN])
    def test_engine_that_lists_all_names_or_nothing_has_no_text(self, profile: EngineProfile) -> None:
        assert profile.served_instead(("m", "small")) == ""

    def test_adapters_are_not_shown(self) -> None:
        engine = EngineProfile(models=("other", "sql"), adapters=("sql",))
        assert engine.served_instead(("m",)) == "serves [other], not m"

    def test_long_lists_are_shortened(self) -> None:
        engine = EngineProfile(models=tuple(f"o{n}" for n in range(1000)))
        assert engine.served_instead(f"a{n}" for n in range(5)) == (
            "serves [o0, o1, o2 and 997 more], not a0, a1, a2 and 2 more"
        )

    def test_mismatch_precedes_other_problems(self) -> None:
        assert EngineProfile(mismatch="serves [other], not m", reason="r", asleep=True).problem == (
            "serves [other], not m; r"
        )
