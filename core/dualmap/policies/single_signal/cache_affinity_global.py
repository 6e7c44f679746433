"""Cache affinity over all members: the longest indexed prefix (DualMap section 3.2, the pure strategy)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LONGEST = Rule("longest-prefix", "it has the longest match of all members")


class CacheAffinityGlobal:
    """Chooses the member with the longest match, regardless of load. A hash of the request id breaks ties.

    A request without a match therefore goes to a random member.
    """

    name: ClassVar[str] = "cache_affinity_global"
    source: ClassVar[str] = "DualMap section 3.2, pure cache affinity"
    summary: ClassVar[str] = "longest indexed prefix over all members, no load term"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the longest match."""
        matched_tokens = situation.everyone.matched_tokens()
        longest = max(matched_tokens)
        equal = [position for position, matched in enumerate(matched_tokens) if matched == longest]
        return Choice(situation.everyone[equal[situation.lot(len(equal))]], _LONGEST)
