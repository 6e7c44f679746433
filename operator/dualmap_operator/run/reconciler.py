"""The reconcile loop of one pool: observe, plan and apply after each change and after the last plan's interval.

``handlers`` runs one ``Reconciler`` for each pool, through ``Reconcilers``. A failure ends only the current reconcile.
The next reconcile starts after a backoff that grows with each consecutive failure, or earlier if a watched object
changes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dualmap.errors import PoolError
from dualmap_edge.logs import get_logger
from dualmap_operator.act.apply import PlanApplier
from dualmap_operator.decide.observed import Observed, PoolStatus
from dualmap_operator.decide.plan_values import Plan
from dualmap_operator.decide.spec import PoolSpec, read_spec
from dualmap_operator.errors import ApiError, ConflictError
from dualmap_operator.observe.gather import PoolObserver
from dualmap_operator.observe.mirror import Key
from dualmap_operator.observe.watches import PoolObject

# The pause before a reconcile, which collects bursts of changes: a starting pod changes a dozen times within a second.
DEBOUNCE_S: Final = 0.05
_CONFLICT_S: Final = 0.2
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
# The longest wait until the operator's own status write appears in the watch.
_ECHO_S: Final = 2.0
# A draining pool counts as deleted if it is missing from the watch for this time.
_GONE_S: Final = 60.0
STUCK_S: Final = 60.0
"""A reconcile that takes longer is stuck: each request of a reconcile has a much shorter timeout."""
_STOP_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The decision functions: ``plan`` for a valid spec; ``refused`` for an invalid spec (generation, error)."""

    plan: Callable[[PoolSpec, Observed, float], Plan]
    refused: Callable[[Observed, int, str, float], Plan]


class ReconcileMetrics(Protocol):
    """The metrics of reconciles."""

    def waiting(self, change: int) -> None:
        """Record that a pool entered (1) or left (-1) the queue."""

    def reconciled(self, result: str, seconds: float) -> None:
        """Record one reconcile with its duration and result: done, refused, conflict or failed."""

    def published(self, pool: str, status: PoolStatus, now_s: float) -> None:
        """Record a pool's status from the watch."""

    def forget(self, pool: str) -> None:
        """Remove a pool that no longer exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilerContext:
    """The values that all reconcilers share.

    ``clock`` is monotonic; ``now`` returns seconds since the epoch. ``slots`` limits the number of concurrent
    reconciles.
    """

    pool: Callable[[Key], PoolObject | None]
    planner: Planner
    metrics: ReconcileMetrics
    slots: asyncio.Semaphore
    clock: Callable[[], float]
    now: Callable[[], float]


class Reconciler:
    """Reconciles the pool with this name and uid; a recreated pool with the same name has its own reconciler."""

    def __init__(
        self, key: Key, uid: str, *, observer: PoolObserver, applier: PlanApplier, context: ReconcilerContext
    ) -> None:
        self._key = key
        self._uid = uid
        self._observer = observer
        self._applier = applier
        self._context = context
        self._log = get_logger(__name__)
        self._woken = asyncio.Event()
        self._stopping = False
        self._failures: tuple[str, ...] = ()
        self._pause_s = _FIRST_PAUSE_S
        self._echo: tuple[str, float] | None = None
        self._missing_since_s: float | None = None
        self._running_since_s: float | None = None
        self.finished = asyncio.Event()
        """Set when the pool is being deleted and has drained, or no longer exists."""

    @property
    def pool_id(self) -> str:
        """``namespace/name``."""
        return "/".join(self._key)

    @property
    def stuck(self) -> bool:
        """True if the present reconcile has run for longer than STUCK_S."""
        return self._running_since_s is not None and self._context.clock() - self._running_since_s > STUCK_S

    def wake(self) -> None:
        """Queue a reconcile."""
        if not self._woken.is_set():
            self._woken.set()
            self._context.metrics.waiting(1)

    def stop(self) -> None:
        """Make ``run`` return after the present reconcile."""
        self._stopping = True
        self.wake()

    async def run(self) -> None:
        """Reconcile periodically until ``stop``."""
        wait_s = 0.0
        try:
            while True:
                await self._wait(wait_s)
                if self._stopping:
                    return
                wait_s = await self._reconcile_if_present()
        finally:
            self._dequeue()
            self._context.metrics.forget(self.pool_id)

    async def _wait(self, wait_s: float) -> None:
        """Sleep until ``wake``, at most ``wait_s``; after ``wake``, wait ``DEBOUNCE_S`` for further changes."""
        try:
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        except TimeoutError:
            return
        if not self._stopping:
            await asyncio.sleep(DEBOUNCE_S)

    def _dequeue(self) -> None:
        if self._woken.is_set():
            self._woken.clear()
            self._context.metrics.waiting(-1)

    async def _reconcile_if_present(self) -> float:
        """Reconcile if the pool exists; return the seconds until the next reconcile."""
        async with self._context.slots:
            self._dequeue()
            now_s = self._context.clock()
            pool = self._context.pool(self._key)
            if pool is None or pool.uid != self._uid:
                return self._missing(now_s)
            self._missing_since_s = None
            if self._echo is not None and self._echo[0] == pool.resource_version and now_s < self._echo[1]:
                return self._echo[1] - now_s  # The watch does not contain the last status write yet.
            self._echo = None
            self._running_since_s = now_s
            try:
                return await self._reconcile_safely(pool)
            finally:
                self._running_since_s = None

    def _missing(self, now_s: float) -> float:
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        if now_s - self._missing_since_s >= _GONE_S:
            self.finished.set()
        return _GONE_S

    async def _reconcile_safely(self, pool: PoolObject) -> float:
        """Reconcile once and handle every failure; return the seconds until the next reconcile."""
        began_s = self._context.clock()
        result, wait_s = "failed", self._pause_s
        try:
            self._context.metrics.published(self.pool_id, pool.status, self._context.now())
            result, wait_s = await self._reconcile(pool)
        except ConflictError:
            result, wait_s = "conflict", _CONFLICT_S
        except ApiError as error:
            self._log.warning("Reconcile failed", pool=self.pool_id, error=str(error), retry_after_s=wait_s)
        except Exception as error:  # noqa: BLE001  # a defect that one state exposes must not end the pool's loop
            self._log.error(
                "Reconcile failed with an unexpected error",
                pool=self.pool_id,
                error=repr(error),
                retry_after_s=wait_s,
            )
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) if result == "failed" else _FIRST_PAUSE_S
        self._context.metrics.reconciled(result, self._context.clock() - began_s)
        return wait_s

    async def _reconcile(self, pool: PoolObject) -> tuple[str, float]:
        """Observe, plan and apply; return the result and the seconds until the next reconcile."""
        result, spec, refusal = "done", None, ""
        try:
            spec = read_spec(pool.document)
        except PoolError as error:
            result, refusal = "refused", str(error)
        observed = await self._observer.observe(pool, spec, self._failures)
        if spec is None:
            generation = int(pool.document["metadata"].get("generation", 0))
            plan = self._context.planner.refused(observed, generation, refusal, self._context.now())
        else:
            plan = self._context.planner.plan(spec, observed, self._context.now())
        applied = await self._applier.apply(pool, plan)
        failures = applied.refused
        if applied.wrote_status:
            self._echo = (pool.resource_version, self._context.clock() + _ECHO_S)
        if plan.finished:
            self.finished.set()
        if failures:
            self._log.warning(
                "Applying a part of the plan failed",
                pool=self.pool_id,
                errors=failures,
                retry_after_s=self._pause_s,
            )
        before, self._failures = self._failures, failures
        if bool(failures) != bool(before):
            return result, 0.0  # The next reconcile publishes the change in the Degraded condition.
        if failures:
            return "failed", self._pause_s  # The backoff applies even if the error text differs each time.
        wait_s = min(plan.requeue_after_s, max(0.0, self._observer.due_s()))
        return result, min(wait_s, _ECHO_S) if applied.wrote_status else wait_s


class Reconcilers:
    """All running reconcilers, by pool. ``make`` creates the reconciler for a pool's name and uid."""

    def __init__(self, make: Callable[[Key, str], Reconciler]) -> None:
        self._make = make
        self._running: defaultdict[Key, list[Reconciler]] = defaultdict(list)
        self._log = get_logger(__name__)
        self.closing = asyncio.Event()
        """Set when this operator stops."""

    def wake(self, key: Key) -> None:
        """Queue a reconcile of the pool with this name."""
        for reconciler in self._running.get(key, ()):
            reconciler.wake()

    def is_running(self, key: Key) -> bool:
        """Return whether the pool with this name has a reconciler."""
        return key in self._running

    def stuck(self) -> list[str]:
        """Return the pools whose current reconcile is stuck."""
        return [each.pool_id for reconcilers in self._running.values() for each in reconcilers if each.stuck]

    async def run(
        self,
        key: Key,
        uid: str,
        until: Callable[[Reconciler], Coroutine[Any, Any, Any]],
        *,
        timeout_s: float | None = None,
    ) -> bool:
        """Run a reconciler until ``until(reconciler)`` returns, ``timeout_s`` has passed, or this operator stops.

        Return whether the pool has drained or no longer exists; False if the reconciler ended unexpectedly.
        """
        reconciler = self._make(key, uid)
        self._running[key].append(reconciler)
        running = asyncio.create_task(reconciler.run())
        ends = [asyncio.create_task(until(reconciler)), asyncio.create_task(self.closing.wait())]
        try:
            await asyncio.wait([running, *ends], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            reconciler.stop()
            await asyncio.wait([running], timeout=_STOP_S)
        finally:
            for task in (running, *ends):
                task.cancel()
            await asyncio.gather(running, *ends, return_exceptions=True)
            self._running[key].remove(reconciler)
            if not self._running[key]:
                del self._running[key]
        if not running.cancelled() and (error := running.exception()) is not None:
            self._log.error("Reconciler ended unexpectedly", pool=reconciler.pool_id, error=repr(error))
        return reconciler.finished.is_set()
