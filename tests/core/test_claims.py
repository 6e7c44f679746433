"""Tests of the winning pool if several pools have the same model name."""

from dualmap.pools.claims import Claimant, LostClaim, lost_claims
from dualmap.pools.pool import Model, Pool


def claimant(name: str, created: int, *names: str) -> Claimant:
    return Claimant(pool=f"llm/{name}", created=f"2026-11-20T08:00:{created:02}Z", names=names)


def lost(name: str, model: str, owner: str) -> LostClaim:
    return LostClaim(pool=f"llm/{name}", name=model, owner=f"llm/{owner}")


def test_oldest_pool_gets_the_model_name_in_any_order() -> None:
    young, old, middle = claimant("a", 3, "x"), claimant("c", 1, "x"), claimant("b", 2, "x")
    assert lost_claims([young, old, middle], {}) == (lost("b", "x", "c"), lost("a", "x", "c"))
    assert lost_claims([middle, young, old], {}) == lost_claims([young, old, middle], {})


def test_first_pool_by_name_gets_model_name_at_equal_age() -> None:
    assert lost_claims([claimant("b", 1, "x"), claimant("a", 1, "x")], {}) == (lost("b", "x", "a"),)


def test_each_model_name_is_assigned_separately() -> None:
    old, young = claimant("old", 1, "x", "x"), claimant("young", 2, "y", "x")
    assert lost_claims([young, old, claimant("last", 3, "y")], {}) == (
        lost("young", "x", "old"),
        lost("last", "y", "young"),
    )


def test_name_claims_include_model_name_aliases_and_adapters() -> None:
    model = Model(name="Qwen/Qwen2.5-7B", aliases=("qwen", "small"), adapters=("sql",))
    pool = Pool(namespace="llm", name="qwen", model=model)
    assert Claimant.of(pool, "then") == Claimant(
        pool="llm/qwen", created="then", names=("Qwen/Qwen2.5-7B", "qwen", "small", "sql")
    )


def test_reserved_model_name_is_lost_by_pools_of_other_namespaces() -> None:
    old, young = claimant("old", 1, "x", "y"), claimant("young", 2, "x")
    prod = Claimant(pool="prod/late", created="2026-11-20T08:00:03Z", names=("x",))
    for claimants in ([old, young], [old, young, prod]):
        assert list(lost_claims(claimants, {"x": "prod", "other": "prod"})) == [
            LostClaim(pool="llm/old", name="x", owner="prod", reserved=True),
            LostClaim(pool="llm/young", name="x", owner="prod", reserved=True),
        ]


def test_reserved_model_name_goes_to_the_oldest_pool_of_its_namespace() -> None:
    old, young = claimant("old", 1, "x"), claimant("young", 2, "x")
    assert lost_claims([young, old], {"x": "llm"}) == (lost("young", "x", "old"),)
