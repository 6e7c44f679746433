"""Cache affinity over all members: the longest indexed prefix wins (DualMap section 3.2, the pure strategy)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LONGEST = Rule("longest-prefix", "no member holds more of the prompt")


class CacheAffinityGlobal:
    """The member believed to hold most of the prompt, however loaded it is; equals by lot, so that load never counts.

    A prompt that no member holds is therefore placed at random.
    """

    name: ClassVar[str] = "cache_affinity_global"
    source: ClassVar[str] = "DualMap section 3.2, pure cache affinity"
    summary: ClassVar[str] = "longest indexed prefix over all members, no load term"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member that holds most of the prompt."""
        matched_tokens = situation.everyone.matched_tokens()
        longest = max(matched_tokens)
        equal = [position for position, matched in enumerate(matched_tokens) if matched == longest]
        return Choice(situation.everyone[equal[situation.lot(len(equal))]], _LONGEST)
