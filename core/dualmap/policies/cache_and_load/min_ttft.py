"""Min TTFT: the lowest predicted time to first token (Mooncake's rule; DualMap section 2.2, a baseline)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation, Weights

_MIN_TTFT = Rule("min-ttft", "it has the lowest predicted TTFT of all members")
_TTFT = Weights(compute=1.0)


class MinTtft:
    """Chooses the lowest predicted TTFT (T_q + T_c, paper eq. 7) of all members."""

    name: ClassVar[str] = "min_ttft"
    source: ClassVar[str] = "Mooncake; DualMap section 2.2, baseline"
    summary: ClassVar[str] = "least predicted TTFT over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the lowest predicted TTFT; fewer requests in flight break ties."""
        return Choice(situation.cheapest(situation.everyone.costs_s(_TTFT)), _MIN_TTFT)
