"""Least requests: the member with the fewest requests, as proxies count them (Envoy's least request)."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LEAST_REQUESTS = Rule("least-requests", "no member has fewer requests")


class LeastRequests:
    """The fewest requests over all members, in flight or queued, whatever they cost."""

    name: ClassVar[str] = "least_requests"
    source: ClassVar[str] = "the common default of proxies (Envoy's least request)"
    summary: ClassVar[str] = "fewest requests in flight or held over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the fewest requests."""
        return Choice(situation.cheapest(situation.everyone.requests()), _LEAST_REQUESTS)
