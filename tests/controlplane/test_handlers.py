"""Tests of kopf's settings: the longest time of a deletion, and the objects that kopf must not watch or write."""

import asyncio
import itertools
from typing import Any

import kopf
import pytest

from controlplane.fake_kube import Clock
from controlplane.operator_objects import pool_body
from dualmap_edge.kube.client import Connection
from dualmap_operator.run.handlers import longest_drain_s, make_registry, make_settings
from dualmap_operator.run.reconciler import Reconcilers


def deleted(**spec: Any) -> dict[str, Any]:
    body = pool_body(**spec)
    # The deletion time is long ago, as if no operator ran at the deletion.
    body["metadata"]["deletionTimestamp"] = "2000-01-01T00:00:00Z"
    return {"apiVersion": "serving.dualmap.dev/v1alpha1", "kind": "InferencePool", **body}


class FakeReconciler:
    """A reconciler that drains, fails, or continues, as the test sets."""

    def __init__(self, how: str) -> None:
        self.pool_id = "llm/qwen"
        self.finished = asyncio.Event()
        self._how = how
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        if self._how == "breaks":
            raise RuntimeError("a defect")
        if self._how == "drains":
            self.finished.set()
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


async def no_connection() -> Connection:
    raise AssertionError("no test logs in here")


class Scene:
    def __init__(self, how: str) -> None:
        self.clock = Clock()
        self.reconcilers = Reconcilers(lambda *_: FakeReconciler(how))  # type: ignore[arg-type,return-value]  # stands for it
        registry = make_registry(self.reconcilers, self.clock, connection=no_connection)
        (self._drain,) = registry._changing.get_all_handlers()
        (self._keep,) = registry._spawning.get_all_handlers()
        self._memo = kopf.Memo()

    async def drain(self, **spec: Any) -> None:
        await self._drain.fn(namespace="llm", name="qwen", uid="u", body=deleted(**spec), memo=self._memo)

    async def keep(self) -> None:
        await self._keep.fn(namespace="llm", name="qwen", uid="u", stopped=FakeStopped())


class FakeStopped:
    """kopf's stop signal of a daemon, which is never set."""

    def __bool__(self) -> bool:
        return False

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def test_drain_handler_returns_after_pool_is_drained() -> None:
    await Scene("drains").drain()


@pytest.mark.parametrize("how", ["breaks", "goes on"])
async def test_drain_handler_retries_interrupted_drain(how: str) -> None:
    scene = Scene(how)
    scene.reconcilers.closing.set()

    with pytest.raises(kopf.TemporaryError, match="has not drained yet"):
        await scene.drain()


async def test_drain_handler_returns_after_the_deadline() -> None:
    scene = Scene("breaks")
    for waited_s in (0.0, 89.9):
        scene.clock.now_s += waited_s
        with pytest.raises(kopf.TemporaryError):
            await scene.drain(drain={"timeout": "1m"})

    scene.clock.now_s += 0.2
    await scene.drain(drain={"timeout": "1m"})


async def test_daemon_restarts_an_ended_reconciler() -> None:
    with pytest.raises(kopf.TemporaryError, match="is restarted"):
        await Scene("breaks").keep()


def test_longest_drain_is_drain_timeout_plus_grace_period() -> None:
    assert longest_drain_s(deleted(drain={"timeout": "1m"})) == 60 + 30
    assert longest_drain_s(deleted()) == 600 + 30
    assert longest_drain_s(deleted(workload={})) == 600 + 30, "a spec that cannot be read"


def test_kopf_settings_use_own_finalizer_and_no_extra_requests() -> None:
    settings = make_settings()

    assert settings.persistence.finalizer == "serving.dualmap.dev/drain"
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    # The API accepts only whole seconds.
    assert isinstance(settings.watching.server_timeout, int)


def test_kopf_settings_retry_api_errors_without_limit() -> None:
    backoffs = make_settings().networking.error_backoffs

    assert not isinstance(backoffs, float)
    assert max(itertools.islice(backoffs, 10_000)) == 2.0


def test_kopf_registry_handles_only_pools() -> None:
    registry = make_registry(  # type: ignore[arg-type,return-value]  # unused
        Reconcilers(lambda *_: None), Clock(), connection=no_connection
    )
    registries = (registry._indexing, registry._watching, registry._spawning, registry._changing)
    selectors = {selector for each in registries for selector in each.get_all_selectors()}

    assert {(each.group, each.version, each.any_name) for each in selectors} == {
        ("serving.dualmap.dev", "v1alpha1", "inferencepools")
    }
