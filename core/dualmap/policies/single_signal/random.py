"""Random: any member with equal probability."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_CHANCE = Rule("chance", "it was chosen at random")


class Random:
    """Draws a member by a stable hash of the request id, because the core has no random numbers."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "the common baseline of proxies"
    summary: ClassVar[str] = "any member, drawn by the request's id"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the drawn member."""
        everyone = situation.everyone
        return Choice(everyone[situation.lot(len(everyone))], _CHANCE)
