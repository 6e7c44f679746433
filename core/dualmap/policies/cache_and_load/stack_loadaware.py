"""The vLLM production stack's load-aware prefix routing: matched share minus relative load."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LOAD_WEIGHT = 1.0
_BEST_SCORE = Rule("best-score", "its matched share of the prompt minus its relative load is the highest")


class StackLoadaware:
    """Chooses the highest ``matched / prompt - 1.0 * (load - mean) / max(1, mean)``.

    ``load`` is a member's number of requests. The first term is the share of the request's prefill that the cache
    saves. The second term is the relative difference between a member's load and the mean load.
    """

    name: ClassVar[str] = "stack_loadaware"
    source: ClassVar[str] = "vLLM production stack, load-aware prefix routing"
    summary: ClassVar[str] = "highest matched share of the prompt minus relative load over all members"
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
        # The cost omits the mean, which changes every score by the same amount.
        costs = [count * scale - matched / prompt for count, matched in columns]
        return Choice(situation.cheapest(costs), _BEST_SCORE)
