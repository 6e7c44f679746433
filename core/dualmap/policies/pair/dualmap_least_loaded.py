"""Ablation of DualMap: the less loaded of the two candidates (paper section 4.3)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LESS_LOADED = Rule("pair-less-loaded", "it has the least pending prefill of the pair")


class DualMapLeastLoaded:
    """Chooses the pair's member with less pending prefill, regardless of the caches. There is no rebalancing."""

    name: ClassVar[str] = "dualmap_least_loaded"
    source: ClassVar[str] = "DualMap section 4.3, ablation 2"
    summary: ClassVar[str] = "the less loaded of the pair, regardless of its cache"
    hotness: ClassVar[HotnessRule | None] = HotnessRule(split=2.0, merge=1.0)
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member of the pair with less pending prefill."""
        return Choice(situation.less_loaded(), _LESS_LOADED)
