"""A prompt's token ids and their chains, one for each block size of the engines."""

from collections.abc import Sequence

from dualmap.engines.token_chain import TOKEN_BYTES, Media, TokenChain, chain_tokens


class PromptTokens:
    """The packed token ids of a prompt (``token_chain.pack_tokens``) and the root of its chains.

    A decision looks at the chain several times, and most pools have one block size, so each chain is computed once.
    """

    __slots__ = ("_chains", "_media", "_packed", "_root")

    def __init__(self, packed: bytes, *, root: int, media: Sequence[Media] = ()) -> None:
        self._packed = packed
        self._root = root
        self._media = media
        self._chains: dict[int, TokenChain] = {}

    @property
    def count(self) -> int:
        """The number of token ids."""
        return len(self._packed) // TOKEN_BYTES

    def chain(self, block_tokens: int) -> TokenChain:
        """Return the chain in blocks of ``block_tokens``."""
        chain = self._chains.get(block_tokens)
        if chain is None:
            chain = chain_tokens(self._packed, root=self._root, block_tokens=block_tokens, media=self._media)
            self._chains[block_tokens] = chain
        return chain
