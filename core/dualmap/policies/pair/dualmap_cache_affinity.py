"""Ablation of DualMap: cache affinity between the two candidates (paper section 4.3)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_WARMER = Rule("pair-warmer", "it has the longer match of the pair")


class DualMapCacheAffinity:
    """Chooses the longer match of the pair, regardless of load. Lower load breaks ties. There is no rebalancing."""

    name: ClassVar[str] = "dualmap_cache_affinity"
    source: ClassVar[str] = "DualMap section 4.3, ablation 1"
    summary: ClassVar[str] = "the longer match of the pair, regardless of load"
    hotness: ClassVar[HotnessRule | None] = HotnessRule(split=2.0, merge=1.0)
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member of the pair with the longer match."""
        warm, _ = situation.warmest()
        return Choice(warm, _WARMER)
