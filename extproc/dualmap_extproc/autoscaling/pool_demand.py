"""The demand on each pool, summed over all routers: this router's share and the other routers' reports.

``store.exchange`` transfers the reports between the routers, and ``scaler`` serves the sums to KEDA. Without a store,
the sum is this router's own share. If a router has not reached its store recently, ``total`` raises DemandUnknown. A
sum without the other routers' shares would scale down a busy pool.

All calls must come from the event loop's thread.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Final

from dualmap.pools.pool import Pool
from dualmap.replicas.peers import PEER_TTL_S
from dualmap.requests import PoolSnapshot
from dualmap.scaling.reports import NO_SHARE, PeerShares, Report, Share, limited
from dualmap.scaling.scaling import OtherRouter
from dualmap_extproc.autoscaling.demand import Demand

REPORT_INTERVAL_S: Final = 1.0
"""The interval of a router's reports. When a pool's traffic begins, the router reports immediately."""

Statuses = Callable[[Collection[str] | None], tuple[PoolSnapshot, ...]]


class DemandUnknown(Exception):
    """The sum over all routers is currently unknown; the message gives the reason."""


class PoolDemand:
    """The demand of all pools by ``namespace/name``.

    ``statuses`` returns the statuses of the named pools (``Picker.statuses``). ``pool`` returns a pool with the values
    that its engines report (``Picker.pool``). ``replicated`` is true if routers exchange reports. ``clock`` returns
    monotonic seconds.
    """

    def __init__(
        self,
        demand: Demand,
        statuses: Statuses,
        pool: Callable[[str], Pool | None],
        *,
        replicated: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._demand = demand
        self._statuses = statuses
        self._pool = pool
        self._replicated = replicated
        self._clock = clock
        self._peers: dict[str, PeerShares] = {}
        self._reported_s: dict[str, float] = {}
        self._exchanged_s: float | None = None
        # The pools with traffic. An arrival calls ``_on_change`` only for a pool that is not in this set.
        self._awake: set[str] = set()
        self._on_change: Callable[[str], None] = _ignore_change
        demand.on_arrival(self._arrived)
        demand.on_other_routers(self._other_routers)

    def on_change(self, changed: Callable[[str], None]) -> None:
        """Set the function that gets a pool when its first request arrives at this or another router."""
        self._on_change = changed

    def knows(self, pool: str) -> bool:
        """Whether this router serves a pool."""
        return bool(self._statuses((pool,)))

    def total(self, pool: str) -> Share:
        """Return a pool's demand, summed over all routers. Raises DemandUnknown.

        This router must serve the pool.
        """
        now = self._clock()
        self._must_know(now, pool)
        return self._peers_of(pool).total(now, self._own(pool))

    def active(self, pool: str) -> bool:
        """Return whether a pool has traffic at any router. Raises DemandUnknown.

        This router must serve the pool.
        """
        now, own = self._clock(), self._own(pool)
        if own.active:
            return True
        self._must_know(now, pool)
        return self._peers_of(pool).total(now, own).active

    def reports(self, pools: Collection[str]) -> Mapping[str, Report]:
        """Return the reports that are due. ``pools`` must contain all pools that this router serves."""
        now = self._clock()
        for gone in (self._peers.keys() | self._reported_s.keys() | self._awake) - set(pools):
            self._peers.pop(gone, None)
            self._reported_s.pop(gone, None)
            self._awake.discard(gone)
        due = [pool for pool in pools if now - self._reported_s.get(pool, -inf) >= REPORT_INTERVAL_S]
        return {pool: self._report(now, pool) for pool in due}

    def reported(self, reports: Mapping[str, Report]) -> None:
        """Record that these reports are in the store."""
        now = self._clock()
        for pool, report in reports.items():
            # If traffic began after this report was made, the next report must follow immediately.
            if report.own.active or pool not in self._awake:
                self._reported_s[pool] = now

    def exchanged(self) -> None:
        """Record that the exchange with the store succeeded in both directions."""
        self._exchanged_s = self._clock()

    def on_peer(self, pool: str, peer: str, age_s: float) -> None:
        """Record that another router was running ``age_s`` seconds ago."""
        self._peers_of(pool).note_alive(self._clock() - age_s, peer)

    def on_report(self, pool: str, peer: str, report: Report, age_s: float) -> None:
        """Apply another router's report, which is ``age_s`` seconds old."""
        known = self._pool(pool)
        plausible = report if known is None else limited(report, known)
        self._peers_of(pool).add_report(self._clock() - age_s, peer, plausible)
        if report.own.active:
            self._on_change(pool)

    def _report(self, now: float, pool: str) -> Report:
        own, peers = self._own(pool), self._peers_of(pool)
        if self._has_exchanged(now):
            # While the store is unreachable, running routers cannot report either.
            peers.expire(now)
        return Report(own=own, pool=peers.live(now, own))

    def _other_routers(self, pool: str) -> Sequence[OtherRouter] | None:
        """Return the other routers' reports, or None before the first exchange with the store."""
        if self._replicated and self._exchanged_s is None:
            return None
        peers = self._peers.get(pool)
        return () if peers is None else peers.others(self._clock())

    def _own(self, pool: str) -> Share:
        for status in self._statuses((pool,)):
            own = self._demand.share(status)
            if not own.active:
                self._awake.discard(pool)
            return own
        return NO_SHARE

    def _arrived(self, pool: str) -> None:
        if pool not in self._awake:
            self._awake.add(pool)
            self._reported_s.pop(pool, None)
            self._on_change(pool)

    def _peers_of(self, pool: str) -> PeerShares:
        peers = self._peers.get(pool)
        if peers is None:
            peers = self._peers[pool] = PeerShares()
        return peers

    def _has_exchanged(self, now: float) -> bool:
        return self._exchanged_s is not None and now - self._exchanged_s <= PEER_TTL_S

    def _must_know(self, now: float, pool: str) -> None:
        if not self._replicated:
            return
        if not self._has_exchanged(now):
            raise DemandUnknown("shared state is unreachable")
        if self._peers_of(pool).incomplete(now):
            raise DemandUnknown(
                "another router does not report its demand, possibly because that router has an older version"
            )


def _ignore_change(_pool: str) -> None:
    """Do nothing, because there is no subscriber to changes."""
