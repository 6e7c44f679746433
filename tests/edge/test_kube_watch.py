"""Tests of the list-watch loop: the content of the store, and recovery from every kind of server failure."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dualmap_edge.kube import watch as watch_module
from dualmap_edge.kube.client import KubeClient, KubeError, Page, WatchEvent
from dualmap_edge.kube.watch import Collection, Reflector, WatchPolicy
from kube_api import KubeApi, kube_api, pool_body
from waiting import WAIT_S, until

RESUME = WatchPolicy(resume=True, timeout_s=30.0, inactivity_s=40.0, first_pause_s=1.0, longest_pause_s=8.0)
RELIST = WatchPolicy(first_pause_s=1.0, longest_pause_s=8.0)
GONE = KubeError(410, "too old resource version")
CUT = KubeError(0, "connection reset")


def body(name: str, version: str = "1") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": version}}


def listed(*names: str, version: str = "10") -> list[Page]:
    return [Page(objects=[body(name) for name in names], version=version)]


def event(kind: str, name: str, version: str) -> WatchEvent:
    return WatchEvent(kind, body(name, version))


BOOKMARK = WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": "77"}})
END = None
Step = WatchEvent | KubeError | float | None


@dataclass
class Server:
    """A ``ListerWatcher`` that uses the next script for each list and each watch; a float in a watch's script advances
    the time.

    A watch without a script stays open.
    """

    lists: deque[list[Page] | KubeError] = field(default_factory=deque)
    watches: deque[Sequence[Step]] = field(default_factory=deque)
    asked: list[str] = field(default_factory=list)
    limits: list[tuple[float, float]] = field(default_factory=list)
    now_s: float = 1000.0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def pages(self) -> AsyncGenerator[Page, None]:
        self.asked.append("list")
        answer = self.lists.popleft() if len(self.lists) > 1 else self.lists[0]
        if isinstance(answer, KubeError):
            raise answer
        for page in answer:
            yield page

    async def watch(self, version: str, *, timeout_s: float, inactivity_s: float) -> AsyncGenerator[WatchEvent, None]:
        self.asked.append(f"watch {version}")
        self.limits.append((timeout_s, inactivity_s))
        if not self.watches:
            self.idle.set()
            await asyncio.Event().wait()
        for step in self.watches.popleft():
            match step:
                case None:
                    return
                case KubeError():
                    raise step
                case float():
                    self.now_s += step
                case _:
                    yield step


@dataclass
class Names:
    """A store of names."""

    names: set[str] = field(default_factory=set)
    replaced: int = 0

    def replace(self, objects: Sequence[str]) -> None:
        self.replaced += 1
        self.names = set(objects)

    def put(self, item: str) -> None:
        self.names.add(item)

    def remove(self, item: str) -> None:
        self.names.discard(item)


def read(body: Mapping[str, Any]) -> str:
    return str(body["metadata"]["name"])


@dataclass
class Scene:
    server: Server
    store: Names
    pauses: list[float]
    failures: list[KubeError]
    reflector: Reflector[str]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the loop's pauses in seconds instead of sleeping."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def no_sleep(delay_s: float) -> None:
        slept.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(watch_module, "asyncio", SimpleNamespace(sleep=no_sleep))
    return slept


@pytest.fixture
def scene(pauses: list[float]) -> Scene:
    return make(pauses, RESUME)


def make(pauses: list[float], policy: WatchPolicy) -> Scene:
    server, store, failures = Server(lists=deque([listed("a", "b")])), Names(), list[KubeError]()
    reflector = Reflector(
        server,
        store,
        kind="Pod",
        read=read,
        policy=policy,
        clock=lambda: server.now_s,
        on_failure=failures.append,
    )
    return Scene(server, store, pauses, failures, reflector)


async def run(scene: Scene) -> None:
    """Run the loop until it has used every script and a watch stays open."""
    running = asyncio.create_task(scene.reflector.run())
    try:
        async with asyncio.timeout(WAIT_S):
            await scene.server.idle.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_list_of_several_pages_replaces_the_store_once(scene: Scene) -> None:
    scene.server.lists = deque([[*listed("a", version="9"), *listed("b", version="10")]])
    await run(scene)
    assert (scene.store.names, scene.store.replaced) == ({"a", "b"}, 1)
    assert scene.server.asked == ["list", "watch 10"]


async def test_watch_sends_the_timeouts_of_its_policy(scene: Scene) -> None:
    await run(scene)
    assert scene.server.limits == [(30.0, 40.0)]


async def test_watch_events_change_the_store(scene: Scene) -> None:
    scene.server.watches.append([event("ADDED", "c", "11"), event("MODIFIED", "a", "12"), event("DELETED", "b", "13")])
    await run(scene)
    assert scene.store.names == {"a", "c"}
    assert scene.failures == []


async def test_deletion_between_list_and_watch_is_applied(scene: Scene) -> None:
    scene.server.watches.append([event("DELETED", "b", "11"), 5.0, END])
    await run(scene)
    assert scene.store.names == {"a"}
    assert scene.server.asked == ["list", "watch 10", "watch 11"]


async def test_deletion_without_open_watch_is_found_by_the_next_list(scene: Scene) -> None:
    scene.server.lists = deque([listed("a", "b"), listed("a", version="90")])
    scene.server.watches.append([GONE])
    await run(scene)
    assert scene.store.names == {"a"}
    assert scene.server.asked == ["list", "watch 10", "list", "watch 90"]


async def test_watch_event_of_unknown_type_is_ignored(scene: Scene) -> None:
    scene.server.watches.append([event("RENAMED", "c", "11"), 5.0, END])
    await run(scene)
    assert scene.store.names == {"a", "b"}


async def test_bookmark_advances_the_resource_version(scene: Scene) -> None:
    scene.server.watches.append([BOOKMARK, 5.0, END])
    await run(scene)
    assert scene.server.asked == ["list", "watch 10", "watch 77"]
    assert scene.store.names == {"a", "b"}


@pytest.mark.parametrize("policy", [RESUME, RELIST])
async def test_expired_resource_version_causes_a_new_list(pauses: list[float], policy: WatchPolicy) -> None:
    scene = make(pauses, policy)
    scene.server.watches.append([BOOKMARK, GONE])
    await run(scene)
    assert scene.server.asked == ["list", "watch 10", "list", "watch 10"]
    assert [error.expired for error in scene.failures] == [True]


async def test_broken_watch_resumes_from_the_last_version(scene: Scene) -> None:
    scene.server.watches.append([event("ADDED", "c", "11"), CUT])
    await run(scene)
    assert scene.server.asked == ["list", "watch 10", "watch 11"]
    assert scene.store.names == {"a", "b", "c"}


async def test_broken_watch_without_resume_option_lists_again(pauses: list[float]) -> None:
    scene = make(pauses, RELIST)
    scene.server.watches.append([event("ADDED", "c", "11"), CUT])
    await run(scene)
    assert scene.server.asked == ["list", "watch 10", "list", "watch 10"]
    assert scene.store.names == {"a", "b"}


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
async def test_rejected_watch_causes_a_new_list_and_keeps_the_store(scene: Scene, status: int) -> None:
    scene.server.watches.append([KubeError(status, "refused")])
    await run(scene)
    assert scene.server.asked == ["list", "watch 10", "list", "watch 10"]
    assert scene.store.names == {"a", "b"}


async def test_failed_list_keeps_the_store(scene: Scene) -> None:
    scene.server.lists = deque([listed("a"), KubeError(0, "a list without a version"), listed("c", version="90")])
    scene.server.watches.append([GONE])
    await run(scene)
    assert scene.server.asked == ["list", "watch 10", "list", "list", "watch 90"]
    assert (scene.store.names, scene.store.replaced) == ({"c"}, 2)


async def test_backoff_pauses_double_up_to_the_longest(scene: Scene) -> None:
    scene.server.watches.extend([[CUT]] * 6)
    await run(scene)
    assert scene.pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


async def test_backoff_grows_while_lists_succeed_but_watches_fail(scene: Scene) -> None:
    scene.server.watches.extend([[KubeError(403, "forbidden")]] * 4)
    await run(scene)
    assert scene.pauses == [1.0, 2.0, 4.0, 8.0]


async def test_backoff_resets_after_a_list_succeeds_again(scene: Scene) -> None:
    away = KubeError(0, "away")
    scene.server.lists = deque([away, away, listed("a")])
    scene.server.watches.append([CUT])
    await run(scene)
    assert scene.pauses == [1.0, 2.0, 1.0]


@pytest.mark.parametrize("word", [BOOKMARK, event("ADDED", "c", "11")])
async def test_backoff_resets_after_a_watch_event(scene: Scene, word: WatchEvent) -> None:
    scene.server.watches.extend([[CUT], [CUT], [word, CUT]])
    await run(scene)
    assert scene.pauses == [1.0, 2.0, 1.0]


async def test_backoff_is_at_least_the_retry_after_of_the_server(scene: Scene) -> None:
    scene.server.watches.append([KubeError(429, "too many", retry_after_s=7.0)])
    await run(scene)
    assert scene.pauses == [7.0]


def test_backoff_jitter_is_the_configured_random_share() -> None:
    policy = WatchPolicy(first_pause_s=2.0, longest_pause_s=8.0, jitter=0.5)
    drawn = [policy.pause_s(2) for _ in range(200)]
    assert 2.0 <= min(drawn) < 2.5
    assert 3.5 < max(drawn) <= 4.0
    assert policy.pause_s(5000) <= 8.0


async def test_short_watch_is_followed_by_a_backoff_pause(scene: Scene) -> None:
    scene.server.watches.extend([[0.5, END], [5.0, END]])
    await run(scene)
    assert scene.pauses == [1.0]
    assert scene.failures == []


async def test_watch_age_counts_from_the_last_server_message(scene: Scene) -> None:
    ages: list[float] = []
    scene.reflector._on_failure = lambda _: ages.append(scene.reflector.age_s)
    silent = KubeError(0, "a watch fell silent")
    scene.server.watches.extend([[5.0, BOOKMARK, 3.0, CUT], [55.0, silent], [45.0, END], [2.0, CUT]])
    await run(scene)
    assert ages == [3.0, 58.0, 2.0]


async def test_failure_callback_that_raises_ends_the_watch_loop(scene: Scene) -> None:
    def refuse(error: KubeError) -> None:
        raise error

    scene.reflector._on_failure = refuse
    scene.server.watches.append([KubeError(403, "forbidden")])
    with pytest.raises(KubeError, match="forbidden"):
        await scene.reflector.run()


async def test_log_has_a_line_per_new_failure_and_at_recovery(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dualmap_edge")
    scene.server.watches.extend([[CUT], [CUT], [GONE], [KubeError(403, "forbidden")], [BOOKMARK, 5.0, END]])
    await run(scene)
    lines = [(record.getMessage(), record.__dict__["details"].get("error")) for record in caplog.records]
    failed = "Kubernetes list or watch failed, keeping known objects"
    assert lines == [
        (failed, "connection reset"),
        (failed, "403 forbidden"),
        ("Kubernetes watch recovered", None),
    ]


class TestCollection:
    """Test the loop with ``KubeClient`` and an HTTP server."""

    @pytest.fixture
    async def api(self, tmp_path: Any) -> AsyncIterator[KubeApi]:
        async with kube_api(tmp_path) as api:
            yield api

    async def follow(self, api: KubeApi, policy: WatchPolicy, store: Names) -> tuple[KubeClient, asyncio.Task[Any]]:
        client = await KubeClient.connect(api.kubeconfig)
        path = "/apis/serving.dualmap.dev/v1alpha1/namespaces/llm/inferencepools"
        loop = asyncio.get_running_loop()
        reflector = Reflector(
            Collection(client, path), store, kind="InferencePool", read=read, policy=policy, clock=loop.time
        )
        return client, asyncio.create_task(reflector.run())

    async def holds(self, store: Names, *names: str) -> None:
        await until(lambda: store.names == set(names))

    @pytest.mark.parametrize("resume", [True, False])
    async def test_watches_recover_after_disconnect_expiry_and_silence(self, api: KubeApi, resume: bool) -> None:
        policy = WatchPolicy(resume=resume, timeout_s=30.0, inactivity_s=0.2, first_pause_s=0.01)
        store = Names()
        await api.put(pool_body("a"))
        client, running = await self.follow(api, policy, store)
        try:
            await self.holds(store, "a")
            api.cut_watches()
            await api.put(pool_body("b"))
            await self.holds(store, "a", "b")
            api.fall_silent()
            await api.delete(pool_body("a"))
            await self.holds(store, "b")
            await api.delete(pool_body("b"))
            await api.forget()
            api.cut_watches()
            await self.holds(store)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()
