"""Power of two choices: the less loaded of two random members (Mitzenmacher 2002)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_FEWER = Rule("fewer-requests", "it has fewer or equal requests than the other of two random members")


class PowerOfTwo:
    """Draws two distinct members by a hash of the request id; chooses fewer requests, the first member if equal.

    Unlike DualMap's pair, the two members do not depend on the prompt.
    """

    name: ClassVar[str] = "power_of_two"
    source: ClassVar[str] = "Mitzenmacher 2002; DualMap section 1"
    summary: ClassVar[str] = "fewer requests of two members drawn by the request's id"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the drawn member with fewer requests."""
        everyone = situation.everyone
        count, requests = len(everyone), everyone.requests()
        first = situation.lot(count)
        second = (first + 1 + situation.lot(max(1, count - 1), draw=1)) % count
        return Choice(everyone[second if requests[second] < requests[first] else first], _FEWER)
