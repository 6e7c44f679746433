"""Ablation of DualMap: cache affinity between the two candidates (paper section 4.3)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_WARMER = Rule("pair-warmer", "neither of its pair holds more of the prompt")


class DualMapCacheAffinity:
    """The pair's member with more reusable prefix, however loaded it is; of equals the less loaded. No rebalancing."""

    name: ClassVar[str] = "dualmap_cache_affinity"
    source: ClassVar[str] = "DualMap section 4.3, ablation 1"
    summary: ClassVar[str] = "the warmer of the pair, whatever its load"
    hotness: ClassVar[HotnessRule | None] = HotnessRule(split=2.0, merge=1.0)
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return one of the pair."""
        warm, _ = situation.warmest()
        return Choice(warm, _WARMER)
