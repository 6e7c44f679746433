"""Llumnix's cache-aware scheduling: the fewest uncomputed tokens, including the tokens of this request."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_CACHE_AWARE_TOKENS = 1024
_CACHE_AWARE = Rule("cache-aware", "its sum of missed and pending prefill tokens is the lowest")
_SHORT = Rule("short-prompt", "the prompt is too short to use caches, and it has the least pending prefill")


class Llumnix:
    """Chooses the lowest ``prefix_miss_tokens + all_prefill_tokens``. Fewer requests in flight break ties.

    For prompts with fewer than 1024 tokens, caches are ignored. ``all_prefill_tokens`` counts the uncomputed tokens of
    waiting, running and dispatched requests, and of the requests that only engines report. Hits are what the pool's KV
    store holds at the member's host, as in the original. Deviations: hits in the member's own cache, as the
    router estimates them, count too. Without a store, only these count. The original has two defects that are corrected
    here: a member without hits misses the complete prompt, and hits count from block 0.
    """

    name: ClassVar[str] = "llumnix"
    source: ClassVar[str] = "Llumnix, cache-aware scheduling"
    summary: ClassVar[str] = "fewest missed plus pending prefill tokens over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the fewest uncomputed tokens."""
        everyone, prompt = situation.everyone, situation.prompt_tokens
        pending_tokens = everyone.pending_tokens()
        if prompt < _CACHE_AWARE_TOKENS:
            return Choice(situation.cheapest(pending_tokens), _SHORT)
        columns = zip(pending_tokens, everyone.held_tokens(), strict=True)
        return Choice(situation.cheapest([pending + prompt - held for pending, held in columns]), _CACHE_AWARE)
