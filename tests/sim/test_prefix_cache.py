"""Tests of the engine's prefix cache: chains, recency, and eviction of only leaves."""

from hypothesis import given
from hypothesis import strategies as st

from dualmap_sim.prefix_cache import PrefixCache


def test_cache_match_is_contiguous_from_the_first_block() -> None:
    cache = PrefixCache(10)
    cache.insert([1, 2, 3])

    assert cache.match([1, 2, 3, 4]) == 3
    assert cache.match([1, 2, 9, 3]) == 2
    assert cache.match([2, 3]) == 2  # with chained hashes, [2, 3] cannot be a real prompt
    assert cache.match([9, 2, 3]) == 0


def test_cache_evicts_a_leaf_before_its_parent() -> None:
    cache = PrefixCache(4)
    cache.insert([1, 2, 3])
    cache.insert([7, 8])

    assert [block in cache for block in (1, 2, 3, 7, 8)] == [True, True, False, True, True]


def test_cache_use_refreshes_all_blocks_of_the_chain() -> None:
    cache = PrefixCache(4)
    cache.insert([1, 2])
    cache.insert([7, 8])
    cache.insert([1, 2])
    cache.insert([9])

    assert cache.match([1, 2]) == 2
    assert cache.match([7, 8]) == 1


def test_cache_keeps_a_shared_prefix_longer_than_its_oldest_branch() -> None:
    cache = PrefixCache(4)
    cache.insert([1, 2, 3])
    cache.insert([1, 2, 4])
    cache.insert([1, 2, 5])

    assert cache.match([1, 2, 3]) == 2
    assert cache.match([1, 2, 4]) == 3
    assert cache.match([1, 2, 5]) == 3


def test_cache_keeps_the_start_of_a_chain_longer_than_the_cache() -> None:
    cache = PrefixCache(2)
    cache.insert([1, 2, 3, 4])

    assert cache.match([1, 2, 3, 4]) == 2


def test_cache_without_capacity_contains_no_blocks() -> None:
    cache = PrefixCache(0)
    cache.insert([1, 2])

    assert len(cache) == 0
    assert cache.match([1, 2]) == 0


def test_unbounded_cache_evicts_no_block() -> None:
    cache = PrefixCache(None)
    for start in range(0, 1000, 10):
        cache.insert(range(start, start + 10))

    assert len(cache) == 1000
    assert cache.match(range(10)) == 10


# Paths in a ternary tree as chains of block hashes; a block's hash is its path.
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=60)


@given(paths=PATHS, capacity=st.integers(0, 12))
def test_cache_is_bounded_and_keeps_parents_of_blocks(paths: list[list[int]], capacity: int) -> None:
    cache = PrefixCache(capacity)
    seen: dict[int, int | None] = {}
    for path in paths:
        chain: list[int] = []
        for step in path:
            block = (chain[-1] if chain else 0) * 3 + step + 1
            seen[block] = chain[-1] if chain else None
            chain.append(block)
        cache.insert(chain)

        assert len(cache) <= capacity
        assert cache.match(chain) == min(len(chain), capacity)
        assert all(parent is None or parent in cache for block, parent in seen.items() if block in cache)
