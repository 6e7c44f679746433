"""Ablation of DualMap: the faster of the two candidates (paper section 4.3)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_MIN_TTFT = Rule("pair-min-ttft", "it has the lowest predicted TTFT of the pair")


class DualMapMinTtft:
    """Chooses the pair's member with the lowest predicted TTFT. Fewer requests in flight break ties.

    There is no rebalancing.
    """

    name: ClassVar[str] = "dualmap_min_ttft"
    source: ClassVar[str] = "DualMap section 4.3, ablation 3"
    summary: ClassVar[str] = "the member of the pair with the least predicted TTFT"
    hotness: ClassVar[HotnessRule | None] = HotnessRule(split=2.0, merge=1.0)
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member of the pair with the lowest predicted TTFT."""
        return Choice(situation.least(situation.pair, lambda each: (each.ttft_s, each.in_flight)), _MIN_TTFT)
