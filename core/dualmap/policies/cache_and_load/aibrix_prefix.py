"""AIBrix's prefix-cache routing: the longest match among members with acceptable load."""

from math import inf
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_IMBALANCE_REQUESTS = 8
_DEVIATIONS = 1.0
_MATCH = Rule("prefix-match", "it has the longest match among the members that are not overloaded")
_IMBALANCED = Rule("imbalanced", "the load is too uneven to use prefixes, and it has the fewest requests")
_NO_MATCH = Rule(
    "no-match", "no member with acceptable load has any of the prompt cached, and it has the fewest requests"
)


class AibrixPrefix:
    """Chooses the longest match among members with acceptable load; else the fewest requests.

    A load is acceptable if it is at most the mean number of requests plus one standard deviation. If the difference
    between the most and the fewest requests exceeds 8, matches are ignored. Fewer requests break ties. Deviation: this
    policy counts the requests that routers have in flight or queued, not the engines' running requests. Other routers'
    requests are counted from their last report.
    """

    name: ClassVar[str] = "aibrix_prefix"
    source: ClassVar[str] = "AIBrix, prefix-cache routing"
    summary: ClassVar[str] = "longest match within mean + 1 sigma of the requests, else fewest requests"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the longest match, or with the fewest requests."""
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
