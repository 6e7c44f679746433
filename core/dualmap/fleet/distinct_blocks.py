"""The distinct blocks of the prompts in flight at one member. A block that several prompts share counts once."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from dualmap.fleet.in_flight import InFlightRequest
from dualmap.prompts.blocks import BlockChain


class _Piece(NamedTuple):
    """The blocks of a prompt after its first ``begins`` blocks, with the lengths of the prompt that had them first."""

    begins: int
    block_tokens: int
    tokens: int

    def tokens_between(self, first: int, last: int) -> int:
        """Return the tokens of the blocks after the first ``first`` up to block ``last``."""
        return min(last * self.block_tokens, self.tokens) - min(first * self.block_tokens, self.tokens)


class _Prompt(NamedTuple):
    hashes: tuple[int, ...]
    pieces: tuple[_Piece, ...]


class DistinctBlocks:
    """Sums the tokens of distinct blocks. The prompt that had a block first determines the tokens of the block.

    Of all prompts in lexicographic order, a prompt's neighbours have the longest prefixes in common with it. So a
    change compares two prompts, in O(log(blocks)) steps. The tokens after a prompt's last hashed block are its own.
    """

    def __init__(self, requests: Iterable[InFlightRequest]) -> None:
        self.tokens = 0
        """The tokens of all distinct blocks."""
        self.by_first: dict[int | None, list[_Prompt]] = {}
        """The prompts by first block (None without blocks), each list in lexicographic order."""
        for request in requests:
            self.add(request.chain)

    def add(self, chain: BlockChain) -> None:
        """Add a prompt."""
        hashes, block_tokens, tokens = chain.hashes, chain.block_tokens, chain.tokens
        prompts = self.by_first.get(_first(chain))
        if prompts is None:
            self.by_first[_first(chain)] = [_Prompt(hashes, (_Piece(0, block_tokens, tokens),))]
            self.tokens += tokens
            return
        at = bisect_left(prompts, _Prompt(hashes, ()))
        shared, pieces = max((_common(each.hashes, hashes), each.pieces) for each in prompts[max(at - 1, 0) : at + 1])
        inherited = [each for each in pieces if each.begins < shared]
        prompts.insert(at, _Prompt(hashes, (*inherited, _Piece(shared, block_tokens, tokens))))
        self.tokens += tokens - chain.tokens_of(shared)

    def remove(self, chain: BlockChain) -> None:
        """Remove a prompt that was added."""
        hashes, prompts = chain.hashes, self.by_first[_first(chain)]
        at = bisect_left(prompts, _Prompt(hashes, ()))
        pieces = prompts.pop(at).pieces
        if not prompts:
            del self.by_first[_first(chain)]
        shared, end = self.shared_blocks(chain), len(hashes)
        self.tokens -= chain.tokens - chain.tokens_of(end)
        for piece in reversed(pieces):
            if end <= shared:
                break
            self.tokens -= piece.tokens_between(max(piece.begins, shared), end)
            end = piece.begins

    def tokens_with(self, chain: BlockChain) -> int:
        """Return the tokens of all distinct blocks after the prompt was added."""
        return self.tokens + chain.tokens - chain.tokens_of(self.shared_blocks(chain))

    def shared_blocks(self, chain: BlockChain) -> int:
        """Return how many leading blocks of a prompt the prompts in flight have."""
        hashes, prompts = chain.hashes, self.by_first.get(_first(chain))
        if prompts is None:
            return 0
        at = bisect_left(prompts, _Prompt(hashes, ()))
        return max(_common(each.hashes, hashes) for each in prompts[max(at - 1, 0) : at + 1])


def _first(chain: BlockChain) -> int | None:
    return chain.hashes[0] if chain.hashes else None


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return how many leading blocks two prompts have in common; each hash includes all blocks before it."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high) // 2
        if first[middle] == second[middle]:
            low = middle + 1
        else:
            high = middle
    return low
