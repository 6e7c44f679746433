import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.engines.token_chain import Media, chain_tokens, link_media, pack_tokens, token_root
from dualmap.prompts.blocks import chain_blocks, chain_root

ROOT = token_root(model="m")


def keys(ids: list[int], root: int = ROOT, block_tokens: int = 4, media: tuple[Media, ...] = ()) -> tuple[int, ...]:
    return chain_tokens(pack_tokens(ids), root=root, block_tokens=block_tokens, media=media).keys


@given(*[st.lists(st.integers(0, 3), max_size=30)] * 2)
def test_token_chains_are_equal_exactly_as_far_as_the_blocks(a: list[int], b: list[int]) -> None:
    same = 0
    while same < min(len(a), len(b)) // 4 and a[: 4 * same + 4] == b[: 4 * same + 4]:
        same += 1
    left, right = keys(a), keys(b)
    assert (len(left), len(right)) == (len(a) // 4, len(b) // 4)
    assert left[:same] == right[:same]
    assert not set(left[same:]) & set(right[same:])


def test_token_roots_differ_by_model_adapter_salt_and_key() -> None:
    roots = {
        token_root(model="m"),
        token_root(model="n"),
        token_root(model="m", adapter="a"),
        token_root(model="m", cache_salt="a"),
        token_root(model="m", key=b"secret"),
    }
    assert len(roots) == 5


def test_token_keys_are_never_keys_of_a_text_chain() -> None:
    assert chain_root(model="m") != ROOT
    ids = list(range(64))
    text = chain_blocks(pack_tokens(ids), root=chain_root(model="m"), block_tokens=4).hashes
    assert not {each >> 4 for each in text} & set(keys(ids))


def test_token_keys_have_60_bits() -> None:
    assert max(keys(random.Random(1).choices(range(100_000), k=4000))).bit_length() == 60


def test_media_change_the_blocks_that_they_touch_and_all_later_ones() -> None:
    plain = keys([0] * 20)
    image = keys([0] * 20, media=(Media(id="image", start=6, tokens=3),))
    other = keys([0] * 20, media=(Media(id="other", start=6, tokens=3),))
    assert plain[0] == image[0] == other[0]
    assert not set(plain[1:]) & set(image[1:])
    assert not set(image[1:]) & set(other[1:])
    longer = keys([0] * 20, media=(Media(id="image", start=6, tokens=99),))
    assert image[:3] == longer[:3]
    assert image[3] != longer[3]


def test_media_identifiers_have_different_encodings() -> None:
    media = ([], ["a"], ["a", ""], ["", "a"], ["a", "a"], ["aa"], [b"aaa"])
    assert len({link_media(ROOT, each) for each in media}) == len(media)


def test_media_cannot_be_imitated_by_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    monkeypatch.setattr("dualmap.engines.token_chain.xxh3_64_intdigest", lambda data, _: hashed.append(data) or 0)
    for length in range(40):
        link_media(ROOT, ["a" * length])
    # The tokens of a block have a multiple of four bytes.
    assert {len(data) % 4 for data in hashed} == {1}


@pytest.mark.parametrize(
    ("tokens", "blocks", "reused"),
    [(0, 0, 0), (4, 1, 0), (5, 1, 4), (8, 2, 4), (9, 2, 8), (9, 1, 4), (11, 2, 8)],
)
def test_last_token_of_a_prompt_is_always_computed(tokens: int, blocks: int, reused: int) -> None:
    chain = chain_tokens(pack_tokens(range(tokens)), root=ROOT, block_tokens=4)
    assert chain.reusable_tokens(blocks) == reused


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["a"], [None]])
def test_values_that_are_no_token_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        pack_tokens(ids)


def test_packed_tokens_are_little_endian() -> None:
    assert pack_tokens([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
