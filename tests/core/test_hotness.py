import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.keys.hotness import BUCKETS, MAX_NODES, MIN_SPLIT_REQUESTS, HotnessTree

WINDOW_S = 60.0
SHARES = {"split_share": 0.125, "merge_share": 0.0625}


def tree(initial: int = 2, longest: int = 64) -> HotnessTree:
    return HotnessTree(initial_blocks=initial, max_blocks=longest, window_s=WINDOW_S)


def prompt(shared: int, own: int, length: int = 20) -> list[int]:
    """Return a chain with ``shared`` common leading blocks, followed by unique blocks."""
    return [n if n < shared else 1000 * (own + 1) + n for n in range(length)]


class NaiveHotness:
    """A simple reference implementation of the rules, which computes every sum from a list of counts with times."""

    def __init__(self, initial: int, longest: int) -> None:
        self.initial, self.longest = initial, longest
        self.log: list[tuple[int, list[int]]] = []
        self.split: set[int] = set()
        self.merges = 0

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
        newest = sorted({when for when, _ in self.log})[-2:]
        recent = [nodes for when, nodes in self.log if when in newest]
        blocks = min(self.initial, deepest)
        while self.initial <= blocks < deepest and self.is_split(hashes[blocks - 1], recent):
            blocks += 1
        return blocks

    def is_split(self, node: int, recent: list[list[int]]) -> bool:
        everything = [nodes for _, nodes in self.log]
        shares = []
        for requests in (everything, recent):
            behind = sum(node in nodes for nodes in requests)
            shares.append((behind, behind / len(requests)))
        if node in self.split and all(share < SHARES["merge_share"] for _, share in shares):
            self.split.remove(node)
            self.merges += 1
        elif any(count >= MIN_SPLIT_REQUESTS and share > SHARES["split_share"] for count, share in shares):
            self.split.add(node)
        return node in self.split


def test_hotness_equals_a_simple_reference_implementation() -> None:
    lengths, merges = Counter[int](), 0
    for seed in range(25):
        chance, now = random.Random(seed), 0.0
        one, reference = tree(longest=6), NaiveHotness(2, 6)
        for n in range(500):
            now += chance.choice([0.0, 0.05, 0.4]) if n % 90 else chance.uniform(0, 40)
            # One of three prefixes is hot, and changes every hundred requests; many other requests have unique
            # prefixes.
            fate = chance.random()
            if fate < 0.5:
                group = n // 100 % 3 if fate < 0.45 else chance.randrange(3)
                hashes = [node + 10**7 * group for node in prompt(5, n, chance.randrange(2, 9))]
            else:
                hashes = prompt(0, n, 5)
            length = one.key_blocks(now, hashes, **SHARES)
            assert length == reference.key_blocks(now, hashes)
            lengths[length] += 1
        merges += reference.merges
    # The comparison is meaningful only if keys grew and shrank.
    assert lengths.total() - lengths[2] - lengths[1] - lengths[0] > 500
    assert merges > 3


def test_key_has_initial_length_or_the_prompt_length() -> None:
    one = tree()
    for length in range(5):
        for _ in range(200):
            assert one.key_blocks(0.0, prompt(9, 0, length), **SHARES) <= length
    assert one.key_blocks(0.0, prompt(0, 77), **SHARES) == 2


def test_key_of_a_hot_prefix_grows_until_the_requests_differ() -> None:
    one = tree()
    lengths = [one.key_blocks(0.1 * n, prompt(13, n), **SHARES) for n in range(60)]
    assert lengths[: MIN_SPLIT_REQUESTS - 1] == [2] * (MIN_SPLIT_REQUESTS - 1)
    # The key has the 13 shared blocks and the request's first unique block.
    assert lengths[-1] == 14


def test_hot_prefix_is_detected_among_other_traffic() -> None:
    one, now = tree(), 0.0
    for n in range(1200):
        now += 0.05
        one.key_blocks(now, prompt(0, n), **SHARES)
    began, n = now, 0
    while one.key_blocks(now, prompt(5, 5000 + n), **SHARES) == 2:
        for _ in range(2):
            n += 1
            now += 0.05
            one.key_blocks(now, prompt(0, 9000 + n), **SHARES)
        now += 0.05
    assert now - began <= 10.0


def test_hotness_with_few_requests_lengthens_no_key() -> None:
    one = tree()
    assert {one.key_blocks(20.0 * n, prompt(13, n), **SHARES) for n in range(200)} == {2}


def test_key_of_a_cooled_prefix_gets_shorter() -> None:
    one = tree()
    for n in range(100):
        one.key_blocks(0.1 * n, prompt(5, n), **SHARES)
    assert one.key_blocks(10.0, prompt(5, 500), **SHARES) == 6
    # Between the merge and the split share, the key stays split. Below the merge share, the key is merged.
    for n in range(800):
        one.key_blocks(31.0, prompt(0, 1000 + n), **SHARES)
    assert one.key_blocks(32.0, prompt(5, 501), **SHARES) == 6
    for n in range(1500):
        one.key_blocks(33.0, prompt(0, 2000 + n), **SHARES)
    assert one.key_blocks(34.0, prompt(5, 502), **SHARES) == 2


def test_hotness_window_drops_old_requests() -> None:
    one = tree()
    for n in range(100):
        one.key_blocks(0.1 * n, prompt(5, n), **SHARES)
    assert one.key_blocks(10.0 + WINDOW_S + WINDOW_S / BUCKETS, prompt(5, 500), **SHARES) == 2
    assert (one.nodes, one.split_prefixes) == (1, 0)


def test_hotness_memory_is_bounded() -> None:
    one = tree()
    for n in range(MAX_NODES + 500):
        one.key_blocks(0.0, prompt(0, n, 3), **SHARES)
    assert one.nodes == MAX_NODES


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(0, 500)), min_size=50, max_size=300))
def test_hotness_replicas_with_shared_counts_agree_on_keys(requests: list[tuple[int, int, int]]) -> None:
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


def test_hotness_counts_for_replicas_are_returned_once() -> None:
    one = tree()
    one.key_blocks(0.0, prompt(4, 1), **SHARES)
    assert one.take_counts().requests == 1
    assert one.take_counts() == type(one.take_counts())(requests=0, nodes={})
