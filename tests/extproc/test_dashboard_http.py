"""Tests of the dashboard over HTTP: the page, its stream of snapshots, the limit of pages, and snapshot contents."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.resources import files

import aiohttp
import pytest

import builders
from dualmap.engines.profile import EngineProfile
from dualmap.engines.source import SourceState, SourceStatus
from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.pools.pool import KvEvents, MemberState, Model, Pool, Ring, RingAlgorithm, Tokenizer, TokenSource
from dualmap.scaling.reports import Share
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.autoscaling.pool_demand import DemandUnknown
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry.dashboard import feed, routes
from dualmap_extproc.telemetry.dashboard.feed import Feed, TooManyWatchers
from dualmap_extproc.telemetry.dashboard.histories import Histories
from dualmap_extproc.telemetry.dashboard.routes import Dashboard
from dualmap_extproc.telemetry.dashboard.snapshot import SnapshotInputs, Snapshots
from dualmap_extproc.telemetry.dashboard.verdict import Reach
from dualmap_extproc.telemetry.http_status import StatusServer
from dualmap_extproc.telemetry.metrics import Metrics
from waiting import until

HOSTILE = "<img src=x onerror=alert(1)>"
FILES = sorted(each.name for each in (files("dualmap_extproc.telemetry.dashboard") / "static").iterdir())


class Router:
    """A picker with its histories, and the picker's data for the dashboard."""

    def __init__(self, *pools: Pool) -> None:
        self.metrics = Metrics(version="1", replica_id="router-0")
        self.demanded = Demand(clock=lambda: 50.0)
        self.histories = Histories(clock=lambda: 50.0)
        observations = FanOut()
        for subscriber in (self.metrics, self.demanded, self.histories):
            subscriber.subscribe(observations)
        self.picker = Picker(Limits(), observations.report, id_prefix="r")
        self.adopt(*pools)
        self.taken = 0
        self.unknown = ""

    def adopt(self, *pools: Pool) -> None:
        self.metrics.set_pools(pools)
        self.demanded.set_pools(pools)
        self.picker.set_pools(0.0, pools)

    def source(self) -> SnapshotInputs:
        def statuses():
            self.taken += 1
            return self.picker.statuses()

        return SnapshotInputs(
            router="router-0",
            version="1.2.3",
            pools=lambda: self.picker.pools,
            statuses=statuses,
            demand=self.demand,
            histories=self.histories,
            clock=lambda: 1_700_000_000.0,
        )

    def demand(self, pool: str) -> Share:
        if self.unknown:
            raise DemandUnknown(self.unknown)
        return Share(desired_replicas=2.4, in_flight=7, held=1, first_tokens=10, slo_met=9)

    def send(self, content: str, *, model: str = builders.MODEL, session: str = "") -> None:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()
        headers = {"x-session-id": session} if session else {}
        self.picker.pick(50.0, body, None, 50.0, headers=headers, resume=lambda _: None)

    def document(self, pool: str = "") -> dict:
        snapshots = Snapshots(self.source())
        return json.loads(snapshots.tell(snapshots.look(), {pool})[pool])


def server_of(router: Router, *, every_s: float, **timeouts: float) -> StatusServer:
    return StatusServer(
        router="router-0",
        statuses=router.picker.statuses,
        signals=router.demanded.signals,
        metrics=router.metrics,
        dashboard=Dashboard(router.source(), every_s=every_s),
        **timeouts,
    )


@asynccontextmanager
async def serving(router: Router, *, every_s: float = 0.02, **timeouts: float) -> AsyncIterator[aiohttp.ClientSession]:
    server = server_of(router, every_s=every_s, **timeouts)
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield session
    finally:
        await server.close()


async def next_snapshot(response: aiohttp.ClientResponse) -> dict:
    async with asyncio.timeout(30):
        line = await response.content.readline()
        assert await response.content.readline() == b"\n"
    assert line.startswith(b"data: ")
    return json.loads(line.removeprefix(b"data: "))


@pytest.fixture(name="no_room")
def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "WATCHERS", 1)


async def test_dashboard_page_loads_only_files_of_the_router() -> None:
    async with serving(Router(builders.pool(2))) as session, session.get("/") as response:
        page = await response.text()
        assert response.status == 200
        assert response.content_type == "text/html"
        policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=|https?://|=\"/", page), "all of it from here"
    named = set(re.findall(r'(?:src|href)="dashboard/([^"]+)"', page))
    assert {"app.js", "style.css", "icon.svg"} <= named <= set(FILES)


@pytest.mark.parametrize("name", FILES)
async def test_dashboard_files_are_served_and_import_no_other_files(name: str) -> None:
    async with serving(Router(builders.pool(2))) as session:
        async with session.get(f"/dashboard/{name}") as response:
            text = await response.text()
            assert response.status == 200
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "Content-Security-Policy" in response.headers
            tag = response.headers["ETag"]
        async with session.get(f"/dashboard/{name}", headers={"If-None-Match": tag}) as response:
            assert (response.status, await response.read()) == (304, b"")
    imported = set(re.findall(r'from "\./([^"]+)"', text))
    assert imported <= set(FILES)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert len(text.splitlines()) < 400


@pytest.mark.parametrize("path", ["/dashboard/", "/dashboard/feed.py", "/dashboard/..%2Ffeed.py", "/dashboard/none.js"])
async def test_dashboard_returns_404_for_unknown_paths(path: str) -> None:
    async with serving(Router(builders.pool(1))) as session, session.get(path) as response:
        assert response.status == 404


@pytest.mark.parametrize("path", ["/", "/events", "/dashboard/app.js"])
async def test_dashboard_rejects_writing_methods(path: str) -> None:
    async with serving(Router(builders.pool(1))) as session, session.post(path) as response:
        assert response.status == 405


async def test_dashboard_stream_sends_later_snapshots_with_new_decisions() -> None:
    router = Router(builders.pool(3))
    async with serving(router) as session, session.get("/events") as response:
        assert response.content_type == "text/event-stream"
        first = await next_snapshot(response)
        router.send("hello " * 200)
        while not (last := await next_snapshot(response))["pool"]["decisions"]:
            pass
    assert first["pool"]["decisions"] == []
    (decision,) = last["pool"]["decisions"]
    assert decision["chosen"] in decision["pair"]
    assert set(decision["pair"]) <= set(last["pool"]["endpoints"]["id"])
    assert decision["reason"]
    assert sum(last["pool"]["endpoints"]["in_flight"]) == 1
    assert last["pool"]["minute"]["requests"] == 1


async def test_dashboard_stream_stays_open_beyond_the_idle_timeout() -> None:
    async with serving(Router(builders.pool(3)), idle_timeout_s=0.05) as session, session.get("/events") as response:
        await next_snapshot(response)
        url = session._base_url
        assert url is not None
        # The idle timeout closes this later connection, so it has also passed for the stream.
        idle, writer = await asyncio.open_connection(url.host, url.port)
        async with asyncio.timeout(30):
            assert await idle.read() == b""
        writer.close()
        before = (await next_snapshot(response))["pools"]
        assert (await next_snapshot(response))["pools"] == before


async def test_dashboard_without_open_pages_creates_no_snapshots() -> None:
    router = Router(builders.pool(2))
    watched = Feed(Snapshots(router.source()), every_s=0.001)
    await asyncio.sleep(0.01)
    assert router.taken == 0
    with watched.watching("") as watcher:
        await watcher.next()
    taken = router.taken
    await asyncio.sleep(0.05)
    assert router.taken == taken > 0


async def test_dashboard_closed_page_ends_its_stream() -> None:
    router = Router(builders.pool(2))
    dashboard = Dashboard(router.source(), every_s=0.02)
    server = StatusServer(
        router="router-0",
        statuses=router.picker.statuses,
        signals=router.demanded.signals,
        metrics=router.metrics,
        dashboard=dashboard,
    )
    port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/events") as response:
        await next_snapshot(response)
    await until(lambda: not dashboard._feed._watchers)
    await server.close()


async def test_dashboard_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_WRITE_TIMEOUT_S", 0.1)
    router = Router(builders.pool(200))
    dashboard = Dashboard(router.source(), every_s=0.001)
    server = StatusServer(
        router="router-0",
        statuses=router.picker.statuses,
        signals=router.demanded.signals,
        metrics=router.metrics,
        dashboard=dashboard,
        stalled_timeout_s=3600.0,
    )
    port = await server.start("127.0.0.1", 0)
    with socket.socket() as page:
        page.setblocking(False)
        page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(page, ("127.0.0.1", port))
        await loop.sock_sendall(page, b"GET /events HTTP/1.1\r\nHost: router\r\n\r\n")
        await until(lambda: bool(dashboard._feed._watchers))
        await until(lambda: not dashboard._feed._watchers)
        connections = server._runner.server
        assert connections is not None
        await until(lambda: not connections.connections)
    await server.close()


async def test_dashboard_pages_share_a_snapshot_per_second() -> None:
    router = Router(builders.pool(2))
    watched = Feed(Snapshots(router.source()), every_s=0.01)
    with watched.watching("") as one, watched.watching("") as another:
        assert await one.next() is await another.next()
        assert router.taken == 1


async def test_dashboard_reconnects_create_no_additional_snapshots() -> None:
    router = Router(builders.pool(2))
    watched = Feed(Snapshots(router.source()), every_s=3600)
    with watched.watching("") as watcher:
        assert await watcher.next()
    for _ in range(5):
        with watched.watching("") as watcher:
            await asyncio.sleep(0.01)
    assert router.taken == 1


async def test_dashboard_slow_page_gets_only_the_newest_snapshot() -> None:
    router = Router(builders.pool(2))
    watched = Feed(Snapshots(router.source()), every_s=0.005)
    with watched.watching("") as watcher, watched.watching("") as quick:
        for _ in range(20):
            newest = await quick.next()
        assert await watcher.next() is newest
        watcher.close()
        assert await watcher.next() is None


async def test_dashboard_pages_above_the_limit_are_rejected(no_room: None) -> None:
    async with serving(Router(builders.pool(1))) as session, session.get("/events") as response:
        await next_snapshot(response)
        async with session.get("/events") as refused:
            assert refused.status == 503
            assert refused.headers["Retry-After"]
            assert "too many" in await refused.text()
        async with session.get("/pools") as pools:
            assert pools.status == 200


async def test_dashboard_closed_page_allows_a_new_page_at_the_limit(no_room: None) -> None:
    watched = Feed(Snapshots(Router(builders.pool(1)).source()))
    with watched.watching(""), pytest.raises(TooManyWatchers), watched.watching(""):
        pass
    with watched.watching("") as watcher:
        assert await watcher.next()


async def test_dashboard_failed_snapshot_ends_all_streams(caplog: pytest.LogCaptureFixture) -> None:
    router = Router(builders.pool(1))
    source = router.source()

    def fails():
        raise ValueError("planted")

    watched = Feed(Snapshots(replace(source, statuses=fails)), every_s=0.01)
    with watched.watching("") as watcher:
        assert await watcher.next() is None
        assert isinstance(watched._sending.exception(), ValueError)


async def test_dashboard_stop_ends_all_streams() -> None:
    server = server_of(Router(builders.pool(1)), every_s=3600)
    port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/events") as response:
        await next_snapshot(response)
        await server.close()
        # The stream ends properly; an aborted stream would raise an error.
        assert await response.content.read() == b""


def test_snapshot_shows_the_requested_pool_and_lists_all_pools() -> None:
    other = replace(builders.pool(2), name="other", model=Model(name="o"))
    router = Router(builders.pool(3), other)
    assert router.document("")["pool"]["name"] == "llm/qwen"
    document = router.document("llm/other")
    assert (document["pool"]["name"], document["asked"]) == ("llm/other", "llm/other")
    assert [each["pool"] for each in document["pools"]] == ["llm/qwen", "llm/other"]
    assert router.document("llm/gone")["pool"] is None
    assert Router().document()["pools"] == []


def test_snapshot_shows_demand_over_all_routers() -> None:
    router = Router(builders.pool(3))
    assert router.document()["pool"]["all_routers"] == {"wanted": 2.4, "in_flight": 7, "held": 1, "attainment": 0.9}
    router.unknown = "shared state is unreachable"
    pool = router.document()["pool"]
    assert pool["all_routers"] is None
    assert "unreachable" in pool["verdict"]["problems"][0]["text"]


def test_snapshot_shows_a_rejection_with_its_reason() -> None:
    router = Router(builders.pool(0))
    router.send("hello")
    (refused,) = router.document()["pool"]["decisions"]
    assert (refused["refused"], refused["number"]) == ("no_endpoint", 0)
    assert refused["at"] == 1_700_000_000.0


def test_snapshot_shows_version_or_problem_of_engines() -> None:
    router = Router(builders.pool(4))
    for member, profile in (
        ("m-0", EngineProfile(version="0.32.0")),
        ("m-1", EngineProfile(version="0.32.0", asleep=True)),
        ("m-2", EngineProfile(reason="x" * 500)),
        ("m-3", EngineProfile(models=("other",), mismatch="serves [other], not m")),
    ):
        router.picker.on_profile(0.0, "llm/qwen", member, profile)
    columns = router.document()["pool"]["endpoints"]
    assert columns["engine"] == ["0.32.0", "asleep", "unknown", "unknown"]
    assert columns["engine_problem"][3] == "serves [other], not m"
    assert columns["ring_1"][3] == 0.0
    assert columns["engine_problem"][:2] == ["", "the engine is asleep"]
    assert len(columns["engine_problem"][2]) == 120
    assert columns["ring_1"][1] == 0.0


def test_snapshot_shows_state_and_problem_of_kv_events() -> None:
    pool = builders.pool(3)
    tokenizer = Tokenizer(source=TokenSource.RENDERER, url="http://renderer:8000")
    router = Router(replace(pool, engine=replace(pool.engine, tokenizer=tokenizer, kv_events=KvEvents(enabled=True))))
    for member, status in (
        ("m-0", SourceStatus(state=SourceState.LIVE)),
        ("m-1", SourceStatus(state=SourceState.FAILED, reason="x" * 500)),
    ):
        router.picker.on_kv_events("llm/qwen", member, 0, (), status)
    columns = router.document()["pool"]["endpoints"]
    assert columns["events"] == ["Live", "Failed", ""]
    assert [len(each) for each in columns["events_problem"]] == [0, 120, 0]
    router.picker.on_profile(0.0, "llm/qwen", "m-2", EngineProfile(publishes=False))
    columns = router.document()["pool"]["endpoints"]
    assert (columns["events"][2], columns["events_problem"][2]) == ("Off", "the engine reports no KV events")


@pytest.mark.parametrize("algorithm", list(RingAlgorithm))
def test_snapshot_ring_shares_equal_the_shares_of_keys(algorithm: RingAlgorithm) -> None:
    pool = builders.pool(4)
    light = replace(pool.members[0], weight=25, state=MemberState.JOINING)
    draining = replace(pool.members[3], state=MemberState.DRAINING)
    routing = replace(pool.routing, ring=Ring(algorithm=algorithm))
    router = Router(replace(pool, members=(light, *pool.members[1:3], draining), routing=routing))
    columns = router.document()["pool"]["endpoints"]
    for ring in ("ring_1", "ring_2"):
        shares = columns[ring]
        assert sum(shares) == pytest.approx(1.0, abs=0.002)
        assert shares[3] == 0.0
        assert shares[0] == pytest.approx(25 / 225, rel=0.5)


def test_snapshot_shows_kv_fetches_and_a_lost_kv_store_of_its_pool_only() -> None:
    store = KvStore(type=StoreType.MOONCAKE, endpoint="http://127.0.0.1:9003")
    router = Router(replace(builders.pool(2), kv_store=store), replace(builders.pool(2), name="other"))
    snapshots = Snapshots(replace(router.source(), reach=lambda pool: Reach(kv_store_lost=pool == "llm/qwen")))
    wanted = ("llm/qwen", "llm/other")
    documents = snapshots.tell(snapshots.look(), wanted)
    found = [json.loads(documents[name])["pool"] for name in wanted]
    assert [pool["fetches_kv"] for pool in found] == [True, False]
    assert ["KV store fails" in str(pool["verdict"]["problems"]) for pool in found] == [True, False]


def test_snapshot_ring_shares_update_with_the_members() -> None:
    router = Router(builders.pool(2))
    snapshots = Snapshots(router.source())

    def shares() -> list[float]:
        return json.loads(snapshots.tell(snapshots.look(), {""})[""])["pool"]["endpoints"]["ring_1"]

    assert shares() == [0.5, 0.5]
    router.adopt(builders.pool(4))
    assert shares() == [0.25] * 4


def test_snapshot_has_no_prompts_sessions_or_addresses() -> None:
    pool = builders.pool(2)
    router = Router(pool)
    router.send("a very secret prompt " * 100, session="secret-session")
    router.send("hello", model="no-such-secret-model")
    text = json.dumps(router.document())
    assert router.document()["pool"]["decisions"]
    assert "secret" not in text
    assert not any(member.address in text for member in pool.members)
    assert "hash" not in text


def test_snapshot_contains_a_hostile_name_unchanged() -> None:
    pool = replace(builders.pool(2), model=Model(name=HOSTILE))
    assert Router(pool).document()["pool"]["model"] == HOSTILE
