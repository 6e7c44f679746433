"""Power of two choices: the less busy of two random members (Mitzenmacher 2002)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_FEWER = Rule("fewer-requests", "it has fewer or equal requests than the other of two random members")


class PowerOfTwo:
    """The fewer requests of two distinct members drawn by the request's id; the first drawn if equal.

    Unlike DualMap's two candidates, they do not depend on the prompt.
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
