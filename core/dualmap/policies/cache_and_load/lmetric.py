"""LMetric: the lowest product of uncomputed prefill tokens and batch size (Zhang et al. 2026)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LEAST_PRODUCT = Rule("least-product", "its product of uncomputed prefill tokens and requests is the lowest")


class LMetric:
    """Chooses the lowest ``(pending + missed tokens) * (requests + 1)`` of all members.

    The first factor is the member's prefill work with this request, and the second factor its batch size with this
    request. The product needs no weights, because a scale of either factor does not change the order. Fewer requests in
    flight break ties. Deviation: the batch also contains the requests that the router has queued for a member.
    """

    name: ClassVar[str] = "lmetric"
    source: ClassVar[str] = "LMetric (arXiv:2603.15202)"
    summary: ClassVar[str] = "least product of uncomputed prefill tokens and requests over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the lowest product."""
        everyone, prompt = situation.everyone, situation.prompt_tokens
        columns = zip(everyone.pending_tokens(), everyone.matched_tokens(), everyone.requests(), strict=True)
        costs = [(pending + prompt - matched) * (requests + 1) for pending, matched, requests in columns]
        return Choice(situation.cheapest(costs), _LEAST_PRODUCT)
