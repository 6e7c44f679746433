"""Random: any member, each as likely as another."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_CHANCE = Rule("chance", "it was drawn by lot")


class Random:
    """Any member, drawn by a stable hash of the request's id, since the core has no source of chance."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "the common baseline of proxies"
    summary: ClassVar[str] = "any member, drawn by the request's id"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member that the request's id draws."""
        everyone = situation.everyone
        return Choice(everyone[situation.lot(len(everyone))], _CHANCE)
