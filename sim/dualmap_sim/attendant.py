"""What may watch a simulated cluster while it runs, and change its pool: an interface that ``cluster`` calls.

``autoscaling`` is the one there is. An attendant hears of each router's outcomes when production's server would count
them (``dualmap_extproc.autoscaling.demand``), and it acts by what it schedules on the timeline.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from dualmap.pools.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import FirstToken
from dualmap.router import PoolRouter
from dualmap_sim.timeline import Timeline


class Attendant(Protocol):
    """Who is told what the routers do; ``router`` is the number of the one it is about."""

    def begin(self, timeline: Timeline, routers: Sequence[PoolRouter], publish: Callable[[Pool], None]) -> None:
        """Begin to watch, before anything has happened. ``publish`` gives every router another version of the pool."""

    def routed(self, now: float, router: int, receipt: Receipt) -> None:
        """A request was sent to an instance."""

    def held(self, now: float, router: int) -> None:
        """A request is held for now."""

    def refused(self, now: float, router: int) -> None:
        """A request found no room."""

    def first_token(self, now: float, router: int, first_token: FirstToken) -> None:
        """A router heard of a first token."""
