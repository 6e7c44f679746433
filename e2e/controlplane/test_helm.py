"""Tests of the chart's life cycle with helm 3 and 4: install, upgrade, rollback, uninstall.

Pods run under the Pod Security Standard `restricted`.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controlplane.chart_node import chart_kubelet  # noqa: F401  # pytest finds fixtures by import
from controlplane.helm import binary
from controlplane.site import DECISION, POOL, RELEASE, Site
from emulated_cluster.control_plane.build import binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet

_TEST_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A variant of the installation: helm version, permissions, and TLS between Envoy and the routers.

    ``secrets`` are the Secrets with generated values, by the end of their names.
    """

    helm: int
    namespaced: bool
    tls: Mapping[str, Any]
    secrets: tuple[str, ...]

    def values(self, namespace: str) -> dict[str, Any]:
        """Return the chart's values for this variant."""
        return {"watchNamespace": namespace if self.namespaced else "", "router": {"tls": self.tls}}


SELF_SIGNED = {"mode": "selfSigned", "mutual": True}
GENERATED = ("authority", "router-mtls", "gateway-mtls", "redis-password", "hash-key")


FORMS = [
    pytest.param(
        Form(
            helm=3,
            namespaced=True,
            tls=SELF_SIGNED,
            secrets=("router-tls", "gateway-tls", "redis-password", "hash-key"),
        ),
        id="helm-3-namespaced-tls",
    ),
    pytest.param(Form(helm=4, namespaced=False, tls={}, secrets=GENERATED), id="helm-4-cluster"),
]


@pytest.fixture(name="site")
def _site(request: pytest.FixtureRequest, cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> Iterator[Site]:
    form: Form = request.getfixturevalue("form")
    helm = binary(form.helm, binaries_folder())
    if helm is None:
        pytest.skip(f"helm {form.helm} is not there: make e2e")
    site = Site(cluster, helm, tmp_path / "helm")
    yield site
    site.leave()


@pytest.mark.timeout(_TEST_S, func_only=True)
@pytest.mark.parametrize("form", FORMS)
async def test_release_installs_serves_upgrades_rolls_back_uninstalls(
    form: Form, site: Site, kubelet: ProcessKubelet
) -> None:
    before = await site.objects()
    await site.install(form.values(site.namespace))
    for component, replicas in {"operator": 2, "router": 2, "gateway": 2, "redis": 1}.items():
        await site.until_deployed(component, replicas)

    await site.make_pool(2)
    await site.until_answered()
    await site.helm("test", RELEASE, "--timeout", "2m")
    assert f"{DECISION}: " in kubelet.log(kubelet.pod(site.namespace, f"{RELEASE}-test"))

    certificates = await keys(site, form)
    envoys = await site.containers("gateway")
    async with site.requests() as outcomes:
        await site.upgrade("0.2.0", {"router": {"logLevel": "debug"}})
        router = await site.until_deployed("router", 2)
        assert "--log-level=debug" in router["spec"]["template"]["spec"]["containers"][0]["args"]
        assert await site.released() == ("dualmap-0.2.0", 2)
        assert await keys(site, form) == certificates

        await site.helm("rollback", RELEASE, "1", "--wait", "--timeout", "5m")
        router = await site.until_deployed("router", 2)
        assert "--log-level=info" in router["spec"]["template"]["spec"]["containers"][0]["args"]
        assert await site.released() == ("dualmap-0.1.0", 3)
        assert await keys(site, form) == certificates
    assert await site.containers("gateway") == envoys, "an Envoy restarted because of a change of the routers"
    assert set(outcomes) == {"decided"}, f"what came of the requests during upgrade and rollback: {outcomes}"

    # The test checks denied requests before the uninstall, which deletes the operator's role before the operator stops.
    assert site.refused() == []
    await site.helm("uninstall", RELEASE, "--wait", "--timeout", "5m")
    await site.until_only_the_pools_are_left(before)
    pods = await site.get("pods", "-l", f"serving.dualmap.dev/pool={POOL}")
    for pod in pods["items"]:
        assert await site.chat(f"http://{pod['status']['podIP']}:8000") == (200, "")

    # A new installation adopts the pools, and removes their finalizers after their deletion.
    await site.install(form.values(site.namespace))
    await site.until_answered()
    await site.delete_pool()
    await site.helm("uninstall", RELEASE, "--wait", "--timeout", "5m")


async def keys(site: Site, form: Form) -> list[dict[str, str]]:
    """Return the generated values: certificates and keys of routers and Envoy, and Redis's password."""
    names = [f"{RELEASE}-{name}" for name in form.secrets]
    return [secret["data"] for secret in await asyncio.gather(*(site.get("secret", name) for name in names))]
