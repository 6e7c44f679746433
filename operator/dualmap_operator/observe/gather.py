"""Collects one pool's observed state for a reconcile: watches, reports of routers and engines, traffic totals.

Each pool's reconciler owns one ``Gatherer``. A ``Gatherer`` stores the number of consecutive idle checks, the traffic
window and the last valid spec. A restart of the operator loses this state; a drain then takes a second longer.
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
# A little shorter than the plan's interval, so that every reconcile sends requests.
_DRAIN_S: Final = 0.4


class PoolObserver(Protocol):
    """Observes one pool for its reconciler."""

    async def observe(self, pool: PoolObject, spec: PoolSpec | None, failures: tuple[str, ...]) -> Observed:
        """Return the observed state of ``pool``; ``spec`` is None if the spec cannot be read."""

    def due_s(self) -> float:
        """Return the seconds until the next request to the routers."""


class Gatherer:
    """Collects the state of the pool ``pool_id`` (``namespace/name``). ``clock`` is monotonic, in seconds."""

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
        self._interval_s = _REST_S
        self._reports: tuple[RouterReport, ...] = ()
        self._engine_requests: dict[str, int | None] = {}
        self._idle_checks: dict[str, int] = {}
        self._traffic: TrafficWindow | None = None
        self._spec: PoolSpec | None = None

    async def observe(self, pool: PoolObject, spec: PoolSpec | None, failures: tuple[str, ...]) -> Observed:
        """Return the observed state of ``pool``; send requests to routers and engines if the interval has passed."""
        spec = self._spec = spec or self._spec
        if self._traffic is None:
            self._traffic = TrafficWindow(published=pool.status.traffic)
        draining = drain.draining(pool.status)
        # A member that became Active again may have new requests: its next drain starts with zero idle checks.
        self._idle_checks = {each.id: self._idle_checks[each.id] for each in draining if each.id in self._idle_checks}
        observed = self._observed(self._traffic, pool, spec, failures)
        self._interval_s = self._interval(observed, bool(draining))
        if self.due_s() > 0:
            return observed
        await self._ask(self._traffic, spec, draining)
        observed = self._observed(self._traffic, pool, spec, failures)
        self._idle_checks = {
            member.id: self._idle_checks.get(member.id, 0) + 1 if drain.idle(member, observed) else 0
            for member in draining
        }
        return replace(observed, idle_checks=self._idle_checks)

    def due_s(self) -> float:
        """Return the seconds until the next request to the routers; 0 or less means now."""
        if self._asked_at_s is None:
            return 0.0
        return self._asked_at_s + self._interval_s - self._clock()

    def _interval(self, observed: Observed, draining: bool) -> float:
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
            # If the spec cannot be read, crashed and deleted pods still leave the ring.
            pods=self._watches.pods_left(key, members) if spec is None else self._watches.pods_of(spec),
            routers=self._reports,
            engine_requests=self._engine_requests,
            idle_checks=self._idle_checks,
            traffic=traffic.shown(self._clock()),
            deleting="deletionTimestamp" in metadata,
            failures=failures,
            lost_claims=self._watches.lost_claims(key),
            unreserved=self._watches.unreserved(key),
            prefill_problem=self._watches.prefill_problem(key),
            version_floor=max((highest, *(each.ring_version for each in self._reports if each.answered))),
        )
