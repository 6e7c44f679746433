"""AIBrix's prefix-cache routing: the best match that is not busier than most."""

from math import inf
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_IMBALANCE_REQUESTS = 8
_DEVIATIONS = 1.0
_MATCH = Rule("prefix-match", "of the members that are not too busy, none holds more of the prompt")
_IMBALANCED = Rule("imbalanced", "requests are spread too unevenly to look at prefixes, and it has the fewest")
_NO_MATCH = Rule("no-match", "no member that is not too busy holds any of the prompt, and it has the fewest requests")


class AibrixPrefix:
    """The best match among members within one standard deviation of the mean requests; else the fewest requests.

    Where the busiest member has over 8 requests more than the idlest, matches are not looked at. Of equal matches it is
    the one with fewer requests. Deviation: running requests are those in flight or queued here, not the engines' own
    count, and those of other routers only as last reported.
    """

    name: ClassVar[str] = "aibrix_prefix"
    source: ClassVar[str] = "AIBrix, prefix-cache routing"
    summary: ClassVar[str] = "best match within mean + 1 sigma of the requests, else fewest requests"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the best match, or the member with the fewest requests."""
        everyone = situation.everyone
        requests = everyone.requests()
        if max(requests) - min(requests) > _IMBALANCE_REQUESTS:
            return Choice(situation.cheapest(requests), _IMBALANCED)
        mean = sum(requests) / len(requests)
        deviation = (sum([(each - mean) ** 2 for each in requests]) / len(requests)) ** 0.5
        most = mean + _DEVIATIONS * deviation
        usable = [
            matched if count <= most else 0 for matched, count in zip(everyone.matched_tokens(), requests, strict=True)
        ]
        longest = max(usable)
        if not longest:
            return Choice(situation.cheapest(requests), _NO_MATCH)
        loads = zip(requests, usable, strict=True)
        return Choice(situation.cheapest([count if matched == longest else inf for count, matched in loads]), _MATCH)
