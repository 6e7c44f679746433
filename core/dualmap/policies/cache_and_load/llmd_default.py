"""llm-d's default scorers: queue, KV utilisation and prefix, with the weights 2, 2 and 3."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_QUEUE_WEIGHT = 2.0
_KV_WEIGHT = 2.0
_PREFIX_WEIGHT = 3.0
_BEST_SCORE = Rule("best-score", "its weighted score of queue, KV utilisation and prefix is the highest")


class LlmdDefault:
    """Chooses the highest weighted sum of three scores from 0 to 1. Fewer requests in flight, then a hash, break ties.

    The queue score is 1 for the shortest queue and 0 for the longest queue. The KV score is the free share of the
    cache. The prefix score is the matched share of the prompt. Deviations: llm-d reads the number of waiting requests
    and the KV utilisation from the engines' metrics. This policy uses the pending prefill tokens, and the KV of the
    prompts in flight and queued at a member.
    """

    name: ClassVar[str] = "llmd_default"
    source: ClassVar[str] = "llm-d inference scheduler, default profile"
    summary: ClassVar[str] = "highest sum of queue (2), KV utilisation (2) and prefix (3) scores"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the highest score."""
        everyone = situation.everyone
        pending_tokens = everyone.pending_tokens()
        shortest = min(pending_tokens)
        # Costs are the complements of the scores: if all queues are equal, each queue has cost 0.
        queue = _QUEUE_WEIGHT / max(1, max(pending_tokens) - shortest)
        room = max(1, situation.room_tokens)
        kv, prefix = _KV_WEIGHT / room, _PREFIX_WEIGHT / max(1, situation.prompt_tokens)
        columns = zip(pending_tokens, everyone.placed_tokens(), everyone.matched_tokens(), strict=True)
        costs = [
            (pending - shortest) * queue + (placed if placed < room else room) * kv - matched * prefix
            for pending, placed, matched in columns
        ]
        return Choice(situation.cheapest(costs), _BEST_SCORE)
