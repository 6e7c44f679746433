"""Fixtures for tests of the product on a control plane."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from controlplane import keda
from controlplane.helm import binary
from controlplane.product import Product
from controlplane.site import Site
from emulated_cluster import fixtures
from emulated_cluster.control_plane.build import binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet


def pytest_configure(config: pytest.Config) -> None:
    """Provide the fixtures `cluster` and `kubelet`, one of each per session."""
    if not config.pluginmanager.is_registered(fixtures):
        config.pluginmanager.register(fixtures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that cannot run here."""
    fixtures.prepare(items, Path(__file__).parent)


@pytest.fixture(name="product")
async def _product(cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> AsyncIterator[Product]:
    """Two routers that watch a new namespace, with permissions for a test's operators."""
    async with Product(cluster, tmp_path) as product:
        yield product


@pytest.fixture(name="site")
def _site(cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> Iterator[Site]:
    """A namespace for the chart, which Helm 3 installs."""
    helm = binary(3, binaries_folder())
    if helm is None:
        pytest.skip("helm 3 is not there: make e2e")
    site = Site(cluster, helm, tmp_path / "helm")
    yield site
    site.leave()


@pytest.fixture(scope="module", name="running_keda")
def _running_keda(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """KEDA for the tests of one file. While KEDA runs, no other server of external metrics can run."""
    with keda.running(cluster, tmp_path_factory.mktemp("keda")):
        yield


@pytest.fixture(name="scaler")
def _scaler(running_keda: None, product: Product) -> str:
    """The address (host:port) of one router, which reports the demand of all routers."""
    return f"127.0.0.1:{product.routers[0].ports['grpc']}"
