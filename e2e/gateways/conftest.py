"""Fixtures for tests behind real gateways, on the emulated cluster. `make gateways` provides what they need."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from controlplane import crds
from emulated_cluster import fixtures
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.fixtures import kubelet_on
from emulated_cluster.kubelet.isolation.roots import why_not
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from emulated_cluster.services.services import Services
from gateways import images, istio
from gateways.build import GATEWAYS
from gateways.site import PICKER_IMAGE, Site

# The images of the conformance suite's manifests. The suite's picker is `lwepp`; DualMap takes its place.
_SUITE_PICKER = "registry.k8s.io/gateway-api-inference-extension/lwepp:v1.6.0"
_SUITE_ECHO_SERVER = "gcr.io/k8s-staging-gateway-api/echo-basic:v20251106-v1.3.0-263-g47c3435c"
_PICKER = (Path(sys.executable).parent / "dualmap", "epp")


def pytest_configure(config: pytest.Config) -> None:
    """Provide the fixture `cluster`, one per session."""
    if not config.pluginmanager.is_registered(fixtures):
        config.pluginmanager.register(fixtures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that cannot run here."""
    folder = Path(__file__).parent
    fixtures.prepare(items, folder)
    reason = f"not built: {', '.join(files)}: make gateways" if (files := GATEWAYS.missing()) else why_not()
    for item in items:
        if reason and folder in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", name="node")
def _node(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessKubelet]:
    """A node with the images of the gateways, the pickers and the echo servers."""
    roots = tmp_path_factory.mktemp("images")
    catalogue = {
        istio.PROXY_IMAGE: images.proxy(roots / "proxy", istio_version=istio.VERSION),
        PICKER_IMAGE: images.this_machine(_PICKER),
        _SUITE_PICKER: images.this_machine((*_PICKER, "--conformance-hooks")),
        _SUITE_ECHO_SERVER: images.echo_server(roots / "echo"),
    }
    with (
        Services(cluster) as services,
        kubelet_on(cluster, "gateways", images=catalogue, nameserver=services.nameserver) as kubelet,
    ):
        yield kubelet


@pytest.fixture(scope="session", name="running_istio")
def _running_istio(cluster: Cluster, node: ProcessKubelet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Istiod, and a load balancer for the Services of its gateways."""
    with istio.running(cluster, tmp_path_factory.mktemp("istio")):
        yield


@pytest_asyncio.fixture(name="site")
async def _site(cluster: Cluster, node: ProcessKubelet) -> AsyncIterator[Site]:
    """A namespace with three scripted engines and their pool, without a picker."""
    crds.install(cluster, crds.GAIE_FILE, crds.GAIE_NAME)
    async with Site(cluster) as site:
        yield site
