"""A pool's loop: woken by what the watches show, or when the last plan asked to look again, it gathers, plans, applies.

``handlers`` runs one ``Keeper`` for each pool, through ``Keepers``. Whatever goes wrong in a pass ends that pass alone;
the next comes after a pause that grows while things go on failing, or as soon as something changes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dualmap.errors import PoolError
from dualmap_edge.logs import get_logger
from dualmap_operator.act.apply import Sink
from dualmap_operator.decide.observed import Observed, PoolStatus
from dualmap_operator.decide.plan_values import Plan
from dualmap_operator.decide.spec import PoolSpec, read_spec
from dualmap_operator.errors import ApiError, ConflictError
from dualmap_operator.observe.gather import Source
from dualmap_operator.observe.mirror import Key
from dualmap_operator.observe.watches import PoolObject

# Changes come in bursts: a pod that starts changes a dozen times within a second.
DEBOUNCE_S: Final = 0.05
_CONFLICT_S: Final = 0.2
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
# How long our own write may take to show in the watch before we go on without having seen it.
_ECHO_S: Final = 2.0
# How long a pool that is to be drained may be missing from the watch before it counts as gone.
_GONE_S: Final = 60.0
STUCK_S: Final = 60.0
"""A pass that takes longer than this hangs: each of its requests has a timeout far below."""
_STOP_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """What decides: ``plan`` for a spec, and ``refused`` for a pool whose spec cannot be read (generation, error)."""

    plan: Callable[[PoolSpec, Observed, float], Plan]
    refused: Callable[[Observed, int, str, float], Plan]


class KeeperObserver(Protocol):
    """Who keeps count of passes."""

    def waiting(self, change: int) -> None:
        """Note that a pool began (1) or ended (-1) waiting for its pass."""

    def reconciled(self, result: str, seconds: float) -> None:
        """Note a pass: done, refused, conflict or failed."""

    def published(self, pool: str, status: PoolStatus, now_s: float) -> None:
        """Note what the watch shows as a pool's status."""

    def forget(self, pool: str) -> None:
        """Note that a pool is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What keepers share. ``clock`` is monotonic, ``now`` seconds since the epoch; ``turns`` bounds passes at once."""

    pool: Callable[[Key], PoolObject | None]
    planner: Planner
    observer: KeeperObserver
    turns: asyncio.Semaphore
    clock: Callable[[], float]
    now: Callable[[], float]


class Keeper:
    """Keeps the pool of this name and uid; another of the same name is another keeper's."""

    def __init__(self, key: Key, uid: str, *, source: Source, sink: Sink, tools: Tools) -> None:
        self._key = key
        self._uid = uid
        self._source = source
        self._sink = sink
        self._tools = tools
        self._log = get_logger(__name__)
        self._woken = asyncio.Event()
        self._stopping = False
        self._failures: tuple[str, ...] = ()
        self._pause_s = _FIRST_PAUSE_S
        self._echo: tuple[str, float] | None = None
        self._missing_since_s: float | None = None
        self._pass_since_s: float | None = None
        self.finished = asyncio.Event()
        """Set when the pool is being deleted and has drained, or is gone."""

    @property
    def pool_id(self) -> str:
        """``namespace/name``."""
        return "/".join(self._key)

    @property
    def stuck(self) -> bool:
        """Whether the present pass has been going on for too long."""
        return self._pass_since_s is not None and self._tools.clock() - self._pass_since_s > STUCK_S

    def wake(self) -> None:
        """Have a pass made soon."""
        if not self._woken.is_set():
            self._woken.set()
            self._tools.observer.waiting(1)

    def stop(self) -> None:
        """Have ``run`` return after the present pass."""
        self._stopping = True
        self.wake()

    async def run(self) -> None:
        """Make one pass after the other until told to stop."""
        wait_s = 0.0
        try:
            while True:
                await self._rest(wait_s)
                if self._stopping:
                    return
                wait_s = await self._step()
        finally:
            self._take_wake()
            self._tools.observer.forget(self.pool_id)

    async def _rest(self, wait_s: float) -> None:
        """Sleep until woken, at most ``wait_s``, and a moment longer for what comes right after."""
        try:
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        except TimeoutError:
            return
        if not self._stopping:
            await asyncio.sleep(DEBOUNCE_S)

    def _take_wake(self) -> None:
        if self._woken.is_set():
            self._woken.clear()
            self._tools.observer.waiting(-1)

    async def _step(self) -> float:
        """Make a pass if there is a pool to make it over; return in how many seconds to look again."""
        async with self._tools.turns:
            self._take_wake()
            now_s = self._tools.clock()
            pool = self._tools.pool(self._key)
            if pool is None or pool.uid != self._uid:
                return self._missing(now_s)
            self._missing_since_s = None
            if self._echo is not None and self._echo[0] == pool.resource_version and now_s < self._echo[1]:
                return self._echo[1] - now_s  # The watch does not yet show what we have written.
            self._echo = None
            self._pass_since_s = now_s
            try:
                return await self._pass(pool)
            finally:
                self._pass_since_s = None

    def _missing(self, now_s: float) -> float:
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        if now_s - self._missing_since_s >= _GONE_S:
            self.finished.set()
        return _GONE_S

    async def _pass(self, pool: PoolObject) -> float:
        """Gather, plan, apply; return in how many seconds to look again."""
        began_s = self._tools.clock()
        result, wait_s = "failed", self._pause_s
        try:
            self._tools.observer.published(self.pool_id, pool.status, self._tools.now())
            result, wait_s = await self._reconcile(pool)
        except ConflictError:
            result, wait_s = "conflict", _CONFLICT_S
        except ApiError as error:
            self._log.warning("a pass failed, trying again", pool=self.pool_id, error=str(error), pause_s=wait_s)
        except Exception as error:  # noqa: BLE001  # a defect that a pool's state brings out must not end the care for it
            self._log.error("a pass broke", pool=self.pool_id, error=repr(error), pause_s=wait_s)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) if result == "failed" else _FIRST_PAUSE_S
        self._tools.observer.reconciled(result, self._tools.clock() - began_s)
        return wait_s

    async def _reconcile(self, pool: PoolObject) -> tuple[str, float]:
        result, spec, refusal = "done", None, ""
        try:
            spec = read_spec(pool.document)
        except PoolError as error:
            result, refusal = "refused", str(error)
        observed = await self._source.observe(pool, spec, self._failures)
        if spec is None:
            generation = int(pool.document["metadata"].get("generation", 0))
            plan = self._tools.planner.refused(observed, generation, refusal, self._tools.now())
        else:
            plan = self._tools.planner.plan(spec, observed, self._tools.now())
        applied = await self._sink.apply(pool, plan)
        failures = applied.refused
        if applied.wrote_status:
            self._echo = (pool.resource_version, self._tools.clock() + _ECHO_S)
        if plan.finished:
            self.finished.set()
        if failures:
            self._log.warning("the API server refused", pool=self.pool_id, errors=failures, pause_s=self._pause_s)
        before, self._failures = self._failures, failures
        if bool(failures) != bool(before):
            return result, 0.0  # What was refused, or is no more, stands in the status next.
        if failures:
            return "failed", self._pause_s  # Also when the server says it in other words each time.
        again_s = min(plan.again_s, max(0.0, self._source.due_s()))
        return result, min(again_s, _ECHO_S) if applied.wrote_status else again_s


class Keepers:
    """All keepers that run, by pool. ``make`` makes the keeper of a name and uid."""

    def __init__(self, make: Callable[[Key, str], Keeper]) -> None:
        self._make = make
        self._running: defaultdict[Key, list[Keeper]] = defaultdict(list)
        self._log = get_logger(__name__)
        self.closing = asyncio.Event()
        """Set when this operator stops."""

    def wake(self, key: Key) -> None:
        """Wake whoever keeps the pool of this name."""
        for keeper in self._running.get(key, ()):
            keeper.wake()

    def keeps(self, key: Key) -> bool:
        """Whether anybody keeps the pool of this name."""
        return key in self._running

    def stuck(self) -> list[str]:
        """Return the pools whose pass hangs."""
        return [keeper.pool_id for keepers in self._running.values() for keeper in keepers if keeper.stuck]

    async def keep(
        self,
        key: Key,
        uid: str,
        until: Callable[[Keeper], Coroutine[Any, Any, Any]],
        *,
        timeout_s: float | None = None,
    ) -> bool:
        """Run a keeper until ``until`` (of it) returns, ``timeout_s`` has passed, or this operator stops.

        Return whether the pool has drained, or is gone; it has not when the keeper ended by itself.
        """
        keeper = self._make(key, uid)
        self._running[key].append(keeper)
        running = asyncio.create_task(keeper.run())
        ends = [asyncio.create_task(until(keeper)), asyncio.create_task(self.closing.wait())]
        try:
            await asyncio.wait([running, *ends], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            keeper.stop()
            await asyncio.wait([running], timeout=_STOP_S)
        finally:
            for task in (running, *ends):
                task.cancel()
            await asyncio.gather(running, *ends, return_exceptions=True)
            self._running[key].remove(keeper)
            if not self._running[key]:
                del self._running[key]
        if not running.cancelled() and (error := running.exception()) is not None:
            self._log.error("a pool's loop broke", pool=keeper.pool_id, error=repr(error))
        return keeper.finished.is_set()
