"""Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018)."""

from math import ceil
from typing import ClassVar

from dualmap.keys.hotness import HotnessRule
from dualmap.policies.situation import Choice, Rule, Situation

_FACTOR = 1.25
_AFFINITY = Rule("affinity", "ring 1 maps the key to it, and its load is within the bound")
_BOUNDED = Rule("bounded", "it follows on ring 1 after members whose load is at the bound")


class Chwbl:
    """Chooses the first member in ring 1's order for the key with requests within 1.25 times the mean.

    The bound is ``ceil(1.25 * requests / members)`` and includes the new request. The policy computes the bound from
    the situation and needs no state. Deviation: members with different weights have the same bound.
    """

    name: ClassVar[str] = "chwbl"
    source: ClassVar[str] = "Mirrokni et al. 2018 (arXiv:1608.01350)"
    summary: ClassVar[str] = (
        "consistent hash of a fixed-length key, skipping members above 1.25 times the mean requests"
    )
    hotness: ClassVar[HotnessRule | None] = None
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def choose(self, situation: Situation) -> Choice:
        """Return the first member in ring 1's order for the key with a load within the bound."""
        everyone = situation.everyone
        requests = everyone.requests()
        most = ceil(_FACTOR * (sum(requests) + 1) / len(requests))
        walk = enumerate(situation.ring_walk())
        # The bound exceeds the mean, so at least one member is below the bound.
        step, position = next((step, position) for step, position in walk if requests[position] < most)
        return Choice(everyone[position], _BOUNDED if step else _AFFINITY)
