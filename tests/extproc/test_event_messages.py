"""Tests of messages of KV events that are unpacked in slices."""

from time import process_time

import msgspec
import pytest

from dualmap.engines.events import EVENTS_MAX, Batch, Cleared, Removed, Stored, Unreadable, read_batch
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.residency import Residency
from dualmap.engines.token_chain import chain_tokens, pack_tokens, token_root
from dualmap_extproc.engines.event_messages import (
    EVENT_BYTES_MAX,
    FIELD_BYTES_MAX,
    SLICE_BLOCKS,
    SLICE_BYTES,
    SLICE_EVENTS,
    slices,
)
from extproc.event_publishers import BLOCK, CLEARED, removed, stored


def pack(events: object, *, as_map: bool = False) -> bytes:
    return msgspec.msgpack.encode({"ts": 1.5, "events": events} if as_map else [1.5, events, 0])


@pytest.mark.parametrize("as_map", [False, True])
def test_slices_keep_the_order_of_events(as_map):
    events = [*(removed(number) for number in range(SLICE_EVENTS - 1)), stored(1, [1] * BLOCK), CLEARED, removed(9)]
    batches = list(slices(pack(events, as_map=as_map)))
    assert len(batches) == 2
    read = [event for batch in batches if isinstance(batch, Batch) for event in batch.events]
    assert [type(each) for each in read] == [Removed, Stored, Cleared, Removed]


def test_slice_ends_with_its_bytes():
    events = [stored(number, [70_000] * (SLICE_BYTES // 5 // BLOCK * BLOCK)) for number in range(10)]
    assert len(list(slices(pack(events)))) >= 5


def test_empty_message_has_no_slice():
    assert list(slices(pack([]))) == []


def test_event_above_the_bound_ends_the_message():
    batches = list(slices(pack([*(CLEARED for _ in range(SLICE_EVENTS)), stored(1, [70_000] * EVENT_BYTES_MAX)])))
    assert isinstance(batches[0], Batch)
    assert isinstance(batches[1], Unreadable)
    assert len(batches) == 2


def test_event_that_cannot_be_unpacked_is_invalid():
    good = msgspec.msgpack.encode(CLEARED)
    text = b"\xa2\xff\xff"
    (batch,) = slices(b"\x93\xc0\x92" + text + good + b"\x00")
    assert isinstance(batch, Batch)
    assert (batch.invalid_events, batch.events) == (1, (Cleared(),))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\xc0", b"\x93\x01", b"\xdf\xff\xff\xff\xff", b"\x91\x01", b"\x82\xa1a\x01\xa1b\x01",
     b"\x91" * 100_000, pack("junk"), pack(None), pack([None] * (EVENTS_MAX + 1)), msgspec.msgpack.encode([0] * 17)],
)  # fmt: skip
def test_invalid_message_is_unreadable_with_a_reason(payload):
    (read,) = slices(payload)
    assert isinstance(read, Unreadable)
    assert read.reason
    assert len(read.reason) < 300


def test_large_events_are_divided_and_hold_the_same_blocks():
    tokens = list(range(3 * SLICE_BLOCKS * BLOCK))
    events = [stored(1, tokens), stored(9000, tokens, parent=8000), removed(*range(1, 2 * SLICE_BLOCKS))]
    batches = [each for each in slices(pack(events)) if isinstance(each, Batch)]
    assert all(sum(len(event.hashes) for event in batch.events) <= SLICE_BLOCKS for batch in batches)
    whole = read_batch([1.5, events])
    divided, undivided = (Residency(HeldBlocks(), model="m") for _ in range(2))
    assert isinstance(whole, Batch)
    undivided.apply(0, whole)
    for batch in batches:
        divided.apply(0, batch)
    assert divided.counts == undivided.counts
    assert divided.blocks == undivided.blocks == SLICE_BLOCKS + 1
    assert divided.parked == undivided.parked == 3 * SLICE_BLOCKS


def test_divided_event_of_a_sparse_group_stays_sparse():
    event = {**stored(1, [1] * (2 * SLICE_BLOCKS * BLOCK)), "kv_cache_spec_kind": "sliding_window"}
    events = [event for batch in slices(pack([event])) if isinstance(batch, Batch) for event in batch.events]
    assert [event.dense for event in events if isinstance(event, Stored)] == [False, False]


@pytest.mark.parametrize("as_map", [False, True])
def test_large_field_that_is_no_list_of_numbers_is_invalid(as_map):
    fields = {**stored(1, [1] * BLOCK), "extra_keys": [["a"]] * (FIELD_BYTES_MAX // 3)}
    event = fields if as_map else ["BlockStored", *list(fields.values())[1:]]
    (batch,) = slices(pack([event]))
    assert isinstance(batch, Batch)
    assert (batch.invalid_events, batch.events) == (1, ())


def test_large_event_of_numbers_is_read():
    tokens = [100_000] * (FIELD_BYTES_MAX // 5 // BLOCK * BLOCK + 100 * BLOCK)
    read = [each for batch in slices(pack([stored(1, tokens)])) if isinstance(batch, Batch) for each in batch.events]
    assert sum(len(each.hashes) for each in read if isinstance(each, Stored)) == len(tokens) // BLOCK


def test_millions_of_events_are_refused_without_reading_them():
    payload = b"\x93\x00\xdd" + (4_000_000).to_bytes(4, "big") + b"\x90" * 4_000_000 + b"\x00"
    began_s = process_time()
    (read,) = slices(payload)
    assert isinstance(read, Unreadable)
    # Reading them takes a second of CPU time.
    assert process_time() - began_s < 0.5


def test_large_event_with_known_beginning_is_no_report():
    # Maps of stores from the start can be reports. A report has no unknown block, but a part of an event may have none.
    tokens = list(range(2 * SLICE_BLOCKS * BLOCK))
    event = {"type": "BlockStored", "block_hashes": list(range(1, 2 * SLICE_BLOCKS + 1)), "parent_block_hash": None}
    event |= {"token_ids": tokens, "block_size": BLOCK, "medium": "GPU"}
    member = Residency(HeldBlocks(), model="m")
    known = stored(1, tokens[: SLICE_BLOCKS * BLOCK])
    for message in ([known], [event], [removed(1), removed(SLICE_BLOCKS)]):
        for part in slices(pack(message)):
            assert isinstance(part, Batch)
            member.apply(0, part)
    assert (member.counts.reported, member.counts.copied) == (0, SLICE_BLOCKS)
    assert member.blocks == 2 * SLICE_BLOCKS


def test_large_report_counts_no_copies():
    tokens = list(range(2 * SLICE_BLOCKS * BLOCK))
    event = {"type": "BlockStored", "block_hashes": list(range(1, 2 * SLICE_BLOCKS + 1)), "parent_block_hash": None}
    event |= {"token_ids": tokens, "block_size": BLOCK, "medium": "GPU"}
    member = Residency(HeldBlocks(), model="m")
    for _ in range(2):
        for part in slices(pack([event])):
            assert isinstance(part, Batch)
            member.apply(0, part)
    assert (member.counts.reported, member.counts.copied) == (2 * SLICE_BLOCKS, 0)


def test_applied_parts_of_a_message_hold_no_block_too_many():
    # The engine's memory is full: it removes old blocks before it stores new ones.
    blocks = 2 * SLICE_BLOCKS
    old, new = (list(range(start, start + blocks * BLOCK)) for start in (0, 100_000))
    member = Residency(HeldBlocks(), model="m", capacity_blocks=blocks)
    new_chain, old_chain = (
        chain_tokens(pack_tokens([*tokens, 7]), root=token_root(model="m"), block_tokens=BLOCK) for tokens in (new, old)
    )
    for part in slices(pack([stored(1, old)])):
        assert isinstance(part, Batch)
        member.apply(0, part)
    assert member.matched_tokens(old_chain) == blocks * BLOCK
    seen = []
    for part in slices(pack([*(removed(each) for each in range(blocks, 0, -1)), stored(9001, new)])):
        assert isinstance(part, Batch)
        member.apply(0, part)
        seen.append((member.matched_tokens(old_chain) // BLOCK, member.matched_tokens(new_chain) // BLOCK))
        assert member.blocks <= blocks
    assert len(seen) > 2
    # First the old blocks go, the last ones first. Then the new ones come, the first ones first.
    assert [each[0] for each in seen] == sorted((each[0] for each in seen), reverse=True)
    assert [each[1] for each in seen] == sorted(each[1] for each in seen)
    assert (seen[-1], member.counts.drifts, member.fault(0)) == ((0, blocks), 0, "")
