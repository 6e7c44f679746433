"""A new version of the pools, handed to all who must know: to metrics, to discovery, and then to the picker.

Envoys are told first. Nearly always the picker follows at once, and a pick that reaches an Envoy a millisecond before
the endpoint does is served by another member (PROTOCOLS section 1). But where requests wait and no member that Envoy
knows is left, there is no other: the picker then follows when Envoys must have heard.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from dualmap.pools.pool import Pool
from dualmap_extproc.envoy.discovery.service import Discovery
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.telemetry.metrics import Metrics

# A push is applied by every worker of an idle Envoy within 2 ms (PROTOCOLS section 1); a busy one may take longer.
# Requests that waited for an instance to start do not notice.
NOTICE_S: Final = 0.25


class Adoption:
    """Takes the pools as they are now, as often as they change."""

    def __init__(self, metrics: Metrics, discovery: Discovery, picker: Picker) -> None:
        self._metrics = metrics
        self._discovery = discovery
        self._picker = picker
        self._pools: Sequence[Pool] = ()
        self._due: asyncio.TimerHandle | None = None

    def adopt(self, pools: Sequence[Pool]) -> None:
        """Serve these pools from now on."""
        self._pools = pools
        self._metrics.set_pools(pools)
        self._discovery.publish(pools)
        if not self._must_wait():
            self._tell_picker()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(NOTICE_S, self._tell_picker)

    def _must_wait(self) -> bool:
        """Whether requests wait that would be sent to an endpoint as soon as Envoy hears of it."""
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

    def _tell_picker(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._picker.set_pools(asyncio.get_running_loop().time(), self._pools)
