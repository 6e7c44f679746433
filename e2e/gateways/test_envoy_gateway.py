"""Envoy Gateway 1.9, without Kubernetes, with DualMap as its picker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from emulated_cluster.control_plane.cluster import ADVERTISED
from gateways import envoy_gateway, images, recordings
from gateways.checks import Gateway
from gateways.site import ENGINE_PORT, PICKER_PORT, Site
from gateways.tap import Tap
from harness import fail_open

pytestmark = pytest.mark.always_picked


@pytest_asyncio.fixture(name="gateway")
async def _gateway(site: Site, tmp_path: Path) -> AsyncIterator[Gateway]:
    site.deploy_picker()
    (picker,) = await site.picker_pods(1)
    async with _running(site, tmp_path, picker["status"]["podIP"], PICKER_PORT) as gateway:
        yield gateway


@asynccontextmanager
async def _running(
    site: Site, directory: Path, host: str, port: int, *, retries: bool = True
) -> AsyncIterator[Gateway]:
    engines = [(engine.host, ENGINE_PORT) for engine in site.engines.values()]
    with envoy_gateway.running(directory, images.ENVOY, engines=engines, picker=(host, port), retries=retries):
        gateway = Gateway(site, "127.0.0.1", envoy_gateway.PORT)
        await gateway.until_serving()
        with fail_open.counting(envoy_gateway.admin(directory)):
            yield gateway


async def test_header_reaches_the_picked_engine(gateway: Gateway) -> None:
    await gateway.check_picks()
    await gateway.check_forged_destination()


async def test_dead_first_pick_falls_back_to_the_second(gateway: Gateway) -> None:
    await gateway.check_dead_first_pick()


async def test_large_bodies_arrive_complete(gateway: Gateway) -> None:
    await gateway.check_large_bodies()


async def test_event_stream_is_forwarded_without_delay(gateway: Gateway) -> None:
    await gateway.check_event_stream()


@pytest.mark.parametrize(
    "retries",
    [
        False,
        pytest.param(True, marks=pytest.mark.xfail(strict=True, reason="with retries, Envoy 1.40 repeats the body")),
    ],
)
async def test_body_with_trailers_arrives_once(site: Site, tmp_path: Path, retries: bool) -> None:
    site.deploy_picker()
    (picker,) = await site.picker_pods(1)
    async with _running(site, tmp_path, picker["status"]["podIP"], PICKER_PORT, retries=retries) as gateway:
        await gateway.check_trailers()


async def test_streams_are_as_recorded(site: Site, tmp_path: Path) -> None:
    site.deploy_picker("--secure-serving=false")
    (picker,) = await site.picker_pods(1)
    async with (
        Tap(f"{picker['status']['podIP']}:{PICKER_PORT}", host=ADVERTISED, port=0) as tap,
        _running(site, tmp_path, ADVERTISED, tap.port) as gateway,
    ):
        conversations = await recordings.record(site, tap, host=gateway.host, port=gateway.port)
    recordings.check_or_write("envoy_gateway", conversations)
