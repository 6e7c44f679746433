"""Everything a pass may look at, put together: what the watches show, what routers and engines say, what is counted.

One ``Gatherer`` for each pool, owned by its ``keeper``. What it remembers between passes (looks in a row, the window of
traffic, the last spec that could be read) may be lost at any time: a drain then takes a second longer.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from dualmap_operator.decide import drain
from dualmap_operator.decide.observed import Observed, RingMember, RouterReport
from dualmap_operator.decide.spec import PoolSpec
from dualmap_operator.decide.traffic import TrafficWindow
from dualmap_operator.observe.routers import Routers
from dualmap_operator.observe.status_clients import EngineClient, RouterClient
from dualmap_operator.observe.watches import PoolObject, Watches

_REST_S: Final = 15.0
_SYNC_S: Final = 1.0
# A little less than the plan's own pace, so that each of its looks is one.
_DRAIN_S: Final = 0.4


class Source(Protocol):
    """Where a keeper gets what it sees from."""

    async def observe(self, pool: PoolObject, spec: PoolSpec | None, failures: tuple[str, ...]) -> Observed:
        """Return what there is to see of ``pool`` now; ``spec`` is None where it cannot be read."""

    def due_s(self) -> float:
        """Return in how many seconds there will be something to ask."""


class Gatherer:
    """Gathers for the pool ``namespace/name``. ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        pool_id: str,
        *,
        watches: Watches,
        routers: Routers,
        router_client: RouterClient,
        engine_client: EngineClient,
        clock: Callable[[], float],
    ) -> None:
        self._pool_id = pool_id
        self._watches = watches
        self._routers = routers
        self._router_client = router_client
        self._engine_client = engine_client
        self._clock = clock
        self._asked_at_s: float | None = None
        self._pace_s = _REST_S
        self._reports: tuple[RouterReport, ...] = ()
        self._engine_requests: dict[str, int | None] = {}
        self._idle_looks: dict[str, int] = {}
        self._traffic: TrafficWindow | None = None
        self._spec: PoolSpec | None = None

    async def observe(self, pool: PoolObject, spec: PoolSpec | None, failures: tuple[str, ...]) -> Observed:
        """Return what there is to see of ``pool`` now, having asked routers and engines if it is time to."""
        spec = self._spec = spec or self._spec
        if self._traffic is None:
            self._traffic = TrafficWindow(published=pool.status.traffic)
        draining = drain.draining(pool.status)
        # A member that was taken back has had requests since: its next drain begins anew.
        self._idle_looks = {each.id: self._idle_looks[each.id] for each in draining if each.id in self._idle_looks}
        observed = self._observed(self._traffic, pool, spec, failures)
        self._pace_s = self._pace(observed, bool(draining))
        if self.due_s() > 0:
            return observed
        await self._ask(self._traffic, spec, draining)
        observed = self._observed(self._traffic, pool, spec, failures)
        self._idle_looks = {
            member.id: self._idle_looks.get(member.id, 0) + 1 if drain.idle(member, observed) else 0
            for member in draining
        }
        return replace(observed, idle_looks=self._idle_looks)

    def due_s(self) -> float:
        """Return in how many seconds routers are to be asked again; not more than 0 for now."""
        if self._asked_at_s is None:
            return 0.0
        return self._asked_at_s + self._pace_s - self._clock()

    def _pace(self, observed: Observed, draining: bool) -> float:
        if draining:
            return _DRAIN_S
        version = observed.published.ring_version
        return _SYNC_S if any(drain.behind(each, version) for each in self._reports if each.ready) else _REST_S

    async def _ask(self, traffic: TrafficWindow, spec: PoolSpec | None, draining: tuple[RingMember, ...]) -> None:
        self._asked_at_s = self._clock()
        engine_type = "" if spec is None else spec.engine.type
        answers, self._engine_requests = await asyncio.gather(
            self._router_client.reports(self._pool_id, self._routers.addresses()),
            self._ask_engines(engine_type, draining),
        )
        self._reports = tuple(report for report, _ in answers)
        for report, totals in answers:
            if totals is not None:
                traffic.add(self._clock(), report.router, totals)

    async def _ask_engines(self, engine_type: str, members: tuple[RingMember, ...]) -> dict[str, int | None]:
        counts = await asyncio.gather(
            *(self._engine_client.requests(engine_type, each.address, each.port) for each in members)
        )
        return {member.id: count for member, count in zip(members, counts, strict=True)}

    def _observed(
        self, traffic: TrafficWindow, pool: PoolObject, spec: PoolSpec | None, failures: tuple[str, ...]
    ) -> Observed:
        metadata = pool.document["metadata"]
        key = (metadata["namespace"], metadata["name"])
        highest = self._watches.highest_version(pool.uid)
        members = {each.id for each in pool.status.members}
        return Observed(
            published=pool.status,
            statefulset=self._watches.statefulset(key, pool.uid),
            # A pod that crashed or is gone leaves the ring, readable or not what the pool is to be.
            pods=self._watches.pods_left(key, members) if spec is None else self._watches.pods_of(spec),
            routers=self._reports,
            engine_requests=self._engine_requests,
            idle_looks=self._idle_looks,
            traffic=traffic.shown(self._clock()),
            deleting="deletionTimestamp" in metadata,
            failures=failures,
            lost_claims=self._watches.lost_claims(key),
            version_floor=max((highest, *(each.ring_version for each in self._reports if each.heard))),
        )
