"""The linear combination of a cache score and a load score, a baseline of EAR (Elastic Affinity Routing)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_BEST_SCORE = Rule("best-score", "its sum of cache score and load score is the highest")


class LinearScore:
    """Chooses the highest sum of two scores from 0 to 1. Fewer requests in flight, then a hash, break ties.

    The cache score is the matched share of the prompt. The load score is 1 for a member without pending prefill and 0
    for the member with the most. Deviations: EAR defines neither the scores nor their weights. The load is the pending
    prefill, by which EAR measures load elsewhere, and both weights are 1.
    """

    name: ClassVar[str] = "linear_score"
    source: ClassVar[str] = "EAR (elastic affinity routing), section 5.1, baseline"
    summary: ClassVar[str] = "highest sum of cache score and load score over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the highest score."""
        everyone = situation.everyone
        pending_tokens = everyone.pending_tokens()
        # Costs are the complements of the scores.
        load, cache = 1 / max(1, max(pending_tokens)), 1 / max(1, situation.prompt_tokens)
        columns = zip(pending_tokens, everyone.matched_tokens(), strict=True)
        return Choice(
            situation.cheapest([pending * load - matched * cache for pending, matched in columns]), _BEST_SCORE
        )
