"""Applies each new version of the pools to metrics, demand, Envoy's and engines' discovery, and then to the picker.

Envoy gets the new version first. Usually the picker gets the new version immediately after Envoy. If a pick names an
endpoint that Envoy does not have yet, Envoy sends the request to another member.

In one case there is no other member: the pool has queued requests, and Envoy has no member of the new version. In this
case, the picker gets the new version after a delay, in which Envoy applies the version.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from dualmap.pools.pool import Pool
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.engines.kv_events import KvEvents
from dualmap_extproc.engines.profiles import EngineProfiles
from dualmap_extproc.envoy.discovery.service import Discovery
from dualmap_extproc.kv_stores.stores import KvStores
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_extproc.tokens.sources import PoolTokenizers

# Every worker of an idle Envoy applies a push within 2 ms; a busy Envoy takes longer. The delay is negligible for
# requests that waited for a member to start.
NOTICE_S: Final = 0.25


class Adoption:
    """The component that applies every version of the pools, first to Envoy and then to the picker."""

    def __init__(
        self,
        metrics: Metrics,
        demand: Demand,
        discovery: Discovery,
        engines: EngineProfiles,
        tokenizers: PoolTokenizers,
        kv_stores: KvStores,
        kv_events: KvEvents,
        picker: Picker,
    ) -> None:
        self._metrics = metrics
        self._demand = demand
        self._discovery = discovery
        self._engines = engines
        self._tokenizers = tokenizers
        self._kv_stores = kv_stores
        self._kv_events = kv_events
        self._picker = picker
        self._pools: Sequence[Pool] = ()
        self._due: asyncio.TimerHandle | None = None

    def adopt(self, pools: Sequence[Pool]) -> None:
        """Apply a new version of the pools."""
        self._pools = pools
        self._metrics.set_pools(pools)
        self._demand.set_pools(pools)
        self._discovery.publish(pools)
        self._tokenizers.set_pools(pools)
        self._kv_stores.set_pools(pools)
        if not self._must_wait():
            self._set_picker_pools()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(NOTICE_S, self._set_picker_pools)

    def _must_wait(self) -> bool:
        """Return whether the router would send queued requests to an endpoint that Envoy does not have yet."""
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
        # After the picker, which ignores profiles of members that it does not know.
        self._engines.set_pools(self._pools)
        # After the picker, which forgets the blocks of a member's earlier process.
        self._kv_events.set_pools(self._pools)
