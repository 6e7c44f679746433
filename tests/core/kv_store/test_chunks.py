"""Tests of chunk keys against recorded digests, and of the CBOR encoder against cbor2."""

import json
from array import array
from hashlib import sha256

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.kv_store.cbor import BlockEncoder, encode_text
from dualmap.kv_store.chunks import CHUNKS_MAX, ChunkKeys
from dualmap.pools.kv_store import ChunkHash, KvStore
from shared_data import shared_file

IDS = array("I", range(1, 33))
TOKEN_IDS = st.integers(min_value=0, max_value=2**32 - 1)


def keys_of(ids: "array[int]" = IDS, **store: object) -> tuple[str, ...]:
    return ChunkKeys(KvStore(chunk_tokens=16, **store), "m").keys(ids)  # type: ignore[arg-type]


# The digests of tokens 1 to 32 in chunks of 16, computed by vLLM 0.32 (sha256_cbor, PYTHONHASHSEED=0) and by Llumnix's
# definitions.
@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        (
            ChunkHash.SHA256_CBOR,
            (
                "202da172482d928bbc42ab25b0151e2b895f13f41002e27b2ceabcfae6d332ea_0",
                "4a0a393805c6d2f0ed831000d41bb65980336c4c04895d5e26470bbec927f5bf_0",
            ),
        ),
        (
            ChunkHash.SHA256_HEX,
            (
                "77d735ce838418aa151bd96b5b1e78ee63860892e0a95c00fe34178442be9b07",
                "1170426cf2449cebf4d17f087ce5bb43b6a910ce91b3f40922868e913e8ee91d",
            ),
        ),
        (
            ChunkHash.XXHASH,
            ("iris.block.hash.key.12258205949268247123", "iris.block.hash.key.4110112610026971621"),
        ),
    ],
)
def test_chunk_keys_equal_the_recorded_keys(algorithm: ChunkHash, keys: tuple[str, str]) -> None:
    assert keys_of(hash=algorithm) == keys


def test_chunk_keys_equal_the_shared_golden_keys() -> None:
    golden = json.loads(shared_file("fixtures/golden_hashes.json").read_text())["llumnix"]

    assert {each: list(keys_of(hash=each)) for each in ChunkHash} == {each: golden[each] for each in ChunkHash}


def test_chunk_keys_of_another_seed_equal_vllms_blocks() -> None:
    assert keys_of(seed="123", key="{hash}") == (
        "3b5e986c4fc2e89ac26564af5a8017fa8e139f63ecfaf263a461d72a50de3074",
        "17181189ec7a48aa8991ad70d394a42de8c222a48f9d95785f070c5b1ece3b65",
    )


def test_chunk_that_the_prompt_does_not_fill_has_no_key() -> None:
    assert keys_of(IDS[:31]) == keys_of()[:1]
    assert keys_of(IDS[:15]) == ()


def test_chunk_keys_have_the_form_of_the_pool() -> None:
    form = "x@{model}@tp_rank:0@{hash}"

    assert keys_of(hash=ChunkHash.SHA256_HEX, key=form)[0] == (
        "x@m@tp_rank:0@77d735ce838418aa151bd96b5b1e78ee63860892e0a95c00fe34178442be9b07"
    )


def test_longest_prompt_has_a_bounded_number_of_keys() -> None:
    ids = array("I", bytes(4 * 16 * (CHUNKS_MAX + 5)))

    assert len(keys_of(ids)) == CHUNKS_MAX


@given(st.binary(max_size=300), st.lists(TOKEN_IDS, max_size=300))
def test_block_encoding_equals_cbor2(parent: bytes, ids: list[int]) -> None:
    assert BlockEncoder().encode(parent, ids, len(ids)) == cbor2.dumps([parent, ids, None], canonical=True)


def test_encoder_keeps_a_bounded_number_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmap.kv_store.cbor.IDS_MAX", 2)
    ids = [1000, 2000, 3000, 1000]

    encoder = BlockEncoder()

    assert encoder.encode(b"", ids, 4) == cbor2.dumps([b"", ids, None])
    assert len(encoder) == 2


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=300))
def test_text_encoding_equals_cbor2(text: str) -> None:
    assert encode_text(text) == cbor2.dumps(text, canonical=True)


def test_digest_begins_with_the_encoded_seed() -> None:
    first = sha256(cbor2.dumps([sha256(cbor2.dumps("s")).digest(), list(range(1, 17)), None])).hexdigest()

    assert keys_of(seed="s", key="{hash}")[0] == first


def test_model_name_with_the_word_for_the_hash_is_a_part_of_the_key() -> None:
    store = KvStore(chunk_tokens=16, key="{model}@{hash}", hash=ChunkHash.XXHASH)
    (plain, *_), (odd, *_) = (ChunkKeys(store, name).keys(IDS) for name in ("m", "m{hash}x"))
    assert odd == f"m{{hash}}x@{plain.removeprefix('m@')}"
