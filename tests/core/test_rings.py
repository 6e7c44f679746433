import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import members
from dualmap.keys.rings import DualRing
from dualmap.pools.pool import Member, MemberState, Ring, RingAlgorithm

KEYS = st.integers(0, 2**64 - 1)
SPECS = st.builds(
    Ring, algorithm=st.sampled_from(RingAlgorithm), virtual_nodes=st.integers(1, 64), seed=st.integers(0, 9)
)
CHANCE = random.Random(7)
MANY_KEYS = tuple(CHANCE.getrandbits(64) for _ in range(20_000))


def weighted(weights: list[int]) -> tuple[Member, ...]:
    return tuple(
        Member(id=f"m-{n}", address=f"10.0.0.{n + 1}", port=8000, weight=weight) for n, weight in enumerate(weights)
    )


@given(spec=SPECS, weights=st.lists(st.integers(1, 300), max_size=12), key=KEYS)
def test_pair_has_two_distinct_members_if_possible(spec: Ring, weights: list[int], key: int) -> None:
    ring = DualRing(weighted(weights), spec)
    pair = ring.pair(key)
    assert len(pair) == len(set(pair)) == min(2, len(weights))
    assert set(pair) <= {member.id for member in ring.members}


@given(spec=SPECS, key=KEYS, order=st.permutations(list(range(7))))
def test_pair_is_independent_of_order_and_addresses(spec: Ring, key: int, order: list[int]) -> None:
    one = DualRing(members(7), spec)
    moved = [Member(id=f"m-{n}", address=f"10.9.9.{n}", port=9000 + n) for n in order]
    assert one.pair(key) == DualRing(moved, spec).pair(key)


@pytest.mark.parametrize("algorithm", RingAlgorithm)
@given(weights=st.lists(st.integers(1, 200), min_size=3, max_size=9), gone=st.integers(0, 8), seed=st.integers(0, 99))
def test_removed_ring_member_changes_only_its_pairs(
    algorithm: RingAlgorithm, weights: list[int], gone: int, seed: int
) -> None:
    spec = Ring(algorithm=algorithm, virtual_nodes=16, seed=seed)
    everyone = weighted(weights)
    leaver = everyone[gone % len(everyone)]
    before = DualRing(everyone, spec)
    after = DualRing([member for member in everyone if member is not leaver], spec)
    for key in MANY_KEYS[:300]:
        if leaver.id not in before.pair(key):
            assert after.pair(key) == before.pair(key)
    # Leaving and returning restores every pair.
    assert [DualRing(everyone, spec).pair(key) for key in MANY_KEYS[:50]] == [
        before.pair(key) for key in MANY_KEYS[:50]
    ]


@given(spec=SPECS, weights=st.lists(st.integers(1, 300), min_size=1, max_size=12), key=KEYS)
def test_ring_walk_visits_every_member_once_from_the_first(spec: Ring, weights: list[int], key: int) -> None:
    ring = DualRing(weighted(weights), spec)
    walk = list(ring.walk(key))
    assert sorted(walk) == list(range(len(weights)))
    assert ring.members[walk[0]].id == ring.pair(key)[0]


@given(spec=SPECS, key=KEYS)
def test_ring_walk_without_the_first_member_keeps_its_order(spec: Ring, key: int) -> None:
    ring = DualRing(members(7), spec)
    ids = [ring.members[position].id for position in ring.walk(key)]
    rest = DualRing([each for each in members(7) if each.id != ids[0]], spec)
    assert [rest.members[position].id for position in rest.walk(key)] == ids[1:]


def test_equal_ring_members_get_equal_key_shares() -> None:
    ring = DualRing(members(8), Ring())
    targets = Counter(ring.pair(key)[0] for key in MANY_KEYS)
    pair_members = Counter(member for key in MANY_KEYS for member in ring.pair(key))
    assert max(targets.values()) <= 1.05 * len(MANY_KEYS) / 8
    assert max(pair_members.values()) <= 1.05 * len(MANY_KEYS) * 2 / 8


@pytest.mark.parametrize(
    ("algorithm", "tolerance"), [(RingAlgorithm.RENDEZVOUS, 0.1), (RingAlgorithm.VIRTUAL_NODES, 0.3)]
)
def test_ring_key_shares_are_proportional_to_weights(algorithm: RingAlgorithm, tolerance: float) -> None:
    weights = [25, 50, 100, 200]
    ring = DualRing(weighted(weights), Ring(algorithm=algorithm, virtual_nodes=256))
    targets = Counter(ring.pair(key)[0] for key in MANY_KEYS)
    for number, weight in enumerate(weights):
        expected = len(MANY_KEYS) * weight / sum(weights)
        assert abs(targets[f"m-{number}"] - expected) <= tolerance * expected


def test_both_rings_place_keys_independently() -> None:
    # With independent rings, the second candidates of a member's keys are evenly distributed over all other members.
    ring = DualRing(members(8), Ring())
    others = Counter(ring.pair(key)[1] for key in MANY_KEYS if ring.pair(key)[0] == "m-0")
    assert len(others) == 7
    assert max(others.values()) <= 1.25 * sum(others.values()) / 7


def test_draining_and_zero_weight_members_get_no_ring_keys() -> None:
    draining = Member(id="d", address="10.0.0.9", port=1, state=MemberState.DRAINING)
    weightless = Member(id="w", address="10.0.0.8", port=1, state=MemberState.JOINING, weight=0)
    ring = DualRing([*members(2), draining, weightless], Ring())
    assert {member for key in MANY_KEYS[:200] for member in ring.pair(key)} == {"m-0", "m-1"}


def test_two_candidates_keep_maximum_load_near_the_mean() -> None:
    # Paper section 2.3 eq. 4: with two choices, the maximum load is at most m/n + log log n + O(1); with one choice it
    # is much larger.
    ring = DualRing(members(16), Ring())
    one, two = Counter[str](), Counter[str]()
    for key in MANY_KEYS[:16_000]:
        pair = ring.pair(key)
        one[pair[0]] += 1
        two[min(pair, key=lambda member: two[member])] += 1
    mean = 16_000 / 16
    assert max(two.values()) <= mean + 6
    assert max(one.values()) > mean + 6
