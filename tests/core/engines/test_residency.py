"""The rules by which events become blocks that a member holds."""

from dataclasses import replace

import pytest

from dualmap.engines import block_table, parked_stores, residency
from dualmap.engines.events import Batch, Cleared, Event, Removed, Stored
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.residency import GROUPS_MAX, Residency
from dualmap.engines.token_chain import Media, TokenChain, chain_tokens, pack_tokens, token_root

SIZE = 16


def ids(blocks: int, *, start: int = 0) -> list[int]:
    return list(range(SIZE * start, SIZE * (start + blocks)))


def store(
    *hashes: int, parent: int | None = None, size: int = SIZE, start: int | None = None, **fields: object
) -> Stored:
    """Return a store with the tokens of prompt ``ids`` from block ``start`` on, by default behind the parent.

    The hashes of that prompt are 100, 101, and so on.
    """
    at = (0 if parent is None else parent - 99) * SIZE if start is None else start * SIZE
    tokens = pack_tokens(range(at, at + size * len(hashes)))
    return replace(Stored(hashes=hashes, parent=parent, tokens=tokens, block_tokens=size), **fields)  # type: ignore[arg-type]


def remove(*hashes: int, **fields: object) -> Removed:
    return replace(Removed(hashes=hashes), **fields)  # type: ignore[arg-type]


def chain(tokens: list[int], *, block_tokens: int = SIZE, media: tuple[Media, ...] = (), **root: str) -> TokenChain:
    return chain_tokens(pack_tokens(tokens), root=token_root(model="m", **root), block_tokens=block_tokens, media=media)


class Member:
    """A member and the events that its engine sends."""

    def __init__(self, held: HeldBlocks | None = None, capacity_blocks: int | None = None) -> None:
        self.held = HeldBlocks() if held is None else held
        self.awaited: dict[int, tuple[int, ...]] = {}
        self.residency = Residency(self.held, model="m", capacity_blocks=capacity_blocks, awaited=self.awaited)
        self.counts = self.residency.counts

    def send(self, *events: Event, rank: int = 0, **counts: int) -> None:
        self.residency.apply(rank, Batch(events=events, **counts))

    def await_prompt(self, blocks: int) -> None:
        """Send the engine a prompt of so many blocks."""
        keys = chain(ids(blocks)).keys
        self.awaited[keys[-1]] = keys

    def blocks(self, blocks: int = 9, **root: str) -> int:
        """Return how many leading blocks of the prompt the member holds."""
        return self.residency.matched_tokens(chain([*ids(blocks), 7], **root)) // SIZE


def test_stored_blocks_are_held_from_block_0_on() -> None:
    member = Member()
    assert (member.residency.block_tokens, member.blocks()) == (None, 0)
    member.send(store(100, 101), store(102, parent=101))
    assert (member.residency.block_tokens, member.residency.blocks, member.blocks()) == (SIZE, 3, 3)
    assert (member.blocks(2), member.blocks(1)) == (2, 1)


def test_missing_block_in_the_middle_ends_the_held_prefix() -> None:
    member = Member()
    member.send(store(100, 101, 102), remove(101))
    assert (member.residency.blocks, member.blocks()) == (2, 1)


def test_last_token_of_a_prompt_is_never_matched() -> None:
    member = Member()
    member.send(store(100, 101))
    assert member.residency.matched_tokens(chain(ids(2))) == SIZE


def test_block_with_two_copies_is_held_until_both_are_removed() -> None:
    member = Member()
    member.send(store(100, 101), store(101, parent=100))
    assert (member.residency.blocks, member.counts.copied) == (2, 1)
    member.send(remove(101))
    assert member.blocks() == 2
    member.send(remove(101))
    assert member.blocks() == 1


def test_copies_of_a_block_are_counted_up_to_a_limit() -> None:
    member = Member()
    member.send(store(100), *[store(101, parent=100)] * (block_table.COPIES_MAX + 3))
    member.send(*[remove(101)] * (block_table.COPIES_MAX - 1))
    assert member.blocks() == 2
    member.send(remove(101))
    assert member.blocks() == 1


def test_removal_of_an_unknown_block_is_ignored() -> None:
    member = Member()
    member.send(remove(100))
    member.send(store(100), remove(5, 100, 100))
    assert (member.residency.blocks, member.counts.removed, member.counts.unknown_removals) == (0, 1, 3)
    member.send(store(100))
    assert member.blocks() == 1


def test_report_from_the_start_counts_no_copies() -> None:
    member = Member()
    member.send(store(100, 101, 102), store(100, 101, new=False))
    assert (member.blocks(), member.counts.reported, member.counts.copied) == (3, 2, 0)
    member.send(remove(102), remove(101), remove(100))
    assert member.residency.blocks == 0


def test_store_from_the_start_with_an_unknown_block_counts_copies() -> None:
    # Two requests with a common beginning were computed at the same time. A report has no unknown block.
    member = Member()
    member.send(store(100, new=False), store(100, 101, new=False))
    assert (member.counts.reported, member.counts.copied) == (0, 1)
    # The engine removes one copy of the beginning. What follows stays in its cache behind the other copy.
    member.send(remove(100), store(102, parent=101))
    assert (member.blocks(), member.residency.parked) == (3, 0)
    member.send(remove(102), remove(101), remove(100))
    assert member.residency.blocks == 0


def test_blocks_of_ranks_are_counted_separately() -> None:
    member = Member()
    member.send(store(100, 101), rank=0)
    member.send(store(100), rank=1)
    member.send(remove(100), rank=0)
    # Rank 0 lacks block 0, and rank 1 lacks block 1.
    assert (member.residency.blocks, member.blocks()) == (2, 1)
    member.send(remove(100), rank=1)
    assert member.blocks() == 0


def test_hit_needs_the_block_in_every_dense_group() -> None:
    member = Member()
    member.send(store(100, 101, group=0), store(100, group=1))
    assert member.blocks() == 1
    member.send(remove(100, group=0))
    assert member.blocks() == 0


def test_groups_with_different_blocks_are_matched_by_their_own_chains() -> None:
    member = Member()
    member.send(store(100, 101, group=0), store(100, group=1, size=2 * SIZE))
    assert member.residency.block_tokens == 2 * SIZE
    assert member.residency.matched_tokens(chain(ids(9), block_tokens=2 * SIZE)) == 2 * SIZE


@pytest.mark.parametrize("event", [store(100, on_gpu=False), store(100, dense=False)], ids=["medium", "sparse"])
def test_blocks_elsewhere_and_of_sparse_groups_are_ignored(event: Stored) -> None:
    member = Member()
    member.send(event)
    assert (member.residency.blocks, member.counts.elsewhere + member.counts.sparse) == (0, 1)


def test_removal_in_another_medium_removes_no_block() -> None:
    member = Member()
    member.send(store(100), remove(100, on_gpu=False))
    assert (member.blocks(), member.counts.elsewhere) == (1, 1)


def test_group_that_turns_out_sparse_is_forgotten() -> None:
    member = Member()
    member.send(store(100, 101, group=1), store(102, parent=101, group=1, dense=False), store(100, group=1))
    assert (member.residency.blocks, len(member.held), member.counts.sparse) == (0, 0, 2)
    member.send(remove(100, group=1))
    assert member.counts.unknown_removals == 1


def test_number_of_groups_is_bounded() -> None:
    member = Member()
    for group in range(GROUPS_MAX + 5):
        member.send(store(100, group=group))
    assert (member.residency.blocks, member.counts.over_bound) == (GROUPS_MAX, 5)


def test_salted_and_adapted_blocks_match_only_their_own_chain() -> None:
    member = Member()
    member.send(store(100, salt="tenant"), store(200, adapter="adapter"), store(300, adapter="adapter", salt="tenant"))
    member.send(store(301, parent=300, start=1))
    assert member.blocks() == 0
    assert member.blocks(cache_salt="tenant") == 1
    assert member.blocks(cache_salt="other") == 0
    assert member.blocks(adapter="adapter") == 1
    # The second block continues the chain of its parent, without salt and adapter of its own.
    assert member.blocks(adapter="adapter", cache_salt="tenant") == 2


def test_another_secret_key_gives_other_keys() -> None:
    held = HeldBlocks()
    secret = Residency(held, model="m", key=b"secret")
    secret.apply(0, Batch(events=(store(100),)))
    assert secret.matched_tokens(chain([*ids(1), 7])) == 0


def test_blocks_with_media_match_a_prompt_with_the_same_media() -> None:
    member = Member()
    member.send(store(100, 101, 102, media=((), ("image",), ("image", "other"))))
    media = (Media(id="image", start=SIZE + 3, tokens=SIZE), Media(id="other", start=2 * SIZE + 8, tokens=4))
    tokens = [*ids(3), 7]
    assert member.residency.matched_tokens(chain(tokens, media=media)) == 3 * SIZE
    assert member.residency.matched_tokens(chain(tokens, media=media[:1])) == 2 * SIZE
    assert member.residency.matched_tokens(chain(tokens)) == SIZE


def test_clear_forgets_the_blocks_of_its_rank() -> None:
    member = Member()
    member.send(store(100), rank=0)
    member.send(store(100, 101), rank=1)
    member.send(Cleared(), rank=1)
    assert (member.blocks(), member.residency.blocks, member.counts.cleared) == (1, 1, 1)
    member.send(remove(100), rank=1)
    assert member.blocks() == 1


def test_clear_of_a_member_forgets_all_ranks_and_faults() -> None:
    member = Member()
    member.send(store(100), rank=0, invalid_events=1)
    member.send(store(100), rank=1)
    assert member.residency.fault(0) == "an event was invalid"
    member.residency.clear()
    assert (member.residency.blocks, len(member.held), member.residency.fault(0)) == (0, 0, "")


def test_unknown_and_invalid_events_are_counted() -> None:
    member = Member()
    member.send(unknown_events=2, unknown_fields=3)
    assert member.residency.fault(0) == ""
    member.send(invalid_events=4)
    counts = member.counts
    assert (counts.unknown_events, counts.unknown_fields, counts.invalid_events) == (2, 3, 4)
    assert (member.residency.fault(0), member.residency.fault(1)) == ("an event was invalid", "")


def test_store_with_an_unknown_parent_waits_for_the_parent() -> None:
    member = Member()
    member.send(store(103, parent=102), store(102, parent=101))
    assert (member.residency.blocks, member.residency.parked, member.blocks()) == (0, 2, 0)
    member.send(store(100, 101))
    assert (member.residency.blocks, member.residency.parked, member.blocks()) == (4, 0, 4)


def test_store_with_an_unknown_parent_is_never_placed_at_the_start() -> None:
    member = Member()
    member.send(store(100, parent=99, start=0))
    assert member.blocks() == 0


def test_removal_of_a_waiting_block_drops_it_and_what_follows() -> None:
    member = Member()
    member.send(store(102, 103, 104, parent=101), remove(103))
    assert (member.residency.parked, member.counts.unknown_removals) == (1, 0)
    member.send(store(100, 101))
    assert (member.residency.blocks, member.blocks()) == (3, 3)


def test_waiting_stores_are_bounded_and_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = parked_stores.size_of(store(110, parent=109)) + parked_stores.size_of(store(120, 121, parent=119))
    monkeypatch.setattr(parked_stores, "PARKED_BYTES_MAX", bound)
    member = Member()
    member.send(store(110, parent=109), store(120, 121, parent=119))
    assert (member.residency.parked, member.residency.fault(0)) == (3, "")
    member.send(store(130, parent=129))
    assert (member.residency.parked, member.residency.fault(0)) == (3, "too many blocks have an unknown parent")
    member.send(store(*range(140, 150), parent=139))
    assert member.residency.parked == 3


def test_waiting_stores_of_all_groups_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_stores, "PARKED_BYTES_MAX", 3 * parked_stores.size_of(store(110, parent=109)))
    member = Member()
    for rank in range(5):
        member.send(store(110, parent=109), rank=rank)
    assert member.residency.parked == 3
    member.residency.clear(4)
    assert member.residency.parked == 2
    member.residency.clear()
    assert member.residency.parked == 0


def test_names_of_waiting_stores_count_in_their_bound() -> None:
    member = Member()
    media = ((*("x" * 4000 for _ in range(20)),),)
    for number in range(50):
        member.send(store(1000 + number, parent=number, start=0, media=media))
    assert 0 < member.residency.parked <= 6
    assert member.residency.fault(0) == "too many blocks have an unknown parent"


def test_removal_of_waiting_blocks_is_fast() -> None:
    # Without an index, each removal would search all events that wait for the same parent.
    member = Member()
    member.send(*(store(1000 + number, parent=99, start=0) for number in range(1000)))
    waiting = [each for events in member.residency._parked._waiting.values() for each in events]
    member.send(remove(*range(1000, 1999)))
    assert (member.residency.parked, member.counts.unknown_removals) == (1, 0)
    assert sum(each.blocks for each in waiting) == 1


def test_waiting_block_that_was_removed_can_wait_again() -> None:
    member = Member()
    member.send(store(102, 103, parent=101), remove(103), remove(103), store(103, parent=102))
    assert (member.residency.parked, member.counts.unknown_removals) == (2, 1)
    member.send(remove(103), store(100, 101))
    assert (member.residency.parked, member.blocks()) == (0, 3)


def test_store_that_is_its_own_parent_does_no_harm() -> None:
    member = Member()
    member.send(store(100, parent=100), store(102, parent=101), store(101, parent=102))
    assert (member.residency.blocks, member.residency.parked) == (0, 3)


def test_member_has_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "BLOCKS_MAX", 3)
    member = Member()
    member.send(store(100, 101), store(102, 103, parent=101))
    assert (member.residency.blocks, member.blocks(), member.counts.over_bound) == (3, 3, 1)
    assert member.residency.fault(0) == "the member has more than 3 blocks"
    member.send(remove(102), store(102, parent=101))
    assert member.blocks() == 3


def test_pool_has_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "POOL_BLOCKS_MAX", 5)
    first, second = Member(held := HeldBlocks()), Member(held)
    first.send(store(100, 101, 102))
    second.send(store(100, 101, 102))
    assert (first.residency.blocks, second.residency.blocks, second.counts.over_bound) == (3, 2, 1)
    assert second.residency.fault(0) == "the pool has more than 5 blocks"
    first.send(remove(102), remove(101))
    second.send(store(102, parent=101))
    assert (held.stored, second.blocks()) == (4, 3)
    first.residency.clear()
    second.residency.clear()
    assert held.stored == 0


def test_more_copies_than_the_memory_has_end_the_counting() -> None:
    member = Member(capacity_blocks=4)
    member.send(store(100, 101, 102), store(102, parent=101))
    assert member.counts.drifts == 0
    # The engine removes a block with all its copies at once.
    member.send(store(102, parent=101))
    assert (member.counts.drifts, member.blocks()) == (1, 3)
    member.send(store(102, parent=101), remove(102))
    assert (member.counts.drifts, member.blocks()) == (1, 2)


def test_copies_of_earlier_blocks_are_not_counted_after_lost_messages() -> None:
    member = Member()
    for rank in (0, 1):
        member.send(store(100, 101), store(101, parent=100), rank=rank)
    member.residency.forget_copies(0)
    member.send(store(101, parent=100), remove(101), rank=0)
    member.send(remove(101), rank=1)
    assert member.residency.blocks == 3
    # Another life of the engine is counted again.
    member.residency.clear(0)
    member.send(store(100, 101), store(101, parent=100), remove(101), rank=0)
    assert member.residency.blocks == 4


def test_copies_of_later_blocks_are_counted_after_lost_messages() -> None:
    member = Member()
    member.send(store(100))
    member.residency.forget_copies(0)
    member.send(store(101, parent=100), store(101, parent=100), remove(101))
    assert member.blocks() == 2
    # The first store of an earlier block shows that the engine has it, and the second one that it has two copies.
    member.send(store(100), store(100), remove(100))
    assert member.blocks() == 2
    member.send(remove(100))
    assert member.blocks() == 0


def test_lost_block_that_is_stored_again_has_one_copy() -> None:
    member = Member()
    member.send(store(100, 101))
    # The engine removed both blocks, and the message was lost.
    member.residency.forget_copies(0)
    member.send(store(100, 101), remove(101))
    assert member.blocks() == 1


class TestHeldAgain:
    """Blocks that the router has forgotten although the engine has another copy."""

    def test_blocks_before_a_stored_block_of_an_awaited_prompt(self) -> None:
        member = Member()
        # Two equal prompts are computed at the same time, and look like a report. Later their first copy goes.
        member.send(store(100, 101, 102, new=False), store(100, 101, 102, new=False))
        member.send(remove(102), remove(101), remove(100))
        assert member.blocks() == 0
        member.await_prompt(4)
        member.send(store(103, parent=102))
        assert (member.blocks(), member.counts.held_again, member.residency.parked) == (4, 3, 0)
        assert len(member.residency.take_arrived()) == 1
        assert member.held.stored == member.residency.blocks == 4
        member.send(remove(103), remove(102), remove(101), remove(100))
        assert (member.blocks(), member.residency.blocks, member.held.stored) == (0, 0, 0)

    def test_blocks_before_the_parent_of_a_generated_block(self) -> None:
        member = Member()
        member.send(store(100, 101, 102), store(100, 101, 102, new=False), remove(101))
        assert member.blocks() == 1
        member.await_prompt(3)
        # The prompt is in the cache, so the engine stores only what it generates.
        member.send(store(200, parent=102, start=50))
        assert member.blocks() == 3

    def test_parent_alone_without_an_awaited_prompt(self) -> None:
        member = Member()
        member.send(store(100, 101, 102, new=False), store(100, 101, 102, new=False), remove(102))
        member.send(store(103, parent=102))
        assert (member.blocks(), member.counts.held_again) == (4, 1)

    def test_copies_before_lost_messages(self) -> None:
        member = Member()
        member.send(store(100, 101), store(101, parent=100))
        member.residency.forget_copies(0)
        member.send(remove(101))
        assert member.blocks() == 1
        member.send(store(102, parent=101))
        assert member.blocks() == 3

    def test_block_that_had_no_other_copy_is_never_held_again(self) -> None:
        member = Member()
        member.send(store(100, 101, 102), remove(102))
        member.await_prompt(4)
        member.send(store(103, parent=102))
        assert (member.blocks(), member.counts.held_again, member.residency.parked) == (2, 0, 1)

    def test_blocks_of_every_dense_group(self) -> None:
        member = Member()
        for group in (0, 1):
            twice = store(100, 101, 102, new=False, group=group)
            member.send(twice, twice, remove(100, group=group))
        assert member.blocks() == 0
        member.await_prompt(4)
        member.send(store(103, parent=102, group=0), store(103, parent=102, group=1))
        assert (member.blocks(), member.counts.held_again) == (4, 2)

    def test_clear_forgets_removed_blocks(self) -> None:
        member = Member()
        member.send(store(100, 101), store(100, 101, new=False), remove(101), Cleared(), store(100))
        member.send(store(102, parent=101))
        assert (member.blocks(), member.counts.held_again) == (1, 0)

    def test_removed_blocks_are_bounded_over_all_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(residency, "REMOVED_MAX", 2)
        member = Member()
        for rank in (0, 1):
            member.send(store(100, 101, 102), store(100, 101, 102, new=False), remove(100, 101, 102), rank=rank)
        assert [list(group.removed) for group in member.residency._each()] == [[101, 102], []]
        assert [len(group.removed_keys) for group in member.residency._each()] == [2, 0]

    def test_bound_of_blocks_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        member = Member()
        member.send(store(100, 101), store(100, 101, new=False), remove(101))
        monkeypatch.setattr(residency, "BLOCKS_MAX", 1)
        member.send(store(102, parent=101))
        assert (member.residency.blocks, member.counts.held_again) == (1, 0)


def test_more_blocks_than_the_memory_has_are_forgotten() -> None:
    member = Member(capacity_blocks=4)
    member.send(store(100, 101, 102, 103, 104))
    assert (member.residency.blocks, len(member.held)) == (0, 0)
    assert member.residency.fault(0) == "the engine reported more blocks than its memory has"


def test_memory_is_per_rank_and_may_become_known_later() -> None:
    member = Member()
    member.send(store(100, 101, 102), rank=0)
    member.send(store(100, 101), rank=1)
    member.residency.resize(3)
    assert member.residency.blocks == 5
    member.residency.resize(2)
    assert (member.residency.blocks, member.blocks()) == (2, 2)


def test_pages_of_one_token_are_gathered_into_index_blocks() -> None:
    member = Member()
    member.send(store(*range(1000, 1040), size=1))
    assert (member.residency.block_tokens, member.residency.blocks, len(member.held)) == (SIZE, 40, 2)
    assert member.blocks() == 2
    # The branch begins in the middle of the third index block.
    branch = [*range(36), *range(500, 520)]
    tokens = pack_tokens(branch[36:])
    member.send(Stored(hashes=tuple(range(2000, 2020)), parent=1035, tokens=tokens, block_tokens=1))
    assert member.residency.matched_tokens(chain([*branch, 7])) == 3 * SIZE
    member.send(remove(*range(1016, 1040)))
    assert member.blocks() == 1


def test_partial_block_is_replaced_by_the_full_block() -> None:
    member = Member()
    half = pack_tokens(range(SIZE, SIZE + 8))
    member.send(store(100), Stored(hashes=(5,), parent=100, tokens=half, block_tokens=8))
    assert (member.residency.block_tokens, member.residency.blocks, member.blocks()) == (SIZE, 2, 1)
    member.send(remove(5), store(101, parent=100))
    assert (member.residency.blocks, member.blocks()) == (2, 2)


def test_block_behind_a_partial_block_continues_its_tokens() -> None:
    member = Member()
    half = pack_tokens(range(SIZE, SIZE + 8))
    rest = pack_tokens(range(SIZE + 8, 2 * SIZE + 8))
    member.send(store(100), Stored(hashes=(5,), parent=100, tokens=half, block_tokens=8))
    member.send(Stored(hashes=(6,), parent=5, tokens=rest, block_tokens=SIZE))
    assert member.blocks() == 2


def test_larger_blocks_replace_the_smaller_ones() -> None:
    # The first event of a life can be a partial block.
    member = Member()
    member.send(Stored(hashes=(5,), parent=None, tokens=pack_tokens(range(8)), block_tokens=8), store(100))
    assert (member.residency.block_tokens, member.residency.blocks, member.blocks()) == (SIZE, 1, 1)


def test_tokens_of_blocks_within_index_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "TAIL_BYTES_MAX", 100)
    member = Member()
    member.send(store(*range(1000, 1040), size=1))
    assert member.residency.blocks == 7
    member.send(remove(*range(1000, 1040)), store(*range(1000, 1003), size=1))
    assert member.residency.blocks == 3


def test_tokens_within_index_blocks_have_one_bound_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "TAIL_BYTES_MAX", 100)
    member = Member()
    for rank in range(8):
        member.send(store(*range(1000, 1040), size=1), rank=rank)
    assert member.residency.blocks <= 8 + 7


def test_members_share_the_dictionary_of_held_blocks() -> None:
    held = HeldBlocks()
    members = [Member(held) for _ in range(100)]
    for number, member in enumerate(members):
        member.send(store(*range(100, 101 + number % 5)))
    assert len(held) == 5
    prompt = chain([*ids(9), 7])
    found = held.leading_blocks(prompt)
    assert [member.residency.matched_tokens(prompt, found) // SIZE for member in members[:6]] == [1, 2, 3, 4, 5, 1]
    for member in members[:50]:
        member.residency.clear()
    assert sum(member.blocks() for member in members) == 150
    for member in members[50:]:
        member.send(remove(*range(100, 105)))
    assert (len(held), held.leading_blocks(prompt)) == (0, {})


def test_holder_of_a_cleared_member_is_used_again_without_its_blocks() -> None:
    held = HeldBlocks()
    first, second = Member(held), Member(held)
    first.send(store(100, 101))
    first.residency.clear()
    second.send(store(500, start=3))
    assert (first.blocks(), second.blocks(), len(held)) == (0, 0, 1)
