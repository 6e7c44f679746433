"""The vLLM production stack's load-aware prefix routing: matched share less relative load."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LOAD_WEIGHT = 1.0
_BEST_SCORE = Rule("best-score", "its matched share of the prompt less its relative load is the most")


class StackLoadaware:
    """The most ``matched / prompt - 1.0 * (load - mean) / max(1, mean)`` over all members; load is requests.

    The share says what is saved of this request, the other term how far a member is from an even spread.
    """

    name: ClassVar[str] = "stack_loadaware"
    source: ClassVar[str] = "vLLM production stack, load-aware prefix routing"
    summary: ClassVar[str] = "most matched share of the prompt less relative load over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the highest score."""
        everyone = situation.everyone
        requests, prompt = everyone.requests(), max(1, situation.prompt_tokens)
        mean = sum(requests) / len(requests)
        scale = _LOAD_WEIGHT / max(1.0, mean)
        columns = zip(requests, everyone.matched_tokens(), strict=True)
        # Less the mean or not: it takes the same from every score.
        costs = [count * scale - matched / prompt for count, matched in columns]
        return Choice(situation.cheapest(costs), _BEST_SCORE)
