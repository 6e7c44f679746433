import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.engines.block_table import COPIES_MAX, SEGMENT_SLOTS, BlockTable, _Segment

SECRET = 0x9E3779B97F4A7C15


def test_table_finds_what_was_added_with_any_hash() -> None:
    table = BlockTable(SECRET)
    for block in (0, 1, 2**64 - 1, 2**63):
        assert table.find(block) == -1
        table.add(block, block ^ 5, b"", ends=True)
    assert [table.place(table.find(block)) for block in (0, 1, 2**64 - 1, 2**63)] == [
        (5, b""),
        (4, b""),
        (2**64 - 6, b""),
        (2**63 + 5, b""),
    ]
    assert len(table) == table.copies == 4


@given(st.lists(st.tuples(st.sampled_from(("add", "remove", "forget")), st.integers(0, 60)), max_size=400))
def test_table_equals_a_dictionary(steps: list[tuple[str, int]]) -> None:
    table = BlockTable(SECRET)
    copies: dict[int, int] = {}
    forgotten: set[int] = set()
    more: set[int] = set()
    for kind, number in steps:
        # Many hashes have the same position, so that runs of slots grow and shrink, also around the table's end.
        block = number % 7 * 2**61 + number
        slot = table.find(block)
        assert (slot >= 0) == (block in copies)
        if kind == "forget":
            table.forget_copies()
            more |= {each for each, counted in copies.items() if counted > 1}
            copies = dict.fromkeys(copies, 1)
            forgotten = set(copies)
        elif kind == "add":
            if slot < 0:
                table.add(block, block + 1, bytes(number % 3), ends=number % 2 == 0)
                copies[block] = 1
            else:
                table.add_copy(slot)
                if block in forgotten or copies[block] == COPIES_MAX:
                    more.add(block)
                else:
                    copies[block] += 1
                forgotten.discard(block)
        elif slot >= 0:
            assert table.remove_copy(slot) == (copies[block] == 1)
            copies[block] -= 1
            if not copies[block]:
                assert table.may_remain == (block in more)
                del copies[block]
                more.discard(block)
                forgotten.discard(block)
        assert (len(table), table.copies) == (len(copies), sum(copies.values()))
        assert table.tail_bytes == sum(block % 2**61 % 3 for block in copies)
    for block in copies:
        assert table.place(table.find(block)) == (block + 1, bytes(block % 2**61 % 3))
    assert sorted(table.ending_links()) == sorted(block + 1 for block in copies if block % 2 == 0)


def test_search_in_a_full_table_of_chosen_hashes_is_short() -> None:
    # Without a secret factor, multiples of a power of two would all have the same position.
    table = BlockTable(SECRET)
    chance = random.Random(3)
    for block in range(40_000):
        table.add(block << 20, chance.getrandbits(64), b"", ends=True)
    for segment in table._segments:
        runs = bytes(1 if state else 0 for state in segment.states).split(b"\0")
        assert max(map(len, runs)) < 200


def test_large_table_equals_a_dictionary() -> None:
    table = BlockTable(SECRET)
    chance = random.Random(5)
    links: dict[int, int] = {}
    for number in range(60_000):
        block = chance.choice((chance.getrandbits(64), number << 40, number))
        if table.find(block) < 0:
            table.add(block, number, bytes(number % 3), ends=True)
            links[block] = number
        if number % 4 == 0:
            gone = chance.choice((block, number // 2, (number // 2) << 40))
            assert (table.find(gone) >= 0) == (gone in links)
            if gone in links:
                assert table.remove_copy(table.find(gone))
                del links[gone]
    assert len(table) == table.copies == len(links)
    assert all(table.place(table.find(block)) == (link, bytes(link % 3)) for block, link in links.items())
    assert sorted(table.ending_links()) == sorted(links.values())


def test_growing_table_moves_few_blocks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BlockTable(SECRET)
    moved = most = 0
    put = _Segment.put

    def counted(*arguments: object) -> None:
        nonlocal moved
        moved += 1
        put(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_Segment, "put", counted)
    chance = random.Random(7)
    for _ in range(50_000):
        moved = 0
        table.add(chance.getrandbits(64), 0, b"", ends=True)
        most = max(most, moved)
    assert SEGMENT_SLOTS // 2 < most <= SEGMENT_SLOTS
    slots = sum(len(segment.states) for segment in table._segments)
    assert len(table) / slots > 1 / 3
