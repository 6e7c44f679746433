"""SGLang's cache-aware routing: prefixes while the load is balanced, else the shortest queue."""

from math import inf
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_IMBALANCE_REQUESTS = 64
_IMBALANCE_RATIO = 1.5
_CACHE_THRESHOLD = 0.3
_MATCH = Rule("prefix-match", "the load is balanced, and no member holds more of the prompt")
_IMBALANCED = Rule("imbalanced", "requests are spread too unevenly to look at prefixes, and it has the fewest")
_NO_MATCH = Rule("no-match", "no member holds enough of the prompt, and it has the fewest requests")


class SglangCacheAware:
    """The longest match above 0.3 of the prompt while the load is balanced; else the fewest requests.

    The load is imbalanced when the busiest member has over 64 requests more than the idlest, and over 1.5 times as
    many. Deviation: up to the threshold SGLang takes the member with the smallest tree, here it is the one with the
    fewest requests, as in its successor (SMG).
    """

    name: ClassVar[str] = "sglang_cache_aware"
    source: ClassVar[str] = "SGLang router, cache_aware"
    summary: ClassVar[str] = "longest match above 0.3 while the load is balanced, else fewest requests"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the longest match, or the member with the fewest requests."""
        everyone = situation.everyone
        requests = everyone.requests()
        fewest, most = min(requests), max(requests)
        if most - fewest > _IMBALANCE_REQUESTS and most > _IMBALANCE_RATIO * fewest:
            return Choice(situation.cheapest(requests), _IMBALANCED)
        matched_tokens = everyone.matched_tokens()
        longest = max(matched_tokens)
        if longest <= _CACHE_THRESHOLD * situation.prompt_tokens:
            return Choice(situation.cheapest(requests), _NO_MATCH)
        loads = zip(requests, matched_tokens, strict=True)
        return Choice(situation.cheapest([count if matched == longest else inf for count, matched in loads]), _MATCH)
