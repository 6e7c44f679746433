"""Tests of the chart with real KEDA: a pool grows with its load and shrinks with less load."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import keda, waves
from controlplane.chart_node import chart_kubelet  # noqa: F401  # pytest finds fixtures by import
from controlplane.helm import binary
from controlplane.site import CRD, POOL, RELEASE, Site, until_so
from emulated_cluster.control_plane.build import binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from emulated_cluster.services.services import NAMESERVER
from harness.traffic import Exchange, failed, tally

HPA = f"horizontalpodautoscaler.autoscaling/keda-hpa-{POOL}"
SCALED_OBJECT = f"scaledobject.keda.sh/{POOL}"
VALUES = {
    "autoscaling": {"keda": [{"pool": POOL, "minReplicas": 1, "maxReplicas": 3}]},
    # A pool's queue.maxWait may not exceed the gateway's maximum wait.
    "gateway": {"bundled": {"longestWait": waves.spec()["routing"]["queue"]["maxWait"]}},
}
# The chart's default is to scale down after ten minutes, then by one instance every two minutes. Tests need shorter
# times.
IMPATIENT = {
    "scaleDown": {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 1}],
    }
}


@pytest.fixture(name="site")
def _site(
    cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A namespace for the chart, on a cluster with KEDA, which uses the cluster's DNS."""
    helm = binary(4, binaries_folder())
    assert helm is not None
    with keda.running(cluster, tmp_path_factory.mktemp("keda"), nameserver=NAMESERVER):
        site = Site(cluster, helm, tmp_path / "helm")
        yield site
        site.leave()


@pytest.mark.timeout(900, func_only=True)
async def test_pool_scales_with_load_and_release_uninstalls(site: Site) -> None:
    before = await site.objects()
    await asyncio.gather(site.install(VALUES), make_pool(site))
    await site.until_answered()
    scaled = await site.get("scaledobject", POOL)
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["scalerAddress"] == f"{RELEASE}-router.{site.namespace}:9002"
    await make_impatient(site)

    exchanges = await ride(site)
    print(f"the chart with KEDA: {dict(tally(exchanges))}")
    assert lost(exchanges) == []
    assert all(each.routed for each in exchanges if each.status == 200)

    await site.helm("uninstall", RELEASE, "--wait", "--timeout", "5m")
    await site.until_only_the_pools_are_left(before)
    # No operator remains to remove the finalizer.
    await site.kubectl("patch", f"dmpool/{POOL}", "--type=merge", "--patch", '{"metadata": {"finalizers": null}}')
    await site.delete_pool()


async def make_pool(site: Site) -> None:
    """Create the pool when the chart has installed the CRD.

    helm waits for KEDA, and KEDA waits for the pool as its scale target.
    """

    async def defined() -> bool:
        return f"/{CRD}" in await site.kubectl("get", "crd", "-o", "name")

    await until_so(defined, f"{CRD} is there")
    await site.kubectl("wait", f"crd/{CRD}", "--for=condition=Established", "--timeout=60s")
    await site.make_pool(1, speed=waves.SPEED, **waves.spec())


async def make_impatient(site: Site) -> None:
    """Remove the scale-down delay of KEDA and its HPA, and wait until the HPA has this setting."""
    advanced = {"horizontalPodAutoscalerConfig": {"behavior": IMPATIENT}}
    patch = {"spec": {"pollingInterval": 2, "cooldownPeriod": 5, "advanced": advanced}}
    await site.kubectl("patch", SCALED_OBJECT, "--type=merge", "--patch", json.dumps(patch))

    async def known() -> bool:
        behavior: dict[str, Any] = (await site.get(HPA))["spec"]["behavior"]
        return bool(behavior["scaleDown"]["stabilizationWindowSeconds"] == 0)

    await until_so(known, "the HPA is impatient")


async def ride(site: Site) -> list[Exchange]:
    """Let the pool grow under high load, then shrink to one instance under a few streams; return all requests."""
    ebb = await site.traffic(streams=4, plain=1, tokens=40)
    flood = await site.traffic(streams=5, plain=1, tokens=40, prompt=waves.new_prompt)
    async with ebb.running():
        async with flood.running():
            await site.until_active(lambda count: count >= 2, "the pool has grown")
        await site.until_active(lambda count: count == 1, "the pool has shrunk to one")
        await ebb.flowing(10)
    return [*flood.exchanges, *ebb.exchanges]


def lost(exchanges: list[Exchange]) -> list[Exchange]:
    """Return requests that ended without a response, except refused connections (see ``Site.requests``)."""
    return [each for each in failed(exchanges) if not each.error.startswith("ClientConnectorError")]
