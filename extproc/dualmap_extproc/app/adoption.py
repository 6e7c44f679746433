"""Applies a new version of the pools to metrics, autoscaling demand and discovery, and then to the picker.

Envoys get it first. Usually the picker follows at once: a pick that reaches Envoy a millisecond before its endpoint is
served by another member. Where requests are queued and Envoy knows no member of the new version, there is no other
member: then the picker follows once Envoys have applied the version.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from dualmap.pools.pool import Pool
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.envoy.discovery.service import Discovery
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.telemetry.metrics import Metrics

# Every worker of an idle Envoy applies a push within 2 ms; a busy Envoy takes longer. Requests that waited for a member
# to start do not notice the delay.
NOTICE_S: Final = 0.25


class Adoption:
    """Applies every version of the pools."""

    def __init__(self, metrics: Metrics, demand: Demand, discovery: Discovery, picker: Picker) -> None:
        self._metrics = metrics
        self._demand = demand
        self._discovery = discovery
        self._picker = picker
        self._pools: Sequence[Pool] = ()
        self._due: asyncio.TimerHandle | None = None

    def adopt(self, pools: Sequence[Pool]) -> None:
        """Serve these pools from now on."""
        self._pools = pools
        self._metrics.set_pools(pools)
        self._demand.set_pools(pools)
        self._discovery.publish(pools)
        if not self._must_wait():
            self._set_picker_pools()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(NOTICE_S, self._set_picker_pools)

    def _must_wait(self) -> bool:
        """Return whether queued requests would be sent to an endpoint that Envoy does not know yet."""
        waiting = {
            status.pool: {endpoint.endpoint for endpoint in status.endpoints}
            for status in self._picker.statuses()
            if status.held
        }
        return any(
            pool.members and waiting[pool.id].isdisjoint(member.endpoint for member in pool.members)
            for pool in self._pools
            if pool.id in waiting
        )

    def _set_picker_pools(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._picker.set_pools(asyncio.get_running_loop().time(), self._pools)
