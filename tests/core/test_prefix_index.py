from collections import OrderedDict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dualmap.fleet.prefix_index import PrefixIndex, PrefixTree


def chain_of(name: int, length: int) -> list[int]:
    """Return a prompt's blocks; all prompts share their first three blocks with prompt 0."""
    return [n if n < 3 else name * 1000 + n for n in range(length)]


PROMPTS = st.builds(chain_of, st.integers(0, 40), st.integers(0, 30))
# Prompts that branch at blocks 3, 8 and 15, so that the index splits, shares and extends its runs of blocks.
BRANCHING = st.builds(
    lambda names, length: [10**6 * sum(name * 7**n for n, name in enumerate(names[: (n > 2) + (n > 7) + (n > 14)])) + n
                           for n in range(length)],
    st.tuples(*[st.integers(1, 3)] * 3),
    st.integers(0, 24),
)  # fmt: skip


def check(*indexes: PrefixIndex) -> None:
    """Assert the invariants of all indexes over one tree."""
    for index in indexes:
        assert len(index) == sum(len(run.hashes) for run in index._held) <= index._capacity
        order = list(index._held)
        for age, run in enumerate(order):
            # The index also has a run's parent, and evicts the parent later.
            assert run.parent is not None
            assert run.parent is index.tree.root or order.index(run.parent) > age
    waiting, reached = [indexes[0].tree.root], set()
    while waiting:
        parent = waiting.pop()
        for first, run in (parent.children or {}).items():
            reached.add(run)
            waiting.append(run)
            assert (run.parent, run.hashes[0]) == (parent, first)
            assert set(run.holders) == {index for index in indexes if run in index._held}
            assert len(run.holders) > 1 or run.holders is run.holders[0]._alone
    assert reached == {run for index in indexes for run in index._held}


@given(st.integers(0, 64), st.lists(PROMPTS, max_size=60))
def test_index_stays_within_capacity_and_keeps_newest_prompt(capacity: int, prompts: list[list[int]]) -> None:
    index = PrefixIndex(capacity)
    for prompt in prompts:
        index.add(prompt)
        assert len(index) <= capacity
        assert index.matched_blocks(prompt) == min(len(prompt), capacity)


@given(st.lists(PROMPTS, min_size=1, max_size=80))
def test_index_keeps_all_blocks_of_an_lru_of_75_percent_capacity(prompts: list[list[int]]) -> None:
    capacity = 128
    index, reference = PrefixIndex(capacity), OrderedDict[int, None]()
    for prompt in prompts:
        index.add(prompt)
        for block in reversed(prompt):
            reference.pop(block, None)
            reference[block] = None
        while len(reference) > capacity * 3 // 4:
            reference.popitem(last=False)
    for prompt in prompts:
        held = 0
        while held < len(prompt) and prompt[held] in reference:
            held += 1
        assert index.matched_blocks(prompt) >= held


STEPS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), BRANCHING),
    st.tuples(st.just("cut"), st.integers(0, 2), BRANCHING, st.integers(0, 24)),
    st.tuples(st.just("clear"), st.integers(0, 2)),
)


@given(st.lists(STEPS, max_size=40), st.lists(BRANCHING, max_size=5))
def test_index_tree_has_exactly_the_entries_of_each_member(
    steps: list[tuple[Any, ...]], prompts: list[list[int]]
) -> None:
    tree = PrefixTree()
    indexes = [PrefixIndex(10_000, tree) for _ in range(3)]
    plain: list[set[tuple[int, ...]]] = [set(), set(), set()]
    for action, member, *arguments in steps:
        getattr(indexes[member], action)(*arguments)
        check(*indexes)
        match action, arguments:
            case "add", [prompt]:
                prompts.append(prompt)
                plain[member].update(tuple(prompt[: n + 1]) for n in range(len(prompt)))
            case "cut", [prompt, keep] if keep < len(prompt):
                lost = tuple(prompt[: keep + 1])
                plain[member] = {prefix for prefix in plain[member] if prefix[: keep + 1] != lost}
            case "clear", _:
                plain[member].clear()
    for prompt in prompts:
        held = [sum(tuple(prompt[: n + 1]) in prefixes for n in range(len(prompt))) for prefixes in plain]
        assert [index.matched_blocks(prompt) for index in indexes] == held
        holders = tree.holders(tree.path(prompt))
        assert holders == {index: blocks for index, blocks in zip(indexes, held, strict=True) if blocks}


@given(
    st.lists(
        st.one_of(STEPS, st.tuples(st.just("resize"), st.integers(0, 2), st.integers(0, 60))),
        max_size=60,
    )
)
def test_index_tree_keeps_each_member_within_its_capacity(steps: list[tuple[Any, ...]]) -> None:
    tree = PrefixTree()
    indexes = [PrefixIndex(40, tree) for _ in range(3)]
    for action, member, *arguments in steps:
        getattr(indexes[member], action)(*arguments)
        check(*indexes)


@given(st.lists(st.tuples(st.integers(0, 1), BRANCHING, st.booleans()), max_size=40), st.integers(0, 20))
def test_index_knows_the_last_use_at_which_blocks_were_computed(
    steps: list[tuple[int, list[int], bool]], since: int
) -> None:
    tree = PrefixTree()
    indexes = [PrefixIndex(10_000, tree) for _ in range(2)]
    used: list[dict[tuple[int, ...], int]] = [{}, {}]
    computed: list[dict[tuple[int, ...], int]] = [{}, {}]
    uses = [0, 0]
    for member, prompt, ended in steps:
        indexes[member].add(prompt, computed=ended)
        uses[member] += 1
        for n in range(len(prompt)):
            used[member][tuple(prompt[: n + 1])] = uses[member]
            if ended:
                computed[member][tuple(prompt[: n + 1])] = uses[member]
    for member, index in enumerate(indexes):
        for _, prompt, _ in steps:
            began = 0
            for part in index.computed(prompt):
                for n in range(began, part.blocks):
                    assert computed[member][tuple(prompt[: n + 1])] == part.use
                began = part.blocks
            assert began == sum(tuple(prompt[: n + 1]) in computed[member] for n in range(len(prompt)))
        index.drop_unused_since(since)
        check(*indexes)
        for _, prompt, _ in steps:
            recent = sum(used[member].get(tuple(prompt[: n + 1]), 0) > since for n in range(len(prompt)))
            assert index.matched_blocks(prompt) >= recent


def test_index_cut_removes_later_blocks_until_added_again() -> None:
    index = PrefixIndex(100)
    prompt = chain_of(1, 20)
    index.add(prompt)
    index.cut(prompt, 7)
    assert (index.matched_blocks(prompt), len(index)) == (7, 7)
    index.cut(chain_of(2, 20), 5)
    assert index.matched_blocks(prompt) == 7
    index.add(prompt)
    assert index.matched_blocks(prompt) == 20


def test_index_with_reduced_capacity_evicts_least_recently_used() -> None:
    index = PrefixIndex(104)
    for name in range(1, 9):
        index.add([name * 1000 + n for n in range(13)])
    index.resize(30)
    assert len(index) == 30
    assert [index.matched_blocks([name * 1000 + n for n in range(13)]) for name in range(5, 9)] == [0, 4, 13, 13]
    index.resize(0)
    assert len(index) == 0


def test_index_clear_removes_every_entry() -> None:
    index = PrefixIndex(100)
    index.add(chain_of(1, 20))
    index.clear()
    assert (len(index), index.matched_blocks(chain_of(1, 20))) == (0, 0)


def test_index_eviction_keeps_shared_blocks_of_other_members() -> None:
    tree = PrefixTree()
    small, large = PrefixIndex(30, tree), PrefixIndex(100, tree)
    shared = [5000 + n for n in range(25)]
    for index in (large, small):
        index.add(shared)
        index.add([6000 + n for n in range(20)])
    assert (small.matched_blocks(shared), large.matched_blocks(shared)) == (0, 25)


def test_index_reuse_of_prompts_does_not_grow_the_tree() -> None:
    index = PrefixIndex(64)
    for turn in range(10_000):
        index.add(chain_of(turn % 3, 10))
    assert len(index._held) == 4
    assert all(index.matched_blocks(chain_of(name, 10)) == 10 for name in range(3))
