"""Cache affinity: consistent hashing of a fixed-length key to one candidate (DualMap section 2.2, a baseline)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_AFFINITY = Rule("affinity", "ring 1 maps the key to it")


class CacheAffinity:
    """Chooses the member to which ring 1 maps the key, regardless of load."""

    name: ClassVar[str] = "cache_affinity"
    source: ClassVar[str] = "DualMap section 2.2, baseline"
    summary: ClassVar[str] = "consistent hash of a fixed-length key, one candidate"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the first member of the pair."""
        return Choice(situation.pair[0], _AFFINITY)
