"""Finds the prompts' common prefixes: the reuse that one cache without a limit allows, and the hottest prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.recordings.values import RecordedRequest

_LEAST_REQUESTS: Final = 2
_LEAST_SHARE: Final = 0.01
_BRANCH_SHARE: Final = 0.8
"""A prefix ends where a smaller share of its requests continues in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """A prefix that ``requests`` requests share. ``last_block`` is the keyed hash of the last of its ``blocks``."""

    last_block: int
    blocks: int
    tokens: int
    requests: int


class _Shared:
    """A block of at least two requests: its place in the prompt, the block before it, and the tokens up to its end."""

    __slots__ = ("blocks", "parent", "tokens")

    def __init__(self, blocks: int, parent: int | None, tokens: int) -> None:
        self.blocks = blocks
        self.parent = parent
        self.tokens = tokens


class PrefixCounts:
    """Counts the requests of each prefix, in order of arrival. It takes about 100 bytes for each distinct block.

    A block counts if it is full, because engines cache only full blocks. All of a prompt's blocks have an equal share
    of its tokens.
    """

    def __init__(self) -> None:
        self._requests: dict[int, int] = {}
        self._shared: dict[int, _Shared] = {}
        self._counted = 0
        self.reusable_tokens = 0
        self.prompt_tokens = 0

    @property
    def reuse_at_best(self) -> float | None:
        """The share of prompt tokens in blocks of earlier requests (0 to 1); None without prompt tokens."""
        return self.reusable_tokens / self.prompt_tokens if self.prompt_tokens else None

    def add(self, request: RecordedRequest) -> None:
        """Add the next request."""
        tokens = request.known_prompt_tokens
        block_tokens = tokens * request.block_tokens / request.prompt_tokens if request.prompt_tokens else 0.0
        known, parent = 0, None
        cacheable = request.chain.cacheable
        for index, block in enumerate(cacheable):
            count = self._requests.get(block, 0) + 1
            self._requests[block] = count
            if count > 1:
                known += index == known
                if count == _LEAST_REQUESTS:
                    self._shared[block] = _Shared(index + 1, parent, round((index + 1) * block_tokens))
            parent = block
        self._counted += 1
        self.prompt_tokens += tokens
        self.reusable_tokens += min(tokens, round(known * block_tokens))

    def hottest(self, most: int) -> Sequence[HotPrefix]:
        """Return the prefixes of at least 1 % of the requests with the most repeated tokens, at most ``most``.

        A prefix ends where its requests part.
        """
        least = max(_LEAST_REQUESTS, _LEAST_SHARE * self._counted)
        hot = {block: shared for block, shared in self._shared.items() if self._requests[block] >= least}
        continued = {
            shared.parent
            for block, shared in hot.items()
            if shared.parent is not None and self._requests[block] >= _BRANCH_SHARE * self._requests[shared.parent]
        }
        prefixes = [
            HotPrefix(last_block=block, blocks=each.blocks, tokens=each.tokens, requests=self._requests[block])
            for block, each in hot.items()
            if block not in continued
        ]
        prefixes.sort(key=lambda each: (-each.tokens * (each.requests - 1), each.last_block))
        return prefixes[:most]
