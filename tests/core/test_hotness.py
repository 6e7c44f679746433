from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.hotness import BUCKETS, MAX_NODES, MIN_SPLIT_REQUESTS, HotnessTree

WINDOW_S = 60.0
SHARES = {"split_share": 0.125, "merge_share": 0.0625}


def tree(initial: int = 2, longest: int = 64) -> HotnessTree:
    return HotnessTree(initial_blocks=initial, max_blocks=longest, window_s=WINDOW_S)


def prompt(shared: int, own: int, length: int = 20) -> list[int]:
    """A chain whose first ``shared`` blocks are everybody's and whose others are its own."""
    return [n if n < shared else 1000 * (own + 1) + n for n in range(length)]


class NaiveHotness:
    """The same rules over a plain list of what was counted when; every sum is computed from scratch."""

    def __init__(self, initial: int, longest: int) -> None:
        self.initial, self.longest = initial, longest
        self.log: list[tuple[int, list[int]]] = []
        self.split: set[int] = set()

    def key_blocks(self, now: float, hashes: list[int]) -> int:
        bucket = int(now // (WINDOW_S / BUCKETS))
        self.log = [(when, nodes) for when, nodes in self.log if when > bucket - BUCKETS]
        counts = Counter(node for _, nodes in self.log for node in nodes)
        self.split &= set(counts)
        deepest = min(len(hashes), self.longest)
        counted: list[int] = []
        if deepest >= self.initial:
            for node in hashes[self.initial - 1 : deepest]:
                counted.append(node)
                if not counts[node]:
                    break
        self.log.append((bucket, counted))
        counts.update(counted)
        blocks = min(self.initial, deepest)
        while self.initial <= blocks < deepest:
            share = counts[hashes[blocks - 1]] / len(self.log)
            node = hashes[blocks - 1]
            if node in self.split and share < SHARES["merge_share"]:
                self.split.remove(node)
            elif node not in self.split and counts[node] >= MIN_SPLIT_REQUESTS and share > SHARES["split_share"]:
                self.split.add(node)
            if node not in self.split:
                break
            blocks += 1
        return blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 9), st.floats(0, 0.6)), max_size=250))
def test_it_agrees_with_a_naive_reference(events: list[tuple[int, int, int, float]]) -> None:
    one, reference, now = tree(longest=6), NaiveHotness(2, 6), 0.0
    for shared, own, length, dt in events:
        now += dt
        hashes = prompt(shared, own, length)
        assert one.key_blocks(now, hashes, **SHARES) == reference.key_blocks(now, hashes)


def test_keys_start_at_the_initial_length_and_never_exceed_the_prompt() -> None:
    one = tree()
    for length in range(5):
        for _ in range(200):
            assert one.key_blocks(0.0, prompt(9, 0, length), **SHARES) <= length
    assert one.key_blocks(0.0, prompt(0, 77), **SHARES) == 2


def test_a_hot_prefix_grows_the_key_to_where_its_requests_part_within_a_window() -> None:
    one = tree()
    lengths = [one.key_blocks(0.1 * n, prompt(13, n), **SHARES) for n in range(60)]
    assert lengths[: MIN_SPLIT_REQUESTS - 1] == [2] * (MIN_SPLIT_REQUESTS - 1)
    # The key spans the 13 shared blocks and the first block of the request's own.
    assert lengths[-1] == 14


def test_a_nearly_empty_window_never_splits() -> None:
    one = tree()
    assert {one.key_blocks(20.0 * n, prompt(13, n), **SHARES) for n in range(200)} == {2}


def test_a_prefix_that_cools_is_merged_again() -> None:
    one = tree()
    for n in range(100):
        one.key_blocks(0.1 * n, prompt(5, n), **SHARES)
    assert one.key_blocks(10.0, prompt(5, 500), **SHARES) == 6
    # Between the merge and the split share it stays split; below the merge share it is merged.
    for n in range(800):
        one.key_blocks(11.0, prompt(0, 1000 + n), **SHARES)
    assert one.key_blocks(12.0, prompt(5, 501), **SHARES) == 6
    for n in range(1500):
        one.key_blocks(13.0, prompt(0, 2000 + n), **SHARES)
    assert one.key_blocks(14.0, prompt(5, 502), **SHARES) == 2


def test_the_window_forgets() -> None:
    one = tree()
    for n in range(100):
        one.key_blocks(0.1 * n, prompt(5, n), **SHARES)
    assert one.key_blocks(10.0 + WINDOW_S + WINDOW_S / BUCKETS, prompt(5, 500), **SHARES) == 2
    assert (one.nodes, one.split_prefixes) == (1, 0)


def test_memory_is_bounded() -> None:
    one = tree()
    for n in range(MAX_NODES + 500):
        one.key_blocks(0.0, prompt(0, n, 3), **SHARES)
    assert one.nodes == MAX_NODES


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(0, 500)), min_size=50, max_size=300))
def test_replicas_that_exchange_counts_agree_on_every_key(requests: list[tuple[int, int, int]]) -> None:
    replicas = [tree() for _ in range(3)]
    for to, shared, own in requests:
        replicas[to].key_blocks(1.0, prompt(shared, own), **SHARES)
    counts = [replica.take_counts() for replica in replicas]
    for number, replica in enumerate(replicas):
        for other, theirs in enumerate(counts):
            if other != number:
                replica.merge(1.0, theirs)
    assert sum(each.requests for each in counts) == len(requests)
    probes = [prompt(shared, 900) for shared in range(9)]
    lengths = [[replica.key_blocks(1.0, probe, **SHARES) for probe in probes] for replica in replicas]
    assert lengths[0] == lengths[1] == lengths[2]


def test_counts_are_handed_out_once() -> None:
    one = tree()
    one.key_blocks(0.0, prompt(4, 1), **SHARES)
    assert one.take_counts().requests == 1
    assert one.take_counts() == type(one.take_counts())(requests=0, nodes={})
