"""What the data path counts, as plain numbers: ``metrics`` adds to them and shows them at a scrape.

The event loop adds while another thread may read: each number is right, together they may be an event apart.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What became of one pool's requests since this router began to serve it; every number only grows.

    ``first_tokens`` counts responses whose first token was seen (event streams), ``slo_met`` those of them in time.
    ``prompt_tokens`` and ``predicted_cached_tokens`` are the router's estimates for all requests it routed,
    ``measured_cached_tokens`` is what engines reported.
    """

    requests: int = 0
    refused: int = 0
    first_tokens: int = 0
    slo_met: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    measured_cached_tokens: int = 0


class Distribution:
    """How often values fell up to each of the ascending ``bounds``, or beyond the last, and their sum."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Return how many values were at most each bound, and last how many there were."""
        return list(accumulate(self._counts))


@dataclass(slots=True, kw_only=True)
class EndpointCounts:
    """What was counted of one endpoint; ``checked_cached_tokens`` is what was predicted of requests measured since."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    checked_cached_tokens: int = 0
    measured_cached_tokens: int = 0
    outcomes: dict[str, int]
    first_tokens: dict[str, int]


@dataclass(slots=True, kw_only=True)
class PoolCounts:
    """What was counted of one pool, and of its endpoints by member id."""

    ttft_s: Distribution
    predicted_ttft_s: Distribution
    held_s: Distribution
    bodiless: int = 0
    served_elsewhere: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    endpoints: dict[str, EndpointCounts] = field(default_factory=dict)
    rules: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
