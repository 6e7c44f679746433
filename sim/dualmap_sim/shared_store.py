"""A KV store that the engines of a simulated cluster share: what it holds, and which host holds each block.

Every engine stores each prompt that it has computed, and can fetch what any engine stored. The store keeps everything:
it bounds from above what a store can gain. ``cluster`` tells routers what the store holds, without a delay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dualmap.kv_store.view import NO_MATCH, StoreMatch
from dualmap.pools.kv_store import KvStore, StoreType


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """A shared store from which each engine fetches ``tokens_per_s`` tokens a second."""

    tokens_per_s: float

    def spec(self) -> KvStore:
        """Return the store as the pool's object contains it; simulations ask no address."""
        return KvStore(type=StoreType.MOONCAKE, fetch_tokens_per_second=self.tokens_per_s)


class SharedStore:
    """The blocks of one store. Prompts of fewer than ``min_tokens`` tokens are not looked up."""

    def __init__(self, *, block_tokens: int, min_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._min_tokens = min_tokens
        # The host of each block: the one that stored it first.
        self._hosts: dict[int, str] = {}

    def put(self, host: str, prompt: Sequence[int]) -> None:
        """Store the full blocks of a prompt that an engine at ``host`` has computed."""
        for block in prompt:
            self._hosts.setdefault(block, host)

    def tokens(self, prompt: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt's blocks the store holds."""
        held = 0
        while held < len(prompt) and prompt[held] in self._hosts:
            held += 1
        return held * self._block_tokens

    def match(self, prompt: Sequence[int], prompt_tokens: int) -> StoreMatch:
        """Return what the store says about a prompt, with the hosts that hold its beginning themselves."""
        tokens = self.tokens(prompt) if prompt_tokens >= self._min_tokens else 0
        if not tokens:
            return NO_MATCH
        first = self._hosts[prompt[0]]
        alone = 1
        while alone * self._block_tokens < tokens and self._hosts[prompt[alone]] == first:
            alone += 1
        return StoreMatch(tokens, ((first, alone * self._block_tokens),))
