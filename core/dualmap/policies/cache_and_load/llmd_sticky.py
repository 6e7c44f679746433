"""llm-d's sticky profile: prefers members with the prompt cached, then the fewest tokens in flight."""

from math import inf
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation, Weights

_STICKY_SHARE = 0.8
_MOST_PENALTY_S = 18.0
_TTFT = Weights(compute=1.0)
_STICKY = Rule("sticky", "among the members with most of the prompt cached, it has the fewest tokens in flight")
_PENALTY = Rule(
    "penalty", "the members with most of the prompt cached are far slower, and it has the fewest tokens in flight"
)
_NO_MATCH = Rule("no-match", "no member has most of the prompt cached, and it has the fewest tokens in flight")


class LlmdSticky:
    """Chooses the fewest tokens in flight among members with 0.8 of the prompt cached, or among all members.

    The policy uses all members in two cases. In the first case, no member has 0.8 of the prompt cached. In the second
    case, the best TTFT of members with 0.8 exceeds the best TTFT of all members by over 18 s. Deviations: TTFT is the
    router's T_q + T_c (paper eq. 7); llm-d divides tokens in flight by a configured throughput. In addition, llm-d
    sometimes chooses other members at random.
    """

    name: ClassVar[str] = "llmd_sticky"
    source: ClassVar[str] = "llm-d prefix-cache affinity filter with token-load scorer"
    summary: ClassVar[str] = "fewest tokens in flight among members with 0.8 of the prompt, unless over 18 s slower"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the fewest tokens in flight; prefer members with the prompt cached."""
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
