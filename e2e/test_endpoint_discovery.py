"""Tests that the real Envoy applies the endpoints of the router's discovery service."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # grpc-stubs does not know it
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dualmap_extproc.envoy.config.settings import Address, EnvoySettings
from dualmap_extproc.envoy.discovery.service import Discovery
from harness.clients import http1
from harness.envoy import Envoy
from harness.settings import pool_of
from harness.upstream import ENGINE_HEADER, Upstream
from harness.waiting import until
from ports import reserved_port

CLUSTER = "llm/qwen"


class Counts:
    """Counts the reports of the discovery service."""

    def __init__(self) -> None:
        self.streams = self.pushed = self.rejected = 0

    def discovery_streams(self, count: int) -> None:
        self.streams = count

    def discovery_pushed(self) -> None:
        self.pushed += 1

    def discovery_rejected(self) -> None:
        self.rejected += 1


class Service:
    """A server with only discovery: Envoy finds no picker and fails open to its fallback."""

    def __init__(self, port: int) -> None:
        self.counts = Counts()
        self.discovery = Discovery(self.counts)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers(self.discovery.handlers())
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")

    async def start(self) -> None:
        await self._health.set("", HealthCheckResponse.SERVING)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def connected(self) -> bool:
        return self.counts.streams > 0


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service(reserved_port())
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def engines() -> AsyncIterator[list[Upstream]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Upstream(name=name)) for name in ("a", "b", "c")]


def envoy_for(service: Service, *names: str, directory: Path, name: str = "envoy", workers: int = 1) -> Envoy:
    """Return an Envoy with one EDS cluster per pool, with endpoints from the discovery service."""
    address = Address(host="127.0.0.1", port=service.port)
    settings = EnvoySettings(
        pools=tuple(pool_of([], name=pool) for pool in names),
        routers=(address,),
        access_logs=(),
        listen=Address(host="127.0.0.1", port=0),
        admin=Address(host="127.0.0.1", port=0),
    )
    return Envoy(settings, directory=directory, name=name, concurrency=workers)


async def served_by(envoy: Envoy, count: int) -> set[str]:
    """Send requests without a pick; return the engines that served the requests."""
    replies = [await http1(f"{envoy.url}/v1/models") for _ in range(count)]
    assert {reply.status for reply in replies} == {200}
    return {reply.headers[ENGINE_HEADER] for reply in replies}


async def test_envoy_updates_endpoints_on_member_join_drain_and_leave(
    service: Service, engines: list[Upstream], tmp_path: Path
) -> None:
    a, b, c = engines
    service.discovery.publish([pool_of([a])])
    async with envoy_for(service, "qwen", directory=tmp_path) as envoy:
        assert await envoy.hosts(CLUSTER) == {a.endpoint: "HEALTHY"}
        assert await served_by(envoy, 3) == {"a"}

        service.discovery.publish([pool_of([a, b, c])])
        await envoy.wait_for_hosts(CLUSTER, {a.endpoint, b.endpoint, c.endpoint})
        assert await served_by(envoy, 12) == {"a", "b", "c"}

        service.discovery.publish([pool_of([b], draining=[a])])
        await envoy.wait_for_hosts(CLUSTER, {a.endpoint, b.endpoint})
        assert await envoy.hosts(CLUSTER) == {a.endpoint: "DRAINING", b.endpoint: "HEALTHY"}
        assert await served_by(envoy, 6) == {"b"}

        service.discovery.publish([])
        await envoy.wait_for_hosts(CLUSTER, set())
        assert (await http1(f"{envoy.url}/v1/models")).status == 503
    assert service.counts.rejected == 0


async def test_envoy_with_unknown_pool_has_the_endpoints_of_others(
    service: Service, engines: list[Upstream], tmp_path: Path
) -> None:
    """Without an answer for an empty pool, Envoy would open its listener only after initial_fetch_timeout."""
    service.discovery.publish([pool_of(engines[:1])])
    async with envoy_for(service, "qwen", "unknown", directory=tmp_path) as envoy:
        # No router picks here. With several pools, Envoy sends requests without a pick to no pool.
        assert (await http1(f"{envoy.url}/v1/models")).status == 503
        assert set(await envoy.hosts(CLUSTER)) == {engines[0].endpoint}
        stats = await envoy.stats("init_fetch_timeout|cluster.*update_(success|rejected)")
        assert sum(value for name, value in stats.items() if name.endswith("init_fetch_timeout")) == 0
        assert stats["cluster.llm/unknown.update_success"] == 1


async def test_envoy_keeps_endpoints_until_a_router_publishes(
    service: Service, engines: list[Upstream], tmp_path: Path
) -> None:
    service.discovery.publish([pool_of(engines[:2])])
    both = {each.endpoint for each in engines[:2]}
    async with envoy_for(service, "qwen", directory=tmp_path) as envoy:
        await envoy.wait_for_hosts(CLUSTER, both)
        await service.stop()
        assert set(await envoy.hosts(CLUSTER)) == both
        again = Service(service.port)
        await again.start()
        try:
            await until(again.connected, "Envoy is connected again")
            # Envoy is connected but has no response, because this service has not published its pools yet.
            assert set(await envoy.hosts(CLUSTER)) == both
            assert await served_by(envoy, 4) == {"a", "b"}
            again.discovery.publish([pool_of(engines)])
            await envoy.wait_for_hosts(CLUSTER, {each.endpoint for each in engines})
        finally:
            await again.stop()


async def test_two_envoys_with_two_workers_apply_endpoint_changes(
    service: Service, engines: list[Upstream], tmp_path: Path
) -> None:
    service.discovery.publish([pool_of(engines[:1])])
    async with (
        envoy_for(service, "qwen", directory=tmp_path, name="one", workers=2) as one,
        envoy_for(service, "qwen", directory=tmp_path, name="two", workers=2) as two,
    ):
        assert service.counts.streams == 2
        service.discovery.publish([pool_of(engines)])
        for envoy in (one, two):
            await envoy.wait_for_hosts(CLUSTER, {each.endpoint for each in engines})
            assert await served_by(envoy, 12) == {"a", "b", "c"}
