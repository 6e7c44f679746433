"""The distinct blocks of the prompts in flight at one member. A block that several prompts share counts once."""

from collections.abc import Iterable

from dualmap.fleet.in_flight import InFlightRequest
from dualmap.prompts.blocks import BlockChain


class DistinctBlocks:
    """Counts for each block how many requests in flight have it; each change costs O(blocks of the prompt).

    The tokens after a prompt's last hashed block are its own.
    """

    def __init__(self, requests: Iterable[InFlightRequest]) -> None:
        self.tokens = 0
        """The tokens of all distinct blocks."""
        # The number of requests and the number of tokens of each block.
        self._blocks: dict[int, tuple[int, int]] = {}
        for request in requests:
            self.add(request.chain)

    def add(self, chain: BlockChain) -> None:
        """Add a prompt."""
        before = 0
        for number, block in enumerate(chain.hashes, start=1):
            end = chain.tokens_of(number)
            requests, tokens = self._blocks.get(block, (0, end - before))
            self._blocks[block] = requests + 1, tokens
            if not requests:
                self.tokens += tokens
            before = end
        self.tokens += chain.tokens - before

    def remove(self, chain: BlockChain) -> None:
        """Remove a prompt that was added."""
        for block in chain.hashes:
            requests, tokens = self._blocks.pop(block)
            if requests > 1:
                self._blocks[block] = requests - 1, tokens
            else:
                self.tokens -= tokens
        self.tokens -= chain.tokens - chain.tokens_of(len(chain.hashes))

    def tokens_with(self, chain: BlockChain) -> int:
        """Return the tokens of all distinct blocks after the prompt was added."""
        shared = next(
            (number for number, block in enumerate(chain.hashes) if block not in self._blocks), len(chain.hashes)
        )
        return self.tokens + chain.tokens - chain.tokens_of(shared)
