"""Preble: uses a cache with most of the prompt, else chooses by cost (Srivatsa et al. 2024)."""

from math import inf
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation, Weights

_EXPLOITED_SHARE = 0.5
_LOAD_AND_RECOMPUTE = Weights(compute=1.0)
_EXPLOIT = Rule("exploit", "it has the longest match, which is more than half of the prompt")
_EXPLORE = Rule("explore", "no match exceeds half of the prompt, and it has the lowest cost of load and recomputation")


class Preble:
    """Chooses the longest match if it exceeds half of the prompt, else the lowest cost of load and recomputation.

    The least pending prefill breaks ties between equal matches. Deviations: the load is T_q (paper eq. 7), a member's
    present backlog; Preble sums the work of the last minutes. The cost of evictions is not counted, because the router
    cannot observe evictions.
    """

    name: ClassVar[str] = "preble"
    source: ClassVar[str] = "Preble (arXiv:2407.00023); DualMap section 2.2 and appendix B"
    summary: ClassVar[str] = "longest match if over half of the prompt, else least load and recompute cost"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the longest match, or with the lowest cost."""
        everyone = situation.everyone
        matched_tokens = everyone.matched_tokens()
        longest = max(matched_tokens)
        if longest > _EXPLOITED_SHARE * situation.prompt_tokens:
            loads = zip(everyone.pending_tokens(), matched_tokens, strict=True)
            return Choice(
                situation.cheapest([pending if matched == longest else inf for pending, matched in loads]), _EXPLOIT
            )
        return Choice(situation.cheapest(everyone.costs_s(_LOAD_AND_RECOMPUTE)), _EXPLORE)
