"""SGLang's cache-aware routing: the longest match if the load is balanced, else the fewest requests."""

from math import inf
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_IMBALANCE_REQUESTS = 64
_IMBALANCE_RATIO = 1.5
_CACHE_THRESHOLD = 0.3
_MATCH = Rule("prefix-match", "the load is balanced, and it has the longest match")
_IMBALANCED = Rule("imbalanced", "the load is too uneven to use prefixes, and it has the fewest requests")
_NO_MATCH = Rule("no-match", "no match is long enough, and it has the fewest requests")


class SglangCacheAware:
    """Chooses the longest match above 0.3 of the prompt if the load is balanced; else the fewest requests.

    The load is imbalanced if the difference between the most and the fewest requests exceeds 64 and the quotient
    exceeds 1.5. Deviation: for shorter matches, SGLang chooses the member with the smallest tree. This policy chooses
    the fewest requests, as SGLang's successor (Shepherd Model Gateway) does.
    """

    name: ClassVar[str] = "sglang_cache_aware"
    source: ClassVar[str] = "SGLang router, cache_aware"
    summary: ClassVar[str] = "longest match above 0.3 while the load is balanced, else fewest requests"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the longest match, or with the fewest requests."""
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
