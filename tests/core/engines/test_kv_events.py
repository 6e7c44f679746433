import pytest

from dualmap.engines.events import (
    BLOCK_TOKENS_MAX,
    EVENTS_MAX,
    EXTRA_KEYS_MAX,
    HASHES_MAX,
    NAME_CHARACTERS,
    TOKENS_MAX,
    Batch,
    Cleared,
    Removed,
    Stored,
    Unreadable,
    read_batch,
)
from dualmap.engines.token_chain import pack_tokens

IDS = [1, 2, 3, 4]
STORED = {"type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": None, "token_ids": IDS, "block_size": 2}


def batch(*events: object) -> Batch:
    read = read_batch([1.5, list(events), 0])
    assert isinstance(read, Batch)
    return read


def stored(**fields: object) -> Stored:
    """Return the value of a map event with other fields."""
    read = batch({**STORED, **fields})
    assert read.invalid_events == read.unknown_events == 0
    (event,) = read.events
    assert isinstance(event, Stored)
    return event


ARRAYS = {
    "vLLM 0.9": ["BlockStored", [7, 8], None, IDS, 2, None],
    "vLLM 0.10, SGLang 0.5.9": ["BlockStored", [7, 8], None, IDS, 2, None, "GPU"],
    "vLLM 0.15": ["BlockStored", [7, 8], None, IDS, 2, None, "GPU", None],
    "vLLM 0.18": ["BlockStored", [7, 8], None, IDS, 2, None, "GPU", None, [None, None]],
    "llm-d-inference-sim 0.10": ["BlockStored", [7, 8], 0, IDS, 2, None, "GPU", None, None],
    "later": ["BlockStored", [7, 8], None, IDS, 2, *[None] * 10, "new field", 5],
}


@pytest.mark.parametrize("event", ARRAYS.values(), ids=ARRAYS)
def test_stored_array_of_each_release_is_read(event: list[object]) -> None:
    (read,) = batch(event).events
    assert read == Stored(hashes=(7, 8), parent=None, tokens=pack_tokens(IDS), block_tokens=2)


def test_stored_array_with_a_group_and_a_kind_is_read() -> None:
    (read,) = batch(["BlockStored", [7], 6, [1, 2], 2, None, "GPU", None, None, 1, "mla_attention", None]).events
    assert read == Stored(hashes=(7,), parent=6, tokens=pack_tokens([1, 2]), block_tokens=2, group=1)


def test_stored_map_without_default_fields_is_read() -> None:
    assert stored(parent_block_hash=6) == Stored(hashes=(7, 8), parent=6, tokens=pack_tokens(IDS), block_tokens=2)


def test_removed_and_cleared_are_read_as_arrays_and_maps() -> None:
    removed = Removed(hashes=(7,), group=None)
    assert batch(["BlockRemoved", [7]], ["AllBlocksCleared"]).events == (removed, Cleared())
    maps = ({"type": "BlockRemoved", "block_hashes": [7]}, {"type": "AllBlocksCleared"})
    assert batch(*maps).events == (removed, Cleared())


def test_consecutive_removals_of_a_group_are_one_event() -> None:
    events = [["BlockRemoved", [n], "GPU", n // 3] for n in range(5)]
    assert batch(*events, ["BlockStored", [9], None, [1], 1], ["BlockRemoved", [9], "GPU", 1]).events == (
        Removed(hashes=(0, 1, 2), group=0),
        Removed(hashes=(3, 4), group=1),
        Stored(hashes=(9,), parent=None, tokens=pack_tokens([1]), block_tokens=1),
        Removed(hashes=(9,), group=1),
    )


def test_store_without_hashes_is_ignored() -> None:
    # It would wait for its parent without a bound.
    read = batch({**STORED, "block_hashes": [], "parent_block_hash": 3})
    assert (read.events, read.invalid_events) == ((), 0)


def test_message_as_a_map_is_read() -> None:
    read = read_batch({"ts": 2, "events": [STORED], "attn_dp_rank": 3})
    assert isinstance(read, Batch)
    assert (read.sent_s, len(read.events)) == (2.0, 1)


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (7, 7),
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (bytes(24) + (2**63 + 5).to_bytes(8, "big"), 2**63 + 5),
        ((5).to_bytes(8, "big"), 5),
    ],
)
def test_hashes_are_read_as_unsigned_integers_of_64_bits(sent: int | bytes, read: int) -> None:
    assert stored(block_hashes=[sent, 8], parent_block_hash=sent).hashes == (read, 8)
    assert batch(["BlockRemoved", [sent]]).events == (Removed(hashes=(read,)),)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_hashes": None},
        {"block_hashes": 7},
        {"block_hashes": [2**64]},
        {"block_hashes": [-(2**63) - 1]},
        {"block_hashes": [True]},
        {"block_hashes": ["7"]},
        {"block_hashes": [b"short"]},
        {"block_hashes": [bytes(65)]},
        {"block_hashes": [7] * (HASHES_MAX + 1)},
        {"parent_block_hash": 1.5},
        {"token_ids": None},
        {"token_ids": b"1234"},
        {"token_ids": [1, 2, 3, -4]},
        {"token_ids": [1, 2, 3, 2**32]},
        {"token_ids": [1, 2, 3, None]},
        {"token_ids": [1, 2, 3, []]},
        {"token_ids": [1, 2, 3, [4.5]]},
        {"token_ids": [1] * (TOKENS_MAX + 1)},
        {"block_size": 0},
        {"block_size": None},
        {"block_size": BLOCK_TOKENS_MAX + 1},
        {"medium": 3},
        {"lora_name": 3},
        {"lora_name": "a" * (NAME_CHARACTERS + 1)},
        {"lora_id": 1.5},
        {"group_idx": -1},
        {"group_idx": "0"},
        {"kv_cache_spec_kind": 1},
        {"extra_keys": "salt"},
        {"extra_keys": ["salt"]},
        {"extra_keys": [[1]]},
        {"extra_keys": [[["id", 1], [1, "id"]]]},
        {"extra_keys": [["a"] * (EXTRA_KEYS_MAX + 1)]},
        {"cache_salt": 5},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_event_with_an_invalid_field_is_counted_and_ignored(fields: dict[str, object]) -> None:
    read = batch({**STORED, **fields}, ["AllBlocksCleared"])
    assert (read.events, read.invalid_events) == ((Cleared(),), 1)


@pytest.mark.parametrize("event", [None, 5, "BlockStored", [], [5], {}, {"type": None}, {"type": 5}])
def test_value_that_is_no_event_is_counted(event: object) -> None:
    assert batch(event).invalid_events == 1


def test_unknown_events_and_fields_are_counted() -> None:
    read = batch(
        ["Heartbeat", 5],
        {"type": "BlockPinned", "block_hashes": [7]},
        {**STORED, "tier_hint": 1, "priority": 2},
        ["BlockRemoved", [7], "GPU", 0, None, None, "reason"],
    )
    assert (read.unknown_events, read.unknown_fields, read.invalid_events, len(read.events)) == (2, 3, 0, 2)


@pytest.mark.parametrize("message", [None, 5, "text", b"bytes", [], [1.5], [1.5, None], {}, {"events": 5}])
def test_other_messages_are_unreadable(message: object) -> None:
    assert isinstance(read_batch(message), Unreadable)


def test_message_with_too_many_events_is_unreadable() -> None:
    assert isinstance(read_batch([1.5, [["AllBlocksCleared"]] * (EVENTS_MAX + 1)]), Unreadable)
    assert isinstance(read_batch([1.5, [["AllBlocksCleared"]] * EVENTS_MAX]), Batch)


@pytest.mark.parametrize("sent", [None, "now", float("nan"), float("inf"), 10**400])
def test_message_without_a_time_is_read(sent: object) -> None:
    assert read_batch([sent, []]) == Batch(events=())


@pytest.mark.parametrize(
    ("medium", "locality", "on_gpu"),
    [
        (None, None, True),
        ("GPU", None, True),
        ("gpu", "LOCAL", True),
        ("CPU", None, False),
        ("cpu", None, False),
        ("CPU_PINNED", None, False),
        ("STORAGE", None, False),
        ("GPU", "REMOTE", False),
    ],
)
def test_medium_and_locality_tell_gpu_memory(medium: str | None, locality: str | None, on_gpu: bool) -> None:
    assert stored(medium=medium, locality=locality).on_gpu is on_gpu
    removed = batch({"type": "BlockRemoved", "block_hashes": [7], "medium": medium, "locality": locality}).events
    assert removed == (Removed(hashes=(7,), on_gpu=on_gpu),)


@pytest.mark.parametrize(
    ("kind", "group", "dense"),
    [
        ("full_attention", 0, True),
        ("mla_attention", 2, True),
        ("sink_full_attention", None, True),
        ("sliding_window", 0, False),
        ("mamba", 1, False),
        ("chunked_local_attention", 0, False),
        ("unknown", 0, False),
        (None, None, True),
        (None, 0, True),
        (None, 1, False),
    ],
)
def test_kind_of_attention_tells_dense_groups(kind: str | None, group: int | None, dense: bool) -> None:
    assert stored(kv_cache_spec_kind=kind, group_idx=group).dense is dense


@pytest.mark.parametrize("ids", [[], [1, 2, 3], [1, 2, 3, 4, 5, 6]], ids=["none", "fewer", "more"])
def test_store_with_other_token_numbers_is_sparse(ids: list[int]) -> None:
    assert not stored(token_ids=ids).dense


@pytest.mark.parametrize(
    ("fields", "salt", "media"),
    [
        ({"extra_keys": None}, "", ()),
        ({"extra_keys": [None, None]}, "", ()),
        ({"extra_keys": [["tenant"], None]}, "tenant", ()),
        ({"extra_keys": [["adapter", "tenant"], ["adapter"]], "lora_name": "adapter"}, "tenant", ()),
        # A salt can be equal to the adapter's name.
        ({"extra_keys": [["adapter", "adapter"], None], "lora_name": "adapter"}, "adapter", ()),
        ({"extra_keys": [[["image", 0], "tenant"], [["image", -2]]]}, "tenant", (("image",), ("image",))),
        ({"extra_keys": [[["image", 0]], None]}, "", (("image",), ())),
        # Older releases send the identifier alone.
        ({"extra_keys": [["image"], ["image"]]}, "", (("image",), ("image",))),
        ({"extra_keys": [["image", "tenant"], ["image"]]}, "tenant", (("image",), ("image",))),
        ({"extra_keys": [None, ["image"]]}, "", ((), ("image",))),
        # A salt equal to a medium's identifier stays a salt.
        ({"extra_keys": [["image"], [["image", 0]]]}, "image", ((), ("image",))),
        # Behind the first block there is no salt.
        ({"extra_keys": [["image"], None], "parent_block_hash": 6}, "", (("image",), ())),
        ({"extra_keys": [[b"digest"], None]}, "", ((b"digest",), ())),
        ({"extra_keys": [["tenant"]]}, "tenant", ()),
        ({"cache_salt": "tenant"}, "tenant", ()),
    ],
)  # fmt: skip
def test_extra_keys_are_read_as_salt_and_media(fields: dict[str, object], salt: str, media: object) -> None:
    read = stored(**fields)
    assert (read.salt, read.media) == (salt, media)


def test_adapter_is_its_name_or_an_unusable_number() -> None:
    assert stored(lora_name="adapter", lora_id=3).adapter == "adapter"
    assert stored(lora_id=3).adapter == "\0003"
    assert stored(lora_id="uuid").adapter == "\0uuid"
    assert stored(lora_id=None).adapter == ""


@pytest.mark.parametrize(
    ("event", "new"),
    [
        (STORED, False),
        ({**STORED, "parent_block_hash": 6}, True),
        ({**STORED, "origin": "NEW"}, True),
        ({**STORED, "origin": "REUSED"}, False),
        ({**STORED, "parent_block_hash": 6, "origin": "REUSED"}, False),
        (ARRAYS["vLLM 0.18"], True),
    ],
    ids=["map", "child", "origin new", "origin reused", "reused child", "array"],
)
def test_store_from_the_start_as_a_map_may_be_a_report(event: object, new: bool) -> None:
    (read,) = batch(event).events
    assert isinstance(read, Stored)
    assert read.new is new


def test_pairs_of_tokens_are_read_as_their_first_tokens() -> None:
    assert stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]).tokens == pack_tokens(IDS)


def test_digests_among_token_ids_are_media_of_their_blocks() -> None:
    read = stored(token_ids=[1, "image", "image", 4], mm_keys=[{"hash": "image", "start_offset": 0}])
    assert read.tokens == pack_tokens([1, 2**32 - 1, 2**32 - 1, 4])
    assert read.media == (("image",), ("image",))
