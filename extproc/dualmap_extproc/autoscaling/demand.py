"""What the traffic through this router asks of each pool's fleet: told of every request by ``metrics`` and ``picker``.

The rule is ``dualmap.scaling.scaling``'s; here are the pools and the clock. A scrape asks it, and ``pool_demand``,
which adds up all routers. All of it belongs to the event loop.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from dualmap.pools.pool import Pool
from dualmap.requests import Decision, FirstToken, PoolSnapshot, Reason
from dualmap.scaling.scaling import Elsewhere, PoolSignals, Scaling
from dualmap.scaling.shares import NO_SHARE, Share, share_of
from dualmap_extproc.errors import Refused

# A request that got no instance would have kept one busy; one that is malformed, or for another model, would not.
_FOR_WANT_OF_INSTANCES: Final = frozenset(reason.value for reason in Reason)


class Demand:
    """The traffic of all pools by ``namespace/name``; ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pools: dict[str, Scaling] = {}
        self._arrived: Callable[[str], None] = _nobody_asked
        self._elsewhere: Callable[[str], Sequence[Elsewhere] | None] = _nobody_else

    def on_arrival(self, arrived: Callable[[str], None]) -> None:
        """Have ``arrived`` called with the pool of every request that asks for an instance; it must be quick."""
        self._arrived = arrived

    def on_elsewhere(self, elsewhere: Callable[[str], Sequence[Elsewhere] | None]) -> None:
        """Have ``elsewhere`` asked for what the other routers said of a pool, as ``Scaling.signals`` takes it."""
        self._elsewhere = elsewhere

    def set_pools(self, pools: Iterable[Pool]) -> None:
        """Keep the books of exactly these pools."""
        given = {pool.id: pool for pool in pools}
        for gone in self._pools.keys() - given.keys():
            del self._pools[gone]
        for name, pool in given.items():
            if name in self._pools:
                self._pools[name].adopt(pool)
            else:
                self._pools[name] = Scaling(pool)

    def routed(self, pool: str, decision: Decision) -> None:
        """Count a request sent to an instance."""
        scaling, receipt = self._pools.get(pool), decision.receipt
        if scaling is not None:
            cached = receipt.matched_tokens
            scaling.window.add(self._clock(), uncached_tokens=receipt.prompt_tokens - cached, cached_tokens=cached)
            self._arrived(pool)

    def held(self, pool: str) -> None:
        """Count a request that is held, whatever becomes of it: even one that its client gives up wants an instance."""
        scaling = self._pools.get(pool)
        if scaling is not None:
            scaling.window.hold(self._clock())
            self._arrived(pool)

    def refused(self, refused: Refused) -> None:
        """Count a request that got an error, where more instances would have helped it."""
        scaling = self._pools.get(refused.pool)
        if scaling is not None and refused.code in _FOR_WANT_OF_INSTANCES:
            scaling.window.refuse(self._clock())
            self._arrived(refused.pool)

    def first_token(self, pool: str, first_token: FirstToken) -> None:
        """Count a first token and whether it came in time."""
        scaling = self._pools.get(pool)
        if scaling is not None:
            scaling.window.first_token(self._clock(), within_slo=first_token.within_slo)

    def signals(self, statuses: Sequence[PoolSnapshot]) -> Mapping[str, PoolSignals]:
        """Return what autoscalers shall know of each pool, by statuses of this moment."""
        now = self._clock()
        return {
            status.pool: self._pools[status.pool].signals(now, status, elsewhere=self._elsewhere(status.pool))
            for status in statuses
            if status.pool in self._pools
        }

    def share(self, status: PoolSnapshot) -> Share:
        """Return this router's share of a pool's demand, by a status of this moment; none of a pool that is gone."""
        scaling = self._pools.get(status.pool)
        if scaling is None:
            return NO_SHARE
        return share_of(self._clock(), scaling, status, elsewhere=self._elsewhere(status.pool))


def _nobody_asked(_pool: str) -> None:
    """Nobody has asked to hear of arrivals."""


def _nobody_else(_pool: str) -> Sequence[Elsewhere]:
    """No other router is known."""
    return ()
