"""The published DualMap policy: SLO-aware choice within the pair (paper section 3.2)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LESS_LOADED = Rule(
    "pair-less-loaded",
    "the member with the longer match would miss the SLO, and it has the least pending prefill of the pair",
)


class DualMapPaper:
    """Chooses the longer match of the pair if its predicted TTFT meets the SLO; else the less loaded member.

    Deviation: the paper compares pending tokens with ``ttft_slo_threshold``, the tokens that an instance prefills
    within the SLO time. This policy compares the predicted TTFT with the SLO, which is equivalent if the speed is
    known.
    """

    name: ClassVar[str] = "dualmap_paper"
    source: ClassVar[str] = "DualMap section 3.2"
    summary: ClassVar[str] = "the longer match of the pair within the SLO, else the less loaded of the pair"
    hotness: ClassVar[HotnessRule | None] = HotnessRule(split=2.0, merge=1.0)
    rebalances: ClassVar[bool] = True
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member of the pair with the longer match, or the less loaded member."""
        warm, rule = situation.warmest()
        if situation.waited_s + warm.ttft_s <= situation.slo_ttft_s:
            return Choice(warm, rule)
        return Choice(situation.less_loaded(), _LESS_LOADED)
