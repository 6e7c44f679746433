"""The demand of this router's traffic on each pool, counted from observations.

``dualmap.scaling.scaling`` computes the signals from the counts. A scrape of the metrics reads the signals, and
``pool_demand`` sums the demand of all routers. All calls must come from the event loop's thread.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from dualmap.pools.pool import Pool
from dualmap.receipt import Receipt
from dualmap.remote_prefills import FULL, NO_MEMBER
from dualmap.requests import PoolSnapshot, Reason
from dualmap.scaling.reports import NO_SHARE, Share, share_of
from dualmap.scaling.scaling import OtherRouter, PoolSignals, Scaling
from dualmap_extproc.request.observations import Enqueued, FanOut, FirstTokenSeen, Rejected, Routed

# Error codes of requests that the router rejected for lack of members. Malformed requests have other codes.
_LACK_OF_MEMBERS: Final = frozenset(reason.value for reason in Reason)
# Reasons of local prefills that more members of the prefill pool would avoid.
_LACK_OF_PREFILLERS: Final = frozenset((NO_MEMBER.name, FULL.name))


class Demand:
    """The demand on all pools, by ``namespace/name``. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pools: dict[str, Scaling] = {}
        self._arrived: Callable[[str], None] = _ignore_arrival
        self._other_routers: Callable[[str], Sequence[OtherRouter] | None] = _no_other_router

    def subscribe(self, observations: FanOut) -> None:
        """Subscribe to the observations that count as demand."""
        observations.subscribe(Routed, self._routed)
        observations.subscribe(Enqueued, self._queued)
        observations.subscribe(Rejected, self._rejected)
        observations.subscribe(FirstTokenSeen, self._first_token)

    def on_arrival(self, arrived: Callable[[str], None]) -> None:
        """Set the function that gets the pool of every request that needs a member. The function must not block."""
        self._arrived = arrived

    def on_other_routers(self, others: Callable[[str], Sequence[OtherRouter] | None]) -> None:
        """Set the function that returns the other routers' reports about a pool, in the form of ``Scaling.signals``."""
        self._other_routers = others

    def set_pools(self, pools: Iterable[Pool]) -> None:
        """Count the demand on these pools, and discard the counts of all other pools."""
        given = {pool.id: pool for pool in pools}
        for gone in self._pools.keys() - given.keys():
            del self._pools[gone]
        for name, pool in given.items():
            if name in self._pools:
                self._pools[name].adopt(pool)
            else:
                self._pools[name] = Scaling(pool)

    def signals(self, statuses: Sequence[PoolSnapshot]) -> Mapping[str, PoolSignals]:
        """Return each pool's signals for autoscalers; ``statuses`` must be current."""
        now = self._clock()
        return {
            status.pool: self._pools[status.pool].signals(now, status, others=self._other_routers(status.pool))
            for status in statuses
            if status.pool in self._pools
        }

    def share(self, status: PoolSnapshot) -> Share:
        """Return this router's share of the demand on a pool.

        The share of a removed pool is empty. ``status`` must be current.
        """
        scaling = self._pools.get(status.pool)
        if scaling is None:
            return NO_SHARE
        return share_of(self._clock(), scaling, status, others=self._other_routers(status.pool))

    def _routed(self, routed: Routed) -> None:
        receipt = routed.decision.receipt
        prefill = receipt.prefill
        if prefill is None:
            self._add(routed.now, routed.pool, receipt)
        elif prefill.receipt is not None:
            self._add(routed.now, routed.pool, receipt, new_tokens=0)
            self._add(routed.now, prefill.receipt.pool, prefill.receipt)
        else:
            self._add(routed.now, routed.pool, receipt)
            if prefill.local in _LACK_OF_PREFILLERS:
                self._reject(routed.now, f"{routed.pool.partition('/')[0]}/{prefill.pool}")

    def _add(self, now: float, pool: str, receipt: Receipt, *, new_tokens: int | None = None) -> None:
        """Count a request; None for ``new_tokens`` stands for all uncached tokens of the prompt."""
        scaling, cached = self._pools.get(pool), receipt.matched_tokens
        if scaling is not None:
            uncached = receipt.prompt_tokens - cached if new_tokens is None else new_tokens
            scaling.window.add(now, uncached_tokens=uncached, cached_tokens=cached)
            self._arrived(pool)

    def _queued(self, queued: Enqueued) -> None:
        """Count a queued request regardless of its outcome: even an abandoned request needed a member."""
        scaling = self._pools.get(queued.pool)
        if scaling is not None:
            scaling.window.enqueue(queued.now)
            self._arrived(queued.pool)

    def _rejected(self, rejected: Rejected) -> None:
        """Count a rejected request that one more member would have served."""
        if rejected.refused.code in _LACK_OF_MEMBERS:
            self._reject(rejected.now, rejected.pool)

    def _reject(self, now: float, pool: str) -> None:
        scaling = self._pools.get(pool)
        if scaling is not None:
            scaling.window.reject(now)
            self._arrived(pool)

    def _first_token(self, seen: FirstTokenSeen) -> None:
        scaling = self._pools.get(seen.pool)
        if scaling is not None:
            scaling.window.first_token(seen.now, within_slo=seen.first_token.within_slo)


def _ignore_arrival(_pool: str) -> None:
    """Do nothing, because there is no subscriber to arrivals."""


def _no_other_router(_pool: str) -> Sequence[OtherRouter]:
    """Return no reports, for a router without other replicas."""
    return ()
