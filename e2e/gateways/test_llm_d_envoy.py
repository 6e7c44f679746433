"""Envoy with the configuration of llm-d-router's stand-alone chart, with DualMap in the place of its picker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from controlplane import crds
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from gateways import llm_d, recordings
from gateways.checks import Gateway
from gateways.site import PICKER_PORT, PREFILLS, ROLES, Site
from gateways.tap import Tap
from harness import fail_open
from harness.envoy import Envoy

pytestmark = pytest.mark.always_picked


@pytest_asyncio.fixture(name="gateway")
async def _gateway(site: Site, tmp_path: Path) -> AsyncIterator[Gateway]:
    """Envoy in front of a picker with a list of a single destination."""
    site.deploy_picker("--single-destination")
    (picker,) = await site.picker_pods(1)
    async with _envoy(site, tmp_path, picker["status"]["podIP"], PICKER_PORT) as gateway:
        yield gateway


@asynccontextmanager
async def _envoy(site: Site, directory: Path, host: str, port: int) -> AsyncIterator[Gateway]:
    async with Envoy(yaml.safe_dump(llm_d.bootstrap((host, port))), directory=directory) as envoy:
        gateway = Gateway(site, "127.0.0.1", envoy.port)
        await gateway.until_serving()
        fail_open.forgive(envoy.child)
        yield gateway


async def test_single_destination_reaches_the_pick(gateway: Gateway) -> None:
    await gateway.check_picks()
    await gateway.check_forged_destination()


async def test_large_bodies_arrive_complete(gateway: Gateway) -> None:
    await gateway.check_large_bodies()


async def test_event_stream_is_forwarded_without_delay(gateway: Gateway) -> None:
    await gateway.check_event_stream()


async def test_body_with_trailers_arrives_once(gateway: Gateway) -> None:
    await gateway.check_trailers()


async def test_pods_that_prefill_are_named_to_the_pods_that_decode(
    cluster: Cluster, node: ProcessKubelet, tmp_path: Path
) -> None:
    crds.install(cluster, crds.GAIE_FILE, crds.GAIE_NAME)
    async with Site(cluster, roles=ROLES) as site:
        site.deploy_picker("--single-destination", PREFILLS)
        (picker,) = await site.picker_pods(1)
        async with _envoy(site, tmp_path, picker["status"]["podIP"], PICKER_PORT) as gateway:
            await gateway.check_prefills()


async def test_streams_are_as_recorded(site: Site, tmp_path: Path) -> None:
    site.deploy_picker("--single-destination", "--secure-serving=false")
    (picker,) = await site.picker_pods(1)
    async with (
        Tap(f"{picker['status']['podIP']}:{PICKER_PORT}", host="127.0.0.1", port=0) as tap,
        _envoy(site, tmp_path, "127.0.0.1", tap.port) as gateway,
    ):
        tap.conversations.clear()
        conversations = await recordings.record(site, tap, host=gateway.host, port=gateway.port)
    recordings.check_or_write("llm_d", conversations)
