from hypothesis import given
from hypothesis import strategies as st

from dualmap.prompts.blocks import PUBLIC_KEY, chain_blocks, chain_root

ROOT = chain_root(model="m")


@given(shared=st.binary(min_size=1, max_size=200), one=st.binary(max_size=100), other=st.binary(max_size=100))
def test_block_chains_are_equal_exactly_as_far_as_the_prompts(shared: bytes, one: bytes, other: bytes) -> None:
    a = chain_blocks(shared + one, root=ROOT, block_tokens=4).hashes
    b = chain_blocks(shared + other, root=ROOT, block_tokens=4).hashes
    left, right = shared + one, shared + other
    same = 0
    while same < min(len(a), len(b)) and left[: (same + 1) * 16] == right[: (same + 1) * 16]:
        same += 1
    assert a[:same] == b[:same]
    assert all(x != y for x, y in zip(a[same:], b[same:], strict=False))


@given(st.binary(max_size=500), st.integers(1, 40))
def test_blocks_cover_the_complete_prompt(text: bytes, block_tokens: int) -> None:
    chain = chain_blocks(text, root=ROOT, block_tokens=block_tokens)
    assert len(chain.hashes) == -(-len(text) // (4 * block_tokens))
    assert chain.tokens == -(-len(text) // 4)
    assert chain.tokens_of(len(chain.hashes)) == chain.tokens
    assert chain.tokens_of(0) == 0


@given(st.integers(0, 5000), st.sampled_from([1, 16, 128, 512]), st.integers(0, 5000))
def test_chain_counted_keeps_blocks_and_keys(length: int, block_tokens: int, tokens: int) -> None:
    chain = chain_blocks(b"x" * length, root=ROOT, block_tokens=block_tokens)
    counted = chain.counted(tokens)
    assert (counted.hashes, counted.cacheable, counted.tokens) == (chain.hashes, chain.cacheable, tokens)
    assert counted.tokens_of(len(chain.hashes)) <= tokens


@given(st.text(), st.text(), st.text(), st.text(), st.text(), st.text())
def test_chain_root_differs_by_model_lora_and_salt(a: str, b: str, c: str, d: str, e: str, f: str) -> None:
    one, other = chain_root(model=a, lora=b, cache_salt=c), chain_root(model=d, lora=e, cache_salt=f)
    assert (one == other) == ((a, b, c) == (d, e, f))


def test_chain_hashes_are_the_same_in_every_version() -> None:
    # With another hash, old and new replicas would compute different keys during an upgrade.
    names = {"model": "Qwen/Qwen2.5-7B-Instruct", "cache_salt": "tenant"}
    assert chain_root(**names) == chain_root(**names, key=PUBLIC_KEY) == 0xF03635D01D386413
    assert chain_root(**names, key=b"a secret of 16 b") == 0xBE6B51B6897925F8
    hashes = chain_blocks(b"x" * 40, root=1, block_tokens=4).hashes
    assert hashes == (0x560B0484508EE37, 0x8A61E12B475CA1BA, 0xA0C8A56E500BDA39)
