"""Round robin over all members."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_TURN = Rule("turn", "it is the next member in turn")


class RoundRobin:
    """Chooses the next member in the order of ids, regardless of cache and load."""

    name: ClassVar[str] = "round_robin"
    source: ClassVar[str] = "the common default of proxies"
    summary: ClassVar[str] = "every member in turn"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the next member."""
        everyone = situation.everyone
        return Choice(everyone[situation.sequence % len(everyone)], _TURN)
