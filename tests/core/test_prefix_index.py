from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from dualmap.prefix_index import PrefixIndex


def chain_of(name: int, length: int) -> list[int]:
    """Blocks of a prompt: those of prompt 0 are shared by all prompts for their first three blocks."""
    return [n if n < 3 else name * 1000 + n for n in range(length)]


PROMPTS = st.builds(chain_of, st.integers(0, 40), st.integers(0, 30))


@given(st.integers(0, 64), st.lists(PROMPTS, max_size=60))
def test_it_holds_no_more_than_its_capacity_and_always_the_newest_prompt(
    capacity: int, prompts: list[list[int]]
) -> None:
    index = PrefixIndex(capacity)
    for prompt in prompts:
        index.add(prompt)
        assert len(index) <= capacity
        assert index.matched_blocks(prompt) == min(len(prompt), capacity)


@given(st.lists(PROMPTS, min_size=1, max_size=80))
def test_it_holds_what_an_lru_of_three_quarters_of_its_capacity_holds(prompts: list[list[int]]) -> None:
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


@given(st.lists(PROMPTS, min_size=1, max_size=30), PROMPTS)
def test_eviction_never_leaves_a_block_without_its_prefix(prompts: list[list[int]], probe: list[int]) -> None:
    index = PrefixIndex(40)
    for prompt in prompts:
        index.add(prompt)
    for prompt in [*prompts, probe]:
        held = [index.matched_blocks([block]) for block in prompt]
        assert held == sorted(held, reverse=True)


def test_removal_by_block_cuts_the_match_there_and_re_adding_mends_it() -> None:
    index = PrefixIndex(100)
    prompt = chain_of(1, 20)
    index.add(prompt)
    index.remove([prompt[7], 999_999])
    assert index.matched_blocks(prompt) == 7
    index.add(prompt)
    assert index.matched_blocks(prompt) == 20


def test_a_smaller_capacity_drops_the_least_recently_used() -> None:
    index = PrefixIndex(100)
    for name in range(8):
        index.add(chain_of(name, 13)[3:])
    index.resize(30)
    assert len(index) <= 30
    assert index.matched_blocks(chain_of(7, 13)[3:]) == 10
    index.resize(0)
    assert len(index) == 0


def test_clearing_forgets_everything() -> None:
    index = PrefixIndex(100)
    index.add(chain_of(1, 20))
    index.clear()
    assert (len(index), index.matched_blocks(chain_of(1, 20))) == (0, 0)


def test_reuse_alone_keeps_memory_bounded() -> None:
    index = PrefixIndex(64)
    for turn in range(10_000):
        index.add(chain_of(turn % 3, 10))
    assert sum(len(generation) for generation in index._generations) < 64 * 4
    assert all(index.matched_blocks(chain_of(name, 10)) == 10 for name in range(3))
