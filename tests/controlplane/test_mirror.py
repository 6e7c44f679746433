"""Tests that the mirror of a collection has exactly the server's objects."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.fake_kube import Clock, Counts, FakeKube, until
from dualmap_edge.kube import watch as watch_module
from dualmap_edge.kube.client import KubeError
from dualmap_operator.observe.mirror import WATCH_POLICY, Key, Mirror

PATH = "/api/v1/pods"


def body(name: str, version: str = "1", **fields: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "llm", "name": name, "resourceVersion": version}, **fields}


def listing(*bodies: dict[str, Any], version: str = "10", page: str = "") -> dict[str, Any]:
    return {"metadata": {"resourceVersion": version, "continue": page}, "items": list(bodies)}


class Scene:
    def __init__(self) -> None:
        self.kube = FakeKube()
        self.counts = Counts()
        self.clock = Clock()
        self.told: list[tuple[Key, Any, Any]] = []
        self.mirror: Mirror[Any] = Mirror(
            self.kube,  # type: ignore[arg-type]  # stands for it
            self.counts,
            kind="Pod",
            path=PATH,
            read=lambda read: read.get("colour", "grey"),
            listener=lambda *change: self.told.append(change),
            clock=self.clock,
            selector="app=vllm",
            policy=replace(WATCH_POLICY, first_pause_s=0.001),
        )

    @property
    def objects(self) -> dict[str, str]:
        return {name: value for (_, name), value in self.mirror.items()}


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def started(scene: Scene) -> asyncio.Task[None]:
    return asyncio.create_task(scene.mirror.run())


async def test_mirror_lists_all_pages_then_watches_from_last_version(scene: Scene) -> None:
    scene.kube.answer("GET", PATH, listing(body("a"), page="next"), listing(body("b", colour="blue"), version="12"))
    _running = started(scene)
    await scene.mirror.listed.wait()

    assert scene.objects == {"a": "grey", "b": "blue"}
    assert [request.query.get("continue") for request in scene.kube.requests] == [None, "next"]
    await scene.kube.watching.wait()
    assert scene.kube.watches[0].query == {"labelSelector": "app=vllm", "resourceVersion": "12"}


async def test_mirror_event_calls_listener_with_old_and_new_value(scene: Scene) -> None:
    scene.kube.answer("GET", PATH, listing(body("a")))
    _running = started(scene)
    await scene.mirror.listed.wait()
    scene.told.clear()

    scene.kube.event("MODIFIED", body("a", "11", colour="red"))
    scene.kube.event("ADDED", body("b", "12"))
    scene.kube.event("MODIFIED", body("b", "13", unread="field"))
    scene.kube.event("DELETED", body("a", "14"))
    await until(lambda: "a" not in scene.objects)

    assert scene.objects == {"b": "grey"}
    # The third event changed no field that the operator reads.
    assert scene.told == [
        (("llm", "a"), "grey", "red"),
        (("llm", "b"), None, "grey"),
        (("llm", "a"), "red", None),
    ]


async def test_mirror_removes_an_object_missing_in_the_next_list(scene: Scene) -> None:
    scene.kube.answer("GET", PATH, listing(body("a"), body("b")), listing(body("b"), version="99"))
    _running = started(scene)
    await scene.mirror.listed.wait()
    scene.told.clear()

    scene.kube.break_watch(KubeError(410, "too old resource version"))
    await until(lambda: len(scene.kube.watches) == 2)

    assert scene.objects == {"b": "grey"}
    assert scene.told == [(("llm", "a"), "grey", None)]
    assert scene.kube.watches[1].query["resourceVersion"] == "99"


async def test_mirror_resumes_from_last_version_after_broken_connection(scene: Scene) -> None:
    scene.kube.answer("GET", PATH, listing(body("a")))
    _running = started(scene)
    await scene.mirror.listed.wait()

    scene.kube.event("BOOKMARK", {"metadata": {"resourceVersion": "77"}})
    scene.kube.break_watch(KubeError(0, "cut"))
    await until(lambda: len(scene.kube.watches) == 2)

    assert scene.kube.watches[1].query["resourceVersion"] == "77"
    assert len(scene.kube.requests) == 1, "listed once"


async def test_mirror_keeps_objects_if_the_response_is_no_list(scene: Scene) -> None:
    scene.kube.answer("GET", PATH, listing(body("a")), {"message": "a proxy's"}, listing(body("b"), version="99"))
    _running = started(scene)
    await scene.mirror.listed.wait()
    scene.told.clear()

    scene.kube.break_watch(KubeError(410, "too old resource version"))
    await until(lambda: len(scene.kube.watches) == 2)

    assert scene.told == [(("llm", "a"), "grey", None), (("llm", "b"), None, "grey")]
    assert scene.counts.requests == [("LIST", 200), ("WATCH", 200), ("LIST", 0), ("LIST", 200), ("WATCH", 200)]


async def test_mirror_waits_for_a_missing_resource_kind(scene: Scene) -> None:
    scene.kube.answer("GET", PATH, KubeError(404, "no such kind"), KubeError(0, "away"), listing(body("a")))
    _running = started(scene)
    await scene.mirror.listed.wait()

    assert scene.objects == {"a": "grey"}
    assert scene.counts.requests[:3] == [("LIST", 404), ("LIST", 0), ("LIST", 200)]


async def test_mirror_age_counts_from_the_last_server_response(scene: Scene) -> None:
    scene.kube.answer("GET", PATH, listing(body("a")))
    _running = started(scene)
    await scene.mirror.listed.wait()
    scene.clock.now_s += 40
    assert scene.mirror.age_s == 40

    scene.kube.event("BOOKMARK", {"metadata": {"resourceVersion": "78"}})
    await until(lambda: scene.mirror.age_s == 0)


@pytest.fixture
def pauses(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the mirror's pauses instead of sleeping."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def no_sleep(delay_s: float) -> None:
        slept.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(watch_module, "asyncio", SimpleNamespace(sleep=no_sleep))
    return slept


async def test_mirror_backs_off_after_rejected_watches(scene: Scene, pauses: list[float]) -> None:
    scene.kube.answer("GET", PATH, listing(body("a")))
    for _ in range(6):
        scene.kube.break_watch(KubeError(503, "overloaded"))
    _running = started(scene)
    await until(lambda: len(pauses) == 6)

    assert pauses == [0.001 * 2**number for number in range(6)]
    scene.kube.event("BOOKMARK", {"metadata": {"resourceVersion": "78"}})
    scene.kube.break_watch(KubeError(503, "overloaded"))
    await until(lambda: len(pauses) == 7)
    assert pauses[6] == 0.001, "it was let watch meanwhile"


async def test_mirror_pause_equals_retry_after_of_the_response(scene: Scene, pauses: list[float]) -> None:
    scene.kube.answer("GET", PATH, KubeError(429, "too many", retry_after_s=7.0), listing(body("a")))
    scene.kube.break_watch(KubeError(429, "too many", retry_after_s=9.0))
    _running = started(scene)
    await until(lambda: len(pauses) == 2)

    assert pauses == [7.0, 9.0]


async def test_mirror_age_resets_at_watch_end_but_grows_in_silence(scene: Scene, pauses: list[float]) -> None:
    scene.kube.answer("GET", PATH, listing(body("a")))
    _running = started(scene)
    await scene.kube.watching.wait()
    scene.clock.now_s += 45
    scene.kube.break_watch(None)
    await until(lambda: len(scene.kube.watches) == 2)
    assert scene.mirror.age_s == 0
    assert pauses == []

    scene.clock.now_s += 55
    scene.kube.break_watch(KubeError(0, "a watch fell silent"))
    await until(lambda: len(scene.kube.watches) == 3)
    assert scene.mirror.age_s == 55
    assert len(scene.kube.requests) == 1, "listed once"


async def test_mirror_pauses_after_a_short_watch(scene: Scene, pauses: list[float]) -> None:
    scene.kube.answer("GET", PATH, listing(body("a")))
    scene.kube.break_watch(None)
    _running = started(scene)
    await until(lambda: len(scene.kube.watches) == 2)

    assert pauses == [0.001]
