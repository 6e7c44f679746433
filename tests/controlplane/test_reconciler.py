"""Tests of a pool's reconcile loop: its triggers, its handling of each kind of failure, and its end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from controlplane.fake_kube import until
from controlplane.operator_objects import KEY, pool_object
from dualmap_operator.act.apply import Applied
from dualmap_operator.decide.observed import Observed, PoolStatus
from dualmap_operator.decide.plan_values import Plan
from dualmap_operator.decide.spec import PoolSpec
from dualmap_operator.errors import ApiError, ConflictError
from dualmap_operator.observe.watches import PoolObject
from dualmap_operator.run import reconciler as reconciler_module
from dualmap_operator.run.reconciler import Planner, Reconciler, ReconcilerContext, Reconcilers

UID = "pool-uid"
LONG_S = 1000.0


class Scene:
    """A reconciler with a scripted source, planner and sink that record their calls."""

    def __init__(self) -> None:
        self.pool: PoolObject | None = pool_object()
        self.requeue_after_s = LONG_S
        self.finished = False
        self.observed: list[tuple[str, ...]] = []
        self.refusals: list[tuple[int, str]] = []
        self.plans: list[Plan] = []
        self.outcomes: list[Applied | Exception] = []
        self.results: list[str] = []
        self.published_pools: list[str] = []
        self.waits = 0
        self.forgotten: list[str] = []
        self.applying: Callable[[], Any] = lambda: None
        self.reconciler = self.make(KEY, UID)

    def make(self, key: tuple[str, str], uid: str) -> Reconciler:
        context = ReconcilerContext(
            pool=lambda _: self.pool,
            planner=Planner(plan=self._plan, refused=self._refused),
            metrics=self,
            slots=asyncio.Semaphore(1),
            clock=asyncio.get_running_loop().time,
            now=lambda: 0.0,
        )
        return Reconciler(key, uid, observer=self, applier=self, context=context)

    async def observe(self, pool: PoolObject, spec: PoolSpec | None, failures: tuple[str, ...]) -> Observed:
        self.observed.append(failures)
        return Observed(published=pool.status, failures=failures)

    def due_s(self) -> float:
        return LONG_S

    async def apply(self, pool: PoolObject, plan: Plan) -> Applied:
        self.plans.append(plan)
        self.applying()
        outcome = self.outcomes.pop(0) if self.outcomes else Applied()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _plan(self, spec: PoolSpec, observed: Observed, now_s: float) -> Plan:
        return Plan(status=PoolStatus(), requeue_after_s=self.requeue_after_s, finished=self.finished)

    def _refused(self, observed: Observed, generation: int, error: str, now_s: float) -> Plan:
        self.refusals.append((generation, error))
        return Plan(status=PoolStatus(), requeue_after_s=self.requeue_after_s)

    def waiting(self, change: int) -> None:
        self.waits += change

    def reconciled(self, result: str, seconds: float) -> None:
        self.results.append(result)

    def published(self, pool: str, status: PoolStatus, now_s: float) -> None:
        self.published_pools.append(pool)

    def forget(self, pool: str) -> None:
        self.forgotten.append(pool)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@contextlib.asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(scene.reconciler.run())
    yield task
    scene.reconciler.stop()
    await task


async def test_reconciler_runs_at_start_and_at_each_event(scene: Scene) -> None:
    async with running(scene):
        await until(lambda: len(scene.results) == 1)
        scene.reconciler.wake()
        await until(lambda: len(scene.results) == 2)

    assert scene.results == ["done", "done"]
    assert scene.published_pools[0] == "llm/qwen"
    assert scene.forgotten == ["llm/qwen"]
    assert scene.waits == 0


async def test_simultaneous_events_cause_one_reconcile(scene: Scene) -> None:
    async with running(scene):
        await until(lambda: len(scene.results) == 1)
        for _ in range(10):
            scene.reconciler.wake()
            await asyncio.sleep(0)
        assert scene.waits == 1
        await until(lambda: len(scene.results) == 2)
        assert scene.waits == 0
        await asyncio.sleep(3 * reconciler_module.DEBOUNCE_S)

    assert len(scene.results) == 2


async def test_reconciler_requeues_after_the_delay_in_the_plan(scene: Scene) -> None:
    scene.requeue_after_s = 0.001
    async with running(scene):
        await until(lambda: len(scene.results) == 3)


async def test_event_during_reconcile_causes_a_second_reconcile(scene: Scene) -> None:
    scene.applying = lambda: scene.reconciler.wake() if len(scene.plans) == 1 else None
    async with running(scene):
        await until(lambda: len(scene.results) == 2)


async def test_reconciler_waits_until_the_watch_shows_its_own_write(scene: Scene) -> None:
    scene.outcomes = [Applied(wrote_status=True)]
    scene.requeue_after_s = 0.001
    async with running(scene):
        await until(lambda: len(scene.plans) == 1)
        scene.reconciler.wake()
        await asyncio.sleep(3 * reconciler_module.DEBOUNCE_S)
        assert len(scene.plans) == 1, "the pool is as it was before the write"

        scene.pool = pool_object(version="2")
        scene.reconciler.wake()
        await until(lambda: len(scene.plans) >= 2)


async def test_reconciler_continues_if_the_watch_never_shows_its_write(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler_module, "_ECHO_S", 0.01)
    scene.outcomes = [Applied(wrote_status=True)]
    async with running(scene):
        await until(lambda: len(scene.plans) == 2)


async def test_reconciler_retries_soon_after_a_conflict(scene: Scene) -> None:
    scene.outcomes = [ConflictError("changed", status=409)]
    async with running(scene):
        await until(lambda: len(scene.results) == 2)

    assert scene.results == ["conflict", "done"]


@pytest.mark.parametrize("error", [ApiError("away"), ValueError("a defect")])
async def test_reconciler_backs_off_after_failures_and_continues(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(reconciler_module, "_FIRST_PAUSE_S", 0.01)
    scene.reconciler = scene.make(KEY, UID)
    scene.outcomes = [error, error, error]
    pauses: list[float] = []
    async with running(scene):
        while len(scene.results) < 4:
            count = len(scene.results)
            await until(lambda count=count: len(scene.results) > count)
            pauses.append(scene.reconciler._pause_s)

    assert scene.results == ["failed", "failed", "failed", "done"]
    assert pauses == [0.02, 0.04, 0.08, 0.01]


async def test_event_ends_the_backoff_after_a_failed_reconcile(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler_module, "_FIRST_PAUSE_S", LONG_S)
    scene.reconciler = scene.make(KEY, UID)
    scene.outcomes = [ApiError("away")]
    async with running(scene):
        await until(lambda: scene.results == ["failed"])
        scene.reconciler.wake()
        await until(lambda: scene.results == ["failed", "done"])


async def test_reconciler_passes_apply_failures_to_next_reconcile_only(scene: Scene) -> None:
    scene.outcomes = [Applied(refused=("no",)), Applied()]
    async with running(scene):
        await until(lambda: len(scene.observed) == 3)

    assert scene.observed == [(), ("no",), ()]


async def test_reconciler_backs_off_if_apply_errors_differ(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler_module, "_FIRST_PAUSE_S", 0.01)
    scene.reconciler = scene.make(KEY, UID)
    scene.outcomes = [Applied(refused=(f"request {number} failed",)) for number in range(4)]
    async with running(scene):
        await until(lambda: len(scene.results) >= 5)

    assert scene.results[:5] == ["done", "failed", "failed", "failed", "done"]


async def test_reconciler_rejects_invalid_spec_and_still_plans(scene: Scene) -> None:
    scene.pool = pool_object(workload={})
    async with running(scene):
        await until(lambda: len(scene.results) == 1)

    ((generation, error),) = scene.refusals
    assert generation == 1
    assert "spec.workload" in error
    assert scene.results == ["refused"]
    assert len(scene.plans) == 1


async def test_reconciler_finishes_after_the_pool_is_drained(scene: Scene) -> None:
    scene.finished = True
    async with running(scene):
        await scene.reconciler.finished.wait()


async def test_reconciler_ignores_pool_with_another_uid(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler_module, "_GONE_S", 0.01)
    scene.pool = pool_object(uid="another")
    async with running(scene):
        await scene.reconciler.finished.wait()

    assert scene.plans == []


async def test_reconciler_reports_a_long_reconcile_as_stuck(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler_module, "STUCK_S", -1.0)
    states: list[bool] = []
    scene.applying = lambda: states.append(scene.reconciler.stuck)
    async with running(scene):
        await until(lambda: len(scene.results) == 1)

    assert states == [True]
    assert not scene.reconciler.stuck


async def test_reconcilers_run_until_the_end_condition(scene: Scene) -> None:
    reconcilers = Reconcilers(scene.make)
    end = asyncio.Event()

    async def ended(_reconciler: Reconciler) -> None:
        await end.wait()

    keeping = asyncio.create_task(reconcilers.run(KEY, UID, ended))
    await until(lambda: len(scene.results) == 1)
    assert reconcilers.is_running(KEY)
    reconcilers.wake(KEY)
    reconcilers.wake(("llm", "other"))
    await until(lambda: len(scene.results) == 2)

    end.set()
    await keeping
    assert not reconcilers.is_running(KEY)
    assert scene.forgotten == ["llm/qwen"]


async def test_reconcilers_return_if_the_pool_has_drained(scene: Scene) -> None:
    scene.finished = True

    async def drained(reconciler: Reconciler) -> None:
        await reconciler.finished.wait()

    assert await Reconcilers(scene.make).run(KEY, UID, drained)


async def test_reconcilers_end_on_stop_or_timeout(scene: Scene) -> None:
    reconcilers = Reconcilers(scene.make)

    async def never(_reconciler: Reconciler) -> None:
        await asyncio.Event().wait()

    assert not await reconcilers.run(KEY, UID, never, timeout_s=0.01)
    keeping = asyncio.create_task(reconcilers.run(KEY, UID, never))
    await until(lambda: reconcilers.is_running(KEY))
    reconcilers.closing.set()
    await keeping

    assert not reconcilers.is_running(KEY)
