"""The interface through which ``cluster`` reports its events, and an observer may change the pool.

``autoscaling`` implements it. An observer receives each router's outcomes at the time at which the production server
counts them (``dualmap_extproc.autoscaling.demand``). It acts by scheduling calls on the timeline.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from dualmap.pools.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import FirstToken
from dualmap.router import PoolRouter
from dualmap_sim.timeline import Timeline


class ClusterObserver(Protocol):
    """Receives the routers' events; ``router`` is the number of the router."""

    def begin(self, timeline: Timeline, routers: Sequence[PoolRouter], publish: Callable[[Pool], None]) -> None:
        """Start before the first event. ``publish`` gives every router a new version of the pool."""

    def routed(self, now: float, router: int, receipt: Receipt) -> None:
        """A request was sent to an instance."""

    def held(self, now: float, router: int) -> None:
        """A request was queued."""

    def refused(self, now: float, router: int) -> None:
        """A request was rejected."""

    def first_token(self, now: float, router: int, first_token: FirstToken) -> None:
        """A first token was reported to a router."""
