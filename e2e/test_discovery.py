"""Tests that an Envoy without configured pools (``dualmap envoy-config --discover``) discovers created and deleted
pools.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from aiohttp import web
from click.testing import CliRunner
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # grpc-stubs does not know it
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dualmap_cli.main import main
from dualmap_extproc.envoy.config.settings import Mode
from dualmap_extproc.envoy.discovery.service import Discovery
from harness.clients import Reply, http1, opened
from harness.deployment import CHAT
from harness.documents import chat, document, error_of, member_of
from harness.envoy import Envoy
from harness.settings import pool_of
from harness.stack import Router, write_pool
from harness.upstream import ENGINE_HEADER, Received, Upstream, plain, sse
from harness.waiting import until

Document = Mapping[str, Any]
modes = pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)


@pytest_asyncio.fixture(name="engines")
async def _engines() -> AsyncIterator[list[Upstream]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Upstream(name=name)) for name in ("a", "b")]


def of(pool: str, engine: Upstream, **spec: Any) -> Document:
    return document(pool, [member_of(engine)], **spec)


class Gateway:
    """Routers with one shared pool file, and their Envoy; the test starts each process."""

    def __init__(self, directory: Path, *arguments: str, mode: Mode = Mode.STREAMED, routers: int = 1) -> None:
        self._directory = directory
        self._file = directory / "pools.json"
        self._tls = "--tls" in arguments
        self._arguments = ("--mode", mode.value, *arguments)
        self.routers = [self._router(number, {}) for number in range(routers)]
        self.envoy: Envoy

    def write(self, *pools: Document) -> None:
        """Replace the pools in the file."""
        write_pool(self._file, {"apiVersion": "v1", "kind": "List", "items": list(pools)})

    @asynccontextmanager
    async def running(self, *pools: Document) -> AsyncIterator[None]:
        """Run the routers and Envoy with these pools."""
        self.write(*pools)
        async with self._routers():
            ports = [router.ports["grpc"] for router in self.routers]
            async with self.envoy_before(ports):
                yield

    @asynccontextmanager
    async def _routers(self) -> AsyncIterator[None]:
        try:
            await asyncio.gather(*(router.start() for router in self.routers))
            yield
        finally:
            await asyncio.gather(*(router.stop() for router in self.routers))

    @asynccontextmanager
    async def envoy_before(self, ports: Sequence[int]) -> AsyncIterator[None]:
        """Run an Envoy whose routers have these ports."""
        routers = ",".join(f"127.0.0.1:{port}" for port in ports)
        arguments = ["envoy-config", "--discover", "--router", routers, *self._arguments]
        result = CliRunner().invoke(main, [*arguments, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        assert result.exit_code == 0, result.output
        async with Envoy(result.stdout, directory=self._directory, concurrency=2) as self.envoy:
            yield

    async def restart(self, number: int, *, ports: Mapping[str, int] | None = None) -> None:
        """Start a router on its previous ports, or on the given ports."""
        self.routers[number] = self._router(number, ports or self.routers[number].ports)
        await self.routers[number].start()

    async def ask(self, pool: str) -> Reply:
        """POST a chat completion for a pool's model."""
        return await http1(self.envoy.url + CHAT, body=json.dumps(chat(pool)).encode())

    async def not_found(self, path: str) -> bool:
        """Return whether Envoy itself rejects a GET of this path."""
        reply = await http1(self.envoy.url + path)
        return reply.status == 404 and error_of(reply)["code"] == "path_not_found"

    async def asked(self) -> None:
        """Wait until both Envoy workers use a router again."""
        in_a_row = 0

        async def refused() -> bool:
            nonlocal in_a_row
            # Only a router rejects a body without a model.
            reply = await http1(self.envoy.url + CHAT, body=b"{}")
            in_a_row = in_a_row + 1 if reply.status == 400 else 0
            return in_a_row == 8

        await until(refused, "Envoy uses a router", timeout_s=30.0)

    async def served(self, pool: str, engine: Upstream) -> list[Reply]:
        """Send requests until the engine answers a request; return the error responses before this answer."""
        refusals: list[Reply] = []

        async def served() -> bool:
            reply = await self.ask(pool)
            if reply.status == 200:
                assert reply.headers[ENGINE_HEADER] == engine.name
                return True
            refusals.append(reply)
            return False

        await until(served, f"{pool} is served by {engine.name}", timeout_s=30.0)
        return refusals

    async def refused(self, pool: str, *codes: str) -> None:
        """Send requests until a response has an error with one of these codes."""

        async def refused() -> bool:
            reply = await self.ask(pool)
            return reply.status >= 400 and error_of(reply)["code"] in codes

        await until(refused, f"{pool} is refused: {codes}", timeout_s=30.0)

    async def clusters(self) -> set[str]:
        """Return the clusters of pools in Envoy."""
        page = await self.envoy.admin_json("/clusters?format=json")
        return {each["name"] for each in page["cluster_statuses"] if "/" in each["name"]}

    def _router(self, number: int, ports: Mapping[str, int]) -> Router:
        arguments = ("--tls", "self-signed") if self._tls else ()
        return Router(
            [self._file], directory=self._directory, name=f"router-{number}", arguments=arguments, ports=ports
        )


@modes
async def test_pool_changes_do_not_disturb_other_pools(mode: Mode, engines: list[Upstream], tmp_path: Path) -> None:
    a, b = engines
    gateway = Gateway(tmp_path, mode=mode)
    first, second = of("first", a), of("second", b)
    async with gateway.running(first):
        await gateway.served("first", a)
        stop = asyncio.Event()

        async def steady() -> list[int]:
            statuses = []
            while not stop.is_set():
                statuses.append((await gateway.ask("first")).status)
            return statuses

        others = asyncio.create_task(steady())
        await gateway.refused("second", "model_not_found")
        gateway.write(first, second)
        refusals = await gateway.served("second", b)
        # Envoy receives the pool some milliseconds after the router.
        assert {error_of(reply)["code"] for reply in refusals} <= {"model_not_found", "pool_not_configured"}
        assert await gateway.clusters() == {"llm/first", "llm/second"}

        gate = asyncio.Event()
        stream = sse([b"data: 1\n\n", b"data: 2\n\n"], then=gate)

        async def answer(request: web.Request, received: Received) -> web.StreamResponse:
            return await (stream if b'"stream": true' in received.body else plain)(request, received)

        b.answer = answer
        async with opened(gateway.envoy.url + CHAT, json.dumps(chat("second", stream=True)).encode()) as response:
            gateway.write(first)
            await gateway.refused("second", "model_not_found")

            async def gone() -> bool:
                return await gateway.clusters() == {"llm/first"}

            await until(gone, "the deleted pool's cluster is gone")
            gate.set()
            assert await response.read() == b"data: 1\n\ndata: 2\n\n", "the open stream ends normally"
        stop.set()
        assert set(await others) == {200}


async def test_envoy_without_router_serves_only_a_single_pool(engines: list[Upstream], tmp_path: Path) -> None:
    """Without a pick, Envoy cannot choose between several pools, which may belong to different tenants."""
    a, b = engines
    gateway = Gateway(tmp_path)
    first, second = of("first", a), of("second", b)
    async with gateway.running(first):
        await gateway.served("first", a)
        assert await gateway.not_found("/metrics")
        await gateway.routers[0].kill()
        await gateway.served("first", a)
        assert await gateway.not_found("/metrics"), "Envoy keeps its list of paths while it fails open"
        assert await gateway.clusters() == {"llm/first"}

        gateway.write(first, second)
        await gateway.restart(0)
        await gateway.asked()
        await gateway.served("second", b)
        await gateway.routers[0].kill()
        await gateway.refused("first", "router_unreachable")
        assert await gateway.clusters() == {"llm/first", "llm/second"}, "Envoy keeps its clusters"

        gateway.write(second)
        await gateway.restart(0)
        await gateway.served("second", b)
        await gateway.refused("first", "model_not_found")


async def test_envoy_discovers_new_pool_from_either_router(engines: list[Upstream], tmp_path: Path) -> None:
    a, b = engines
    gateway = Gateway(tmp_path, routers=2)
    first, second, third = of("first", a), of("second", b), of("third", b)
    async with gateway.running(first):
        await gateway.served("first", a)
        streams = [int(await router.metric("dualmap_discovery_streams")) for router in gateway.routers]
        assert sorted(streams) == [0, 1], "Envoy opens one discovery stream in all"
        asked = streams.index(1)
        await gateway.routers[asked].kill()
        gateway.write(first, second)
        await gateway.served("second", b)
        await gateway.restart(asked)
        gateway.write(first, second, third)
        await gateway.served("third", b)
        assert await gateway.clusters() == {"llm/first", "llm/second", "llm/third"}


async def test_envoy_started_before_the_router_serves_later(engines: list[Upstream], tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    gateway.write(of("first", engines[0]))
    router = gateway.routers[0]
    # The start finds free ports, which are free again after the stop.
    await router.start()
    await router.stop()
    async with gateway.envoy_before([router.ports["grpc"]]):
        early = await gateway.ask("first")
        assert early.status == 503
        assert error_of(early)["code"] == "router_unreachable"
        try:
            await gateway.restart(0)
            await gateway.served("first", engines[0])
        finally:
            await gateway.routers[0].stop()


async def test_router_warns_over_tls_of_max_wait_above_envoys_limit(engines: list[Upstream], tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, "--tls", "on", "--longest-wait", "20s")
    short = {"routing": {"queue": {"maxWait": "20s"}}}
    async with gateway.running(of("first", engines[0], **short), of("second", engines[1])):
        await gateway.served("second", engines[1])
        await gateway.routers[0].wait_for_line(r"Pool may queue requests for longer than Envoy waits.*")
        lines = gateway.routers[0].output().splitlines()
        (warning,) = [line for line in lines if "Pool may queue requests for longer than Envoy waits" in line]
        assert "pool=llm/second" in warning


class Stream:
    """An observer of the discovery service that records only rejections."""

    def discovery_streams(self, count: int) -> None: ...
    def discovery_pushed(self) -> None: ...
    def discovery_rejected(self) -> None:
        raise AssertionError("Envoy rejected a discovery response")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:betterproto2", "ignore::DeprecationWarning:envoy_data_plane")
async def test_envoy_without_pools_starts_and_rejects_requests(engines: list[Upstream], tmp_path: Path) -> None:
    discovery = Discovery(Stream())
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(discovery.handlers())
    health = health_aio.HealthServicer()
    await health.set("", HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    discovery.publish([])
    gateway = Gateway(tmp_path, routers=0)
    try:
        async with gateway.envoy_before([port]):
            reply = await gateway.ask("qwen")
            assert reply.status == 503
            assert error_of(reply)["code"] == "router_unreachable"
            stats = await gateway.envoy.stats("init_fetch_timeout")
            assert not any(stats.values()), "the service reports at once that there is no pool"

            discovery.publish([pool_of(engines[:1])])
            await gateway.served("qwen", engines[0])
            discovery.publish([])
            await gateway.refused("qwen", "router_unreachable")
    finally:
        await server.stop(None)
