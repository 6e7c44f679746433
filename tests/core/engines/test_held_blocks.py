"""Tests of holders of blocks that leave with many blocks."""

from dualmap.engines import held_blocks
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.token_chain import KEY_SHIFT, TokenChain

CHAIN = TokenChain(keys=tuple(range(1, 11)), block_tokens=16, tokens=161)
LINKS = [key << KEY_SHIFT for key in CHAIN.keys]


def test_holder_with_many_blocks_leaves_at_once_and_its_blocks_in_parts(monkeypatch):
    monkeypatch.setattr(held_blocks, "CLEAN_BLOCKS", 4)
    held = HeldBlocks()
    gone, stayed = held.join(), held.join()
    for link in LINKS:
        held.hold(gone, [link])
    held.hold(stayed, LINKS[:1])
    held.leave(gone, iter(LINKS))
    assert held.leading_blocks(CHAIN) == {stayed: 1}
    # The blocks in the masks must not count for another holder.
    other = held.join()
    assert other != gone
    assert held.leading_blocks(CHAIN) == {stayed: 1}
    held.clean()
    held.clean()
    assert len(held) == 1
    assert held.join() == gone
