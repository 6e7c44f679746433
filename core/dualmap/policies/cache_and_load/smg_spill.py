"""Shepherd Model Gateway's cache-aware routing: the longest match unless its load is far above the mean."""

from math import ceil, inf, sqrt
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_RELATIVE = 1.5
_ABSOLUTE_REQUESTS = 64
_LEAST_MARGIN_REQUESTS = 4
_CACHE_THRESHOLD = 0.3
_MATCH = Rule("prefix-match", "it is not overloaded, and it has the longest match")
_SPILL = Rule("spill", "the members with the longest match are overloaded, and it has the fewest requests")
_NO_MATCH = Rule("no-match", "no match is long enough, and it has the fewest requests")


class SmgSpill:
    """Chooses the longest match above 0.3 of the prompt at a member without overload; else the fewest requests.

    A member is overloaded if its requests exceed both 1.5 times the mean and the mean plus a margin. The margin is ``2
    * sqrt(mean)`` rounded up, at least 4 and at most 64. Without the margin, the normal variation of a busy pool would
    count as overload. The fewest requests break ties between equal matches. Deviation: Shepherd Model Gateway decides
    by expected wait.
    """

    name: ClassVar[str] = "smg_spill"
    source: ClassVar[str] = "Shepherd Model Gateway, cache_aware with spill"
    summary: ClassVar[str] = "longest match above 0.3 unless its load is far above the mean, else fewest requests"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the longest match, or with the fewest requests."""
        everyone = situation.everyone
        requests, matched_tokens = everyone.requests(), everyone.matched_tokens()
        longest = max(matched_tokens)
        if longest <= _CACHE_THRESHOLD * situation.prompt_tokens:
            return Choice(situation.cheapest(requests), _NO_MATCH)
        mean = sum(requests) / len(requests)
        margin = min(_ABSOLUTE_REQUESTS, max(_LEAST_MARGIN_REQUESTS, ceil(2 * sqrt(mean))))
        most = max(_RELATIVE * mean, mean + margin)
        loads = zip(requests, matched_tokens, strict=True)
        affine = [count if matched == longest and count <= most else inf for count, matched in loads]
        if min(affine) == inf:
            return Choice(situation.cheapest(requests), _SPILL)
        return Choice(situation.cheapest(affine), _MATCH)
