"""The interface to observe the events of ``cluster`` and to change its pool.

``autoscaling`` implements the interface. The observer receives each router's outcomes at the moment when a production
router counts them (``dualmap_extproc.autoscaling.demand``). An observer acts by scheduling calls on the timeline.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from dualmap.pools.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import FirstToken
from dualmap.shared_router import Router
from dualmap_sim.timeline import Timeline


class ClusterObserver(Protocol):
    """Receives the routers' events. ``router`` is the number of the router."""

    def begin(self, timeline: Timeline, routers: Sequence[Router], publish: Callable[[Pool], None]) -> None:
        """Start before the first event. ``publish`` sends a new version of the pool to every router."""

    def routed(self, now: float, router: int, receipt: Receipt) -> None:
        """Receive the event that a request was sent to an instance."""

    def held(self, now: float, router: int) -> None:
        """Receive the event that a request was queued."""

    def refused(self, now: float, router: int) -> None:
        """Receive the event that a request was rejected."""

    def first_token(self, now: float, router: int, first_token: FirstToken) -> None:
        """Receive the event that a first token was reported to a router."""
