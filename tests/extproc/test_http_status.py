import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

import builders
from dualmap.engines.profile import EngineProfile
from dualmap.requests import Decision, PoolSnapshot
from dualmap.router import PoolRouter
from dualmap.scaling.scaling import PoolSignals
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.request.observations import Arrival, FanOut, Routed
from dualmap_extproc.telemetry import http_status
from dualmap_extproc.telemetry.counts import Traffic
from dualmap_extproc.telemetry.http_status import StatusServer, pool_document
from dualmap_extproc.telemetry.metrics import Metrics
from waiting import until


class Held(Metrics):
    """Metrics with a page that blocks until the test allows it."""

    def __init__(self) -> None:
        super().__init__(version="1", replica_id="router-0")
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.pages = 0

    def render(self, statuses: Sequence[PoolSnapshot], signals: Mapping[str, PoolSignals]) -> bytes:
        self.pages += 1
        self.begun.set()
        assert self.may_end.wait(30)
        return super().render(statuses, signals)


def fresh() -> Metrics:
    return Metrics(version="1", replica_id="router-0")


@asynccontextmanager
async def serving(
    *routers: PoolRouter, metrics: Metrics | None = None, **timeouts: float
) -> AsyncIterator[aiohttp.ClientSession]:
    metrics, demand = metrics or fresh(), Demand()
    for each in (metrics, demand):
        each.set_pools([router.pool for router in routers])
    server = StatusServer(
        router="router-0",
        statuses=lambda: tuple(router.status() for router in routers),
        signals=demand.signals,
        metrics=metrics,
        **timeouts,
    )
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield session
    finally:
        await server.close()


async def test_pool_page_shows_what_engines_say() -> None:
    router = PoolRouter(builders.pool(3))
    router.on_profile(0.0, "m-0", EngineProfile(version="0.32.0", block_tokens=16, kv_tokens=1600, adapters=("sql",)))
    router.on_profile(0.0, "m-1", EngineProfile(reason="/metrics was answered with 404"))
    async with serving(router) as session, session.get("/pools/llm/qwen") as response:
        described, failed, unknown = [each["engine"] for each in (await response.json())["endpoints"]]
    assert described == {
        "version": "0.32.0",
        "block_tokens": 16,
        "kv_tokens": 1600,
        "adapters": ["sql"],
        "events": {"state": "Off", "sequence": None, "blocks": 0, "gaps": 0, "resyncs": 0, "reason": ""},
        "reason": "",
    }
    assert (failed["version"], failed["kv_tokens"], failed["reason"]) == ("", None, "/metrics was answered with 404")
    assert unknown["reason"] == ""


async def test_metrics_page_has_counters_and_loads() -> None:
    router = PoolRouter(builders.pool(2))
    metrics = fresh()
    async with serving(router, metrics=metrics) as session:
        decision = router.on_request(0.0, builders.request("r", builders.text_of(1000, "a"))).answer
        assert isinstance(decision, Decision)
        observations = FanOut()
        metrics.subscribe(observations)
        arrival = Arrival(at_s=0.0, headers={})
        observations.report(Routed(now=0.0, pool="llm/qwen", decision=decision, arrival=arrival))
        async with session.get("/metrics") as response:
            page = await response.text()
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/plain")
    in_flight = [line for line in page.splitlines() if line.startswith("dualmap_endpoint_in_flight_requests{")]
    assert sorted(line.rsplit(" ", 1)[1] for line in in_flight) == ["0.0", "1.0"]
    assert 'dualmap_ring_version{pool="llm/qwen"} 1.0' in page
    wish = next(line for line in page.splitlines() if line.startswith('dualmap_pool_desired_replicas{pool="llm/qwen"}'))
    assert float(wish.rsplit(" ", 1)[1]) > 0


async def test_metrics_page_compares_the_shadow_policies() -> None:
    pool = builders.pool(2)
    routing = replace(pool.routing, shadow=("cache_affinity", "least_loaded"), shadow_sample=1.0)
    router = PoolRouter(replace(pool, routing=routing))
    async with serving(router, metrics=fresh()) as session:
        for n in range(4):
            router.on_request(float(n), builders.request(f"r-{n}", builders.text_of(1000, "a"), now=float(n)))
        async with session.get("/metrics") as response:
            page = await response.text()
    shown = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("dualmap_shadow_"))
    for policy in ("dualmap", "cache_affinity", "least_loaded"):
        of = f'policy="{policy}",pool="llm/qwen"'
        counts = [shown[f'dualmap_shadow_decisions_total{{agreed="{each}",{of}}}'] for each in ("true", "false")]
        assert sum(map(float, counts)) == 4
        assert float(shown[f"dualmap_shadow_predicted_ttft_seconds_count{{{of}}}"]) == 4
    own, other = (f'{{policy="{each}",pool="llm/qwen"}}' for each in ("dualmap", "least_loaded"))
    cached = "dualmap_shadow_predicted_cached_tokens_total"
    assert float(shown[cached + own]) == 3 * 896
    assert float(shown[cached + other]) < 3 * 896


async def test_pool_page_has_the_documented_fields() -> None:
    of = builders.pool(2)
    leaving = replace(of.members[1], leave_at_s=1_764_277_200.0)
    router = PoolRouter(replace(of, members=(of.members[0], leaving)))
    metrics = fresh()
    async with serving(router, metrics=metrics) as session:
        router.on_request(0.0, builders.request("r", builders.text_of(1000, "a")))
        async with session.get("/pools/llm/qwen") as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            document = await response.json()
    assert document.keys() == {"router", "owner", "ring_version", "held", "traffic", "tokenizer", "endpoints"}
    assert (document["router"], document["ring_version"]) == ("router-0", 1)
    assert {"requests", "slo_met", "first_tokens", "measured_cached_tokens"} <= document["traffic"].keys()
    endpoints = document["endpoints"]
    assert [endpoint["id"] for endpoint in endpoints] == ["m-0", "m-1"]
    names = {"id", "state", "in_flight", "held", "pending_prefill_tokens", "suspended", "leave_at", "engine"}
    assert all(endpoint.keys() == names for endpoint in endpoints)
    assert [endpoint["leave_at"] for endpoint in endpoints] == [None, "2025-11-27T21:00:00Z"]
    assert {endpoint["state"] for endpoint in endpoints} == {"Active"}
    assert sorted((endpoint["in_flight"], endpoint["pending_prefill_tokens"]) for endpoint in endpoints) == [
        (0, 0),
        (1, 1000),
    ]


def test_pool_page_shows_queued_requests_per_endpoint_and_pool() -> None:
    status = PoolRouter(builders.pool(1)).status()
    (endpoint,) = status.endpoints
    status = replace(status, held=5, endpoints=(replace(endpoint, held=3, suspended=True),))
    document = pool_document("router-0", status, Traffic(), {"source": "Estimate"})
    assert document["held"] == 5
    (shown,) = document["endpoints"]  # type: ignore[misc]  # a list of dicts
    assert (shown["held"], shown["suspended"]) == (3, True)


async def test_pools_page_lists_the_pools() -> None:
    async with serving(PoolRouter(builders.pool(3))) as session, session.get("/pools") as response:
        assert await response.json() == {
            "router": "router-0",
            "pools": [{"pool": "llm/qwen", "ring_version": 1, "endpoints": 3}],
        }


@pytest.mark.parametrize("path", ["/pools/llm/other", "/pools/other/qwen"])
async def test_pool_page_of_unknown_pool_is_a_json_404(path: str) -> None:
    async with serving(PoolRouter(builders.pool(1))) as session, session.get(path) as response:
        assert response.status == 404
        assert path.removeprefix("/pools/") in (await response.json())["error"]


@pytest.mark.parametrize("path", ["/", "/pools/llm", "/pools/llm/qwen/m-0"])
async def test_status_server_returns_404_for_unknown_paths(path: str) -> None:
    async with serving(PoolRouter(builders.pool(1))) as session, session.get(path) as response:
        assert response.status == 404


async def test_status_server_rejects_writing_methods() -> None:
    async with serving(PoolRouter(builders.pool(1))) as session, session.post("/pools/llm/qwen") as response:
        assert response.status == 405


async def test_status_server_rejects_invalid_http_without_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as session:
        url = session._base_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
    assert caplog.records == []


class IdleClient:
    """Connections that send the beginning of a request."""

    def __init__(self, session: aiohttp.ClientSession, *, source: str = "127.0.0.1") -> None:
        url = session._base_url
        assert url is not None
        self._server = (url.host, url.port)
        self._source = source
        self._sockets: list[socket.socket] = []

    async def __aenter__(self) -> "IdleClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()

    async def open(self, count: int) -> None:
        for _ in range(count):
            each = socket.socket()
            self._sockets.append(each)
            each.setblocking(False)
            each.bind((self._source, 0))
            await asyncio.get_running_loop().sock_connect(each, self._server)
            with contextlib.suppress(OSError):
                each.send(b"GET / HT")

    @property
    def open_ones(self) -> list[bool]:
        return [not self._closed(each) for each in self._sockets]

    def _closed(self, connection: socket.socket) -> bool:
        try:
            return connection.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True


async def test_status_connection_above_the_limit_closes_the_oldest_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_status, "CONNECTIONS_MAX", 3)
    async with (
        serving(PoolRouter(builders.pool(1))) as session,
        IdleClient(session, source="127.0.0.2") as first,
        IdleClient(session, source="127.0.0.3") as second,
        IdleClient(session, source="127.0.0.4") as third,
    ):
        for client in (first, second, third):
            await client.open(1)
        async with session.get("/pools") as response:
            assert response.status == 200
        assert (first.open_ones, second.open_ones, third.open_ones) == ([False], [True], [True])


async def test_status_idle_connections_of_one_client_stop_no_scrape() -> None:
    async with serving(PoolRouter(builders.pool(1))) as session, IdleClient(session) as client:
        await client.open(300)
        for _ in range(40):
            await client.open(5)
            async with aiohttp.request("GET", f"{session._base_url}/metrics") as response:
                assert response.status == 200
        assert sum(client.open_ones) <= http_status.CONNECTIONS_OF_SOURCE_MAX


async def test_status_connections_of_one_source_close_no_other_sources() -> None:
    async with (
        serving(PoolRouter(builders.pool(1))) as session,
        IdleClient(session, source="127.0.0.2") as other,
        IdleClient(session) as client,
    ):
        await other.open(1)
        await client.open(http_status.CONNECTIONS_MAX + 20)
        await until(lambda: sum(client.open_ones) == http_status.CONNECTIONS_OF_SOURCE_MAX)
        assert other.open_ones == [True]


async def test_status_busy_connections_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_status, "CONNECTIONS_OF_SOURCE_MAX", 2)
    metrics = Held()
    async with serving(PoolRouter(builders.pool(1)), metrics=metrics) as session:
        pages = [asyncio.create_task(session.get("/metrics")) for _ in range(2)]
        assert await asyncio.to_thread(metrics.begun.wait, 30)
        async with IdleClient(session) as client:

            async def refused() -> bool:
                await client.open(1)
                await asyncio.sleep(0.01)
                return not client.open_ones[-1]

            await until(refused)
        metrics.may_end.set()
        for page in pages:
            async with await page as response:
                assert response.status == 200


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /none HTTP/1.1", b"404"),
        (b"GET /pools/llm/none HTTP/1.1", b"404"),
        (b"POST /pools HTTP/1.1", b"405"),
        (b"GET / HT TP/1.1", b"400"),
    ],
)
async def test_status_errors_end_with_a_newline(request_line: bytes, status: bytes) -> None:
    async with serving(PoolRouter(builders.pool(1))) as session:
        url = session._base_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(request_line + b"\r\nHost: r\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        assert answer.split()[1] == status
        assert answer.endswith(b"\n")
        assert not answer.endswith(b"\r\n\r\n")
        writer.close()


WHOLE = b"GET /pools HTTP/1.1\r\nHost: router\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: r", WHOLE, WHOLE + b"GET / HT"])
async def test_status_server_closes_an_incomplete_request(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_status, "CONNECTIONS_MAX", 1)
    async with serving(PoolRouter(builders.pool(1)), idle_timeout_s=0.3) as session:
        url = session._base_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(sent)
        async with asyncio.timeout(30):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200" if sent.startswith(WHOLE) else b"")
        writer.close()
        async with session.get("/pools") as response:
            assert response.status == 200


async def test_status_server_slow_request_does_not_extend_its_timeout() -> None:
    async with serving(PoolRouter(builders.pool(1)), idle_timeout_s=0.2) as session:
        url = session._base_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET / HTTP/1.1\r\na: ")
        ended = asyncio.create_task(reader.read())

        def gone_in_spite_of_more() -> bool:
            writer.write(b"b")
            return ended.done()

        await until(gone_in_spite_of_more)
        writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT is Linux's")
async def test_status_server_disconnects_client_that_reads_nothing() -> None:
    server = StatusServer(
        router="router-0",
        statuses=tuple,
        signals=lambda _: {},
        metrics=fresh(),
        idle_timeout_s=3600.0,
        stalled_timeout_s=0.3,
    )
    port = await server.start("127.0.0.1", 0)
    connections = server._runner.server
    assert connections is not None
    loop = asyncio.get_running_loop()
    with socket.socket() as stalled:
        stalled.setblocking(False)
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(stalled, ("127.0.0.1", port))
        # The answers exceed the kernel's buffer for a connection.
        asking = asyncio.create_task(loop.sock_sendall(stalled, 2000 * b"GET /metrics HTTP/1.1\r\nHost: r\r\n\r\n"))
        await until(lambda: bool(connections.connections))
        await until(lambda: not connections.connections)
        asking.cancel()
    await server.close()


async def test_slow_metrics_page_delays_no_other_request() -> None:
    metrics = Held()
    async with serving(PoolRouter(builders.pool(1)), metrics=metrics) as session:
        page = asyncio.create_task(session.get("/metrics"))
        assert await asyncio.to_thread(metrics.begun.wait, 30)
        async with session.get("/pools/llm/qwen") as response:
            assert response.status == 200
        assert not page.done()
        metrics.may_end.set()
        async with await page as response:
            assert response.status == 200


async def test_metrics_pages_are_written_one_at_a_time() -> None:
    metrics = Held()
    async with serving(PoolRouter(builders.pool(1)), metrics=metrics) as session:
        pages = [asyncio.create_task(session.get("/metrics")) for _ in range(5)]
        assert await asyncio.to_thread(metrics.begun.wait, 30)
        for _ in range(20):
            async with session.get("/pools") as response:
                assert response.status == 200
        assert metrics.pages == 1
        metrics.may_end.set()
        for page in pages:
            async with await page as response:
                assert response.status == 200
    assert metrics.pages == 5


async def test_status_server_with_port_in_use_raises_an_error() -> None:
    first, second = (StatusServer(router="r", statuses=tuple, signals=lambda _: {}, metrics=fresh()) for _ in range(2))
    port = await first.start("127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match="address already in use"):
            await second.start("127.0.0.1", port)
    finally:
        await first.close()
