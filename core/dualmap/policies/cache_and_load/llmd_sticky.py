"""llm-d's sticky profile: stay with members that hold the prompt, then spread by tokens in flight."""

from math import inf
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation, Weights

_STICKY_SHARE = 0.8
_MOST_PENALTY_S = 18.0
_TTFT = Weights(compute=1.0)
_STICKY = Rule("sticky", "of the members that hold most of the prompt it has the fewest tokens in flight")
_PENALTY = Rule("penalty", "those that hold most of the prompt are far slower, and it has the fewest tokens in flight")
_NO_MATCH = Rule("no-match", "no member holds most of the prompt, and it has the fewest tokens in flight")


class LlmdSticky:
    """The fewest tokens in flight among members that hold 0.8 of the prompt, or among all when those are far too slow.

    Too slow is when the best TTFT among the holders exceeds the best of all by over 18 s. Deviations: TTFT is the
    router's own T_q + T_c instead of tokens in flight over a configured throughput, and llm-d leaves the holders by
    chance now and then to explore.
    """

    name: ClassVar[str] = "llmd_sticky"
    source: ClassVar[str] = "llm-d prefix-cache affinity filter with token-load scorer"
    summary: ClassVar[str] = "fewest tokens in flight among holders of 0.8 of the prompt, unless over 18 s slower"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the fewest tokens in flight, if possible one that holds the prompt."""
        everyone = situation.everyone
        placed_tokens = everyone.placed_tokens()
        least_matched = max(1.0, _STICKY_SHARE * situation.prompt_tokens)
        holds = [matched >= least_matched for matched in everyone.matched_tokens()]
        if not any(holds):
            return Choice(situation.cheapest(placed_tokens), _NO_MATCH)
        ttfts_s = everyone.costs_s(_TTFT)
        holders_s = min([ttft_s for ttft_s, held in zip(ttfts_s, holds, strict=True) if held])
        if holders_s - min(ttfts_s) > _MOST_PENALTY_S:
            return Choice(situation.cheapest(placed_tokens), _PENALTY)
        loads = zip(placed_tokens, holds, strict=True)
        return Choice(situation.cheapest([placed if held else inf for placed, held in loads]), _STICKY)
