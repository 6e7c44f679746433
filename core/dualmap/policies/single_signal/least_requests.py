"""Least requests: the member with the fewest requests, as in Envoy's least-request load balancing."""

from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_LEAST_REQUESTS = Rule("least-requests", "it has the fewest requests of all members")


class LeastRequests:
    """Chooses the member with the fewest requests in flight or queued, regardless of the requests' cost."""

    name: ClassVar[str] = "least_requests"
    source: ClassVar[str] = "the common default of proxies (Envoy's least request)"
    summary: ClassVar[str] = "fewest requests in flight or queued over all members"
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the member with the fewest requests."""
        return Choice(situation.cheapest(situation.everyone.requests()), _LEAST_REQUESTS)
