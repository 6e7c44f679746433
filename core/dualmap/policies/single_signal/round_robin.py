"""Round robin: every member in turn."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_TURN = Rule("turn", "it is its turn")


class RoundRobin:
    """The member whose turn it is, in the order of their ids, whatever it holds or owes."""

    name: ClassVar[str] = "round_robin"
    source: ClassVar[str] = "the common default of proxies"
    summary: ClassVar[str] = "every member in turn"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member whose turn it is."""
        everyone = situation.everyone
        return Choice(everyone[situation.sequence % len(everyone)], _TURN)
