"""A pytest fixture for the tests that install the chart: a node with the chart's images."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from controlplane.helm import references
from controlplane.images import ImagesError, build
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.fixtures import kubelet_on
from emulated_cluster.kubelet.isolation.roots import Image, why_not
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from emulated_cluster.services.services import Services


@pytest.fixture(scope="module", name="kubelet")
def chart_kubelet(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[ProcessKubelet]:
    """A node with a DNS server for the names of Services. Cluster addresses work for all processes."""
    yield from dualmap_images(request, cluster)


def dualmap_images(
    request: pytest.FixtureRequest, cluster: Cluster, also: Mapping[str, str] | None = None
) -> Iterator[ProcessKubelet]:
    """Yield a node with the chart's images; ``also`` gives further names to images, by their own names."""
    # Each test file has its own node name. A second node with the same name would have the first node's pods but other
    # addresses.
    node = request.path.stem.replace("_", "-")
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    try:
        images = build()
    except ImagesError as error:
        pytest.skip(str(error))
    names = references()
    catalogue = {
        names.dualmap: _dualmap(images.dualmap, images.config),
        names.epp: _dualmap(images.dualmap, images.epp_config),
        names.envoy: Image(root=images.envoy),
        names.redis: Image(root=images.redis),
    }
    catalogue |= {name: catalogue[image] for name, image in (also or {}).items()}
    with (
        Services(cluster) as services,
        kubelet_on(cluster, node, images=catalogue, nameserver=services.nameserver) as kubelet,
    ):
        yield kubelet


def _dualmap(root: Path, config: Mapping[str, Any]) -> Image:
    return Image(
        root=root,
        entrypoint=tuple(config["Entrypoint"]),
        environment=dict(each.split("=", 1) for each in config["Env"]),
        user=config["User"],
    )
