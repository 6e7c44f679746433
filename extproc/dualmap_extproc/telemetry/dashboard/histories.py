"""Keeps the recent history of every pool for the dashboard, from observations. docs/dashboard.md gives the cost."""

import time
from collections.abc import Callable

from dualmap_extproc.request.ending import Ending
from dualmap_extproc.request.observations import Ended, FanOut, FirstTokenSeen, Measured, Rejected, Routed
from dualmap_extproc.telemetry.dashboard.history import HistoryView, PoolHistory


class Histories:
    """The history of every pool, for the event loop's thread only. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pools: dict[str, PoolHistory] = {}

    def subscribe(self, observations: FanOut) -> None:
        """Subscribe to the observations that the history needs."""
        observations.subscribe(Routed, self._routed)
        observations.subscribe(Rejected, self._rejected)
        observations.subscribe(FirstTokenSeen, self._first_token)
        observations.subscribe(Ended, self._ended)
        observations.subscribe(Measured, self._measured)

    def view(self, pool: str) -> HistoryView:
        """Return the recent history of a pool (``namespace/name``), empty for a pool without observations."""
        return self._pools.get(pool, PoolHistory()).view(self._clock())

    def age_s(self, at_s: float) -> float:
        """Return the seconds since the clock's time ``at_s``."""
        return self._clock() - at_s

    def _routed(self, routed: Routed) -> None:
        self._history(routed.pool, routed.now).routed(routed.now, routed.decision)

    def _rejected(self, rejected: Rejected) -> None:
        # A rejection without a known pool is not in any pool's history.
        if rejected.pool:
            self._history(rejected.pool, rejected.now).refused(rejected.now, rejected.refused)

    def _first_token(self, seen: FirstTokenSeen) -> None:
        self._history(seen.pool, seen.now).first_token(seen.now, seen.first_token)

    def _ended(self, ended: Ended) -> None:
        if ended.ending is Ending.FAILED:
            self._history(ended.pool, ended.now).failed(ended.now, ended.completion)

    def _measured(self, measured: Measured) -> None:
        self._history(measured.pool, measured.now).measured(measured.now, measured.completion)

    def _history(self, pool: str, now: float) -> PoolHistory:
        history = self._pools.get(pool)
        if history is None:
            # A new pool triggers the removal of pools that the dashboard's charts no longer show.
            self._pools = {name: each for name, each in self._pools.items() if not each.quiet(now)}
            history = self._pools[pool] = PoolHistory()
        return history
