"""Least loaded: the member with the fewest pending prefill tokens (DualMap section 2.2, a baseline)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LEAST_LOADED = Rule("least-loaded", "it has the least pending prefill of all members")


class LeastLoaded:
    """Chooses the least pending prefill of all members, regardless of caches. Fewer requests in flight break ties."""

    name: ClassVar[str] = "least_loaded"
    source: ClassVar[str] = "DualMap section 2.2, baseline"
    summary: ClassVar[str] = "least pending prefill tokens over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the least pending prefill."""
        return Choice(situation.cheapest(situation.everyone.pending_tokens()), _LEAST_LOADED)
