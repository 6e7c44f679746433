"""Hears what the data path reports, keeps the recent past of every pool for the dashboard, and passes everything on.

Stands between the data path and ``metrics`` where the dashboard is on; where it is off, it is not there.
docs/dashboard.md says what it costs.
"""

import time
from collections.abc import Callable

from dualmap.requests import Completion, Decision, FirstToken
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.observer import Observer
from dualmap_extproc.telemetry.dashboard.history import HistoryView, PoolHistory


class Recorder:
    """Implements ``observer.Observer``; ``clock`` gives monotonic seconds. All of it belongs to the event loop."""

    def __init__(self, onward: Observer, clock: Callable[[], float] = time.monotonic) -> None:
        self._onward = onward
        self._clock = clock
        self._pools: dict[str, PoolHistory] = {}

    def view(self, pool: str) -> HistoryView:
        """Return the recent past of a pool (``namespace/name``); an empty one where nothing happened."""
        return self._pools.get(pool, PoolHistory()).view(self._clock())

    def age_s(self, at_s: float) -> float:
        """Return how long ago a time of the clock was."""
        return self._clock() - at_s

    def routed(self, pool: str, decision: Decision) -> None:
        """A request was sent to an instance (Observer)."""
        self._history(pool).routed(self._clock(), decision)
        self._onward.routed(pool, decision)

    def routed_bodiless(self, pool: str) -> None:
        """A request without a prompt was sent to any instance (Observer)."""
        self._onward.routed_bodiless(pool)

    def refused(self, refused: Refused) -> None:
        """A request got an error (Observer); one that reached no pool is nothing to see in any."""
        if refused.pool:
            self._history(refused.pool).refused(self._clock(), refused)
        self._onward.refused(refused)

    def waited(self, pool: str, seconds: float) -> None:
        """A request is held no longer (Observer)."""
        self._onward.waited(pool, seconds)

    def decided(self, seconds: float) -> None:
        """A decision took so long (Observer)."""
        self._onward.decided(seconds)

    def first_token(self, pool: str, first_token: FirstToken) -> None:
        """A first token came back (Observer)."""
        self._history(pool).first_token(self._clock(), first_token)
        self._onward.first_token(pool, first_token)

    def finished(self, pool: str, completion: Completion) -> None:
        """A request ended well (Observer)."""
        self._onward.finished(pool, completion)

    def rejected(self, pool: str, completion: Completion) -> None:
        """An engine did not take a request (Observer)."""
        self._onward.rejected(pool, completion)

    def aborted(self, pool: str, completion: Completion) -> None:
        """A request was cancelled or broke off (Observer)."""
        self._onward.aborted(pool, completion)

    def failed(self, pool: str, completion: Completion) -> None:
        """An instance failed to serve a request (Observer)."""
        self._history(pool).failed(self._clock(), completion)
        self._onward.failed(pool, completion)

    def expired(self, pool: str, completion: Completion) -> None:
        """Nothing was heard of a request for long (Observer)."""
        self._onward.expired(pool, completion)

    def measured(self, pool: str, completion: Completion) -> None:
        """An engine said how many prompt tokens it had cached (Observer)."""
        self._history(pool).measured(self._clock(), completion)
        self._onward.measured(pool, completion)

    def served_elsewhere(self, pool: str) -> None:
        """Another instance than the chosen one served a request (Observer)."""
        self._onward.served_elsewhere(pool)

    def _history(self, pool: str) -> PoolHistory:
        history = self._pools.get(pool)
        if history is None:
            # Pools come and go; those of which nothing is left to see are forgotten when another one comes.
            now = self._clock()
            self._pools = {name: each for name, each in self._pools.items() if not each.quiet(now)}
            history = self._pools[pool] = PoolHistory()
        return history
