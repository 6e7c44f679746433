"""Tests of pools with the same model name: the reconciled pools after a change, the losing pools, and equal decisions
of routers.
"""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dualmap.objects.pool_reader import API_VERSION
from dualmap.pools.claims import LostClaim
from dualmap_extproc.pools.objects import PoolObjects
from dualmap_operator.observe.claims import Claims
from dualmap_operator.observe.mirror import Key


def body(name: str, *names: str, created: int = 0, uid: str = "", **more: Any) -> dict[str, Any]:
    model, *aliases = names
    return {
        "apiVersion": API_VERSION,
        "kind": "InferencePool",
        "metadata": {
            "namespace": "llm",
            "name": name,
            "uid": uid or f"uid-of-{name}",
            "creationTimestamp": f"2026-11-20T08:00:{created:02}Z",
        },
        "spec": {"model": {"name": model, "aliases": aliases}, **more.pop("spec", {})},
        **more,
    }


class Index:
    """The index of claims, filled by a mirror's listener."""

    def __init__(self) -> None:
        self.claims = Claims()
        self.documents: dict[str, dict[str, Any]] = {}

    def put(self, document: dict[str, Any]) -> set[str]:
        return self.change(document["metadata"]["name"], document)

    def change(self, name: str, document: dict[str, Any] | None) -> set[str]:
        before = self.documents.pop(name, None)
        if document is not None:
            self.documents[name] = document
        return {key[1] for key in self.claims.changed(_key(name), before, document)}

    def lost(self, name: str) -> dict[str, str]:
        return {each.name: each.owner for each in self.claims.lost(_key(name))}


def _key(name: str) -> Key:
    return "llm", name


def test_younger_pool_loses_only_the_shared_model_name() -> None:
    index = Index()
    index.put(body("young", "shared", "mine", created=2))
    assert index.lost("young") == {}
    assert index.put(body("old", "other", "shared", created=1)) == {"young"}
    assert index.lost("young") == {"shared": "llm/old"}
    assert index.lost("old") == {}
    assert index.lost("never heard of") == {}


def test_released_model_name_triggers_reconcile_of_rival_pools() -> None:
    index = Index()
    for number, name in enumerate(("old", "young", "apart")):
        index.put(body(name, "apart" if name == "apart" else "shared", created=number))
    assert index.put(body("old", "old")) == {"young"}
    assert index.lost("young") == {}
    assert index.put(body("old", "old", "shared")) == {"young"}
    assert index.lost("young") == {"shared": "llm/old"}
    assert index.change("old", None) == {"young"}
    assert index.lost("young") == {}


def test_status_change_triggers_no_reconcile_of_other_pools() -> None:
    index = Index()
    index.put(body("old", "shared"))
    index.put(body("young", "shared", created=1))
    for name in ("old", "young"):
        written = {**index.documents[name], "status": {"inRing": 3}}
        assert index.put(written) == set()
    assert index.put(body("old", "shared", spec={"replicas": 7})) == set()


def test_pool_with_invalid_spec_keeps_names_until_recreated() -> None:
    index = Index()
    index.put(body("old", "shared"))
    index.put(body("young", "shared", created=1))
    assert index.put(body("old", "shared", spec={"replicaz": 7})) == set()
    assert index.lost("young") == {"shared": "llm/old"}
    assert index.put(body("old", "shared", uid="another", spec={"replicaz": 7})) == {"young"}
    assert index.lost("young") == {}


def test_change_of_reservations_triggers_reconcile_of_pools_with_the_names() -> None:
    index = Index()
    index.put(body("qwen", "shared", "mine"))
    index.put(body("apart", "apart"))
    assert index.claims.reserve({"shared": "prod", "unused": "prod"}) == {_key("qwen")}
    assert index.lost("qwen") == {"shared": "prod"}
    assert index.claims.reserve({"shared": "prod", "apart": "llm"}) == {_key("apart")}
    assert index.claims.reserve({"shared": "llm", "apart": "llm"}) == {_key("qwen")}
    assert index.lost("qwen") == {}


def test_names_to_reserve_are_neither_lost_nor_reserved_yet() -> None:
    index = Index()
    index.put(body("old", "shared"))
    index.put(body("young", "shared", "mine", "taken", " odd", "kept", created=1))
    index.claims.reserve({"taken": "prod", "kept": "llm"})
    assert index.claims.unreserved(_key("young")) == ("mine",)
    assert index.claims.unreserved(_key("old")) == ("shared",)
    assert index.claims.unreserved(_key("none")) == ()


def test_pool_and_its_prefill_pool_share_a_model_without_a_conflict() -> None:
    index = Index()
    index.put(body("prefill", "shared", "mine"))
    assert index.put(body("qwen", "shared", created=1, spec={"prefillPool": "prefill"})) == {"prefill"}
    assert index.lost("qwen") == index.lost("prefill") == {}
    assert index.claims.unreserved(_key("prefill")) == ()
    assert index.claims.unreserved(_key("qwen")) == ("shared",)
    # The alias of the prefill pool is free for a third pool.
    index.put(body("third", "third", "mine", created=2))
    assert index.lost("third") == {}
    assert index.put(body("qwen", "shared", created=1)) == {"prefill", "third"}
    assert index.lost("qwen") == {"shared": "llm/prefill"}
    assert index.lost("third") == {"mine": "llm/prefill"}


def test_unusable_prefill_pool_has_a_reason_and_wakes_its_user() -> None:
    index = Index()
    index.put(body("qwen", "shared", spec={"prefillPool": "prefill"}))
    assert "does not exist" in index.claims.prefill_problem(_key("qwen"))
    assert index.put(body("prefill", "other")) == {"qwen"}
    assert "another model" in index.claims.prefill_problem(_key("qwen"))
    index.change("prefill", None)
    assert index.put(body("prefill", "shared", spec={"prefillPool": "third"})) == {"qwen"}
    assert "prefill pool of its own" in index.claims.prefill_problem(_key("qwen"))
    assert index.put(body("prefill", "shared")) == {"qwen"}
    assert index.claims.prefill_problem(_key("qwen")) == ""


_NAMES = st.lists(st.sampled_from(["v", "w", "x", "y", "z"]), min_size=1, max_size=3, unique=True)
_POOLS = st.sampled_from(["a", "b", "c", "d"])
_PREFILLERS = st.sampled_from(["", "", "a", "b"])
_CHANGES = st.lists(
    st.tuples(_POOLS, st.one_of(st.none(), st.tuples(_NAMES, st.integers(0, 2), st.booleans(), _PREFILLERS))),
    max_size=20,
)


@given(_CHANGES, st.dictionaries(st.sampled_from(["v", "w", "x"]), st.sampled_from(["llm", "prod"])))
def test_name_claims_are_equal_in_operator_and_router(
    changes: list[tuple[str, tuple[list[str], int, bool, str] | None]], reserved: dict[str, str]
) -> None:
    router, index = PoolObjects(), Index()
    router.reserve(reserved)
    index.claims.reserve(reserved)
    lives: dict[str, tuple[str, int]] = {}
    before: dict[str, tuple[LostClaim, ...]] = {}
    for number, (name, change) in enumerate(changes):
        if change is None:
            router.remove(body(name, "any"))
            woken = index.change(name, None)
            lives.pop(name, None)
        else:
            names, created, readable, prefiller = change
            uid, created = lives.setdefault(name, (f"life-{number}", created))
            document = body(name, *names, created=created, uid=uid, spec={"prefillPool": prefiller})
            if not readable:
                document["spec"]["replicaz"] = 1
            router.put(document)
            woken = index.put(document)
        after = {each: index.claims.lost(_key(each)) for each in "abcd"}
        told = {(lost.pool, repr(lost.name), f" {lost.owner}") for each in after.values() for lost in each}
        refused = [each for each in router.invalid if each.field == "spec.model"]
        assert {each[:2] for each in told} == {(each.pool, each.value) for each in refused}
        assert all(any(pool == each.pool and owner in each.accepted for each in refused) for pool, _, owner in told)
        assert {each for each in after if after[each] != before.get(each, ())} <= woken | {name}
        problems = {f"llm/{each}": index.claims.prefill_problem(_key(each)) for each in "abcd"}
        unusable = {each.pool for each in router.invalid if each.field == "spec.prefillPool"}
        # A pool that names itself is invalid. The fault of its last valid version cannot be told apart in the router.
        named_itself = {each.pool for each in router.invalid if each.accepted.startswith("the name of another pool")}
        assert {pool for pool, problem in problems.items() if problem} - named_itself == unusable - named_itself
        before = after
