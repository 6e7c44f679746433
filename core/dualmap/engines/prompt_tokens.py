"""A prompt's token ids and their chains, one for each block size of the engines."""

from collections.abc import Iterable, Sequence
from typing import Self

from dualmap.engines.token_chain import TOKEN_BYTES, Media, TokenChain, chain_tokens


class PromptTokens:
    """The packed token ids of a prompt (``token_chain.pack_tokens``) and the root of its chains.

    A decision looks at the chain several times, and most pools have one block size, so each chain is computed once.
    """

    __slots__ = ("_chains", "_count", "_media", "_packed", "_root")

    def __init__(self, packed: bytes, *, root: int, media: Sequence[Media] = ()) -> None:
        self._packed: bytes | None = packed
        self._count = len(packed) // TOKEN_BYTES
        self._root = root
        self._media = media
        self._chains: dict[int, TokenChain] = {}

    @classmethod
    def of_chains(cls, chains: Iterable[TokenChain], *, count: int) -> Self:
        """Return a prompt of ``count`` token ids that another router computed, with the chains that it sent."""
        prompt = cls(b"", root=0)
        prompt._packed, prompt._count = None, count
        prompt._chains.update((chain.block_tokens, chain) for chain in chains)
        return prompt

    @property
    def count(self) -> int:
        """The number of token ids."""
        return self._count

    @property
    def computed(self) -> tuple[TokenChain, ...]:
        """The chains that are computed so far."""
        return tuple(self._chains.values())

    def chain(self, block_tokens: int) -> TokenChain:
        """Return the chain in blocks of ``block_tokens``; without keys if another router did not send it."""
        chain = self._chains.get(block_tokens)
        if chain is None:
            if self._packed is None:
                return TokenChain(keys=(), block_tokens=block_tokens, tokens=self._count)
            chain = chain_tokens(self._packed, root=self._root, block_tokens=block_tokens, media=self._media)
            self._chains[block_tokens] = chain
        return chain
