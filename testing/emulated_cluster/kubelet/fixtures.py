"""The kubelet as pytest fixtures; ``conftest.py`` imports them.

``kubelet`` is the node that the tests of a session share. A test that stops or disconnects a node creates another node
with ``kubelet_on``.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from emulated_cluster.control_plane.cluster import API_SERVER, Cluster
from emulated_cluster.kubelet.isolation.roots import Image
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet

# Enough addresses for 1000 starting pods and 1000 terminating pods.
_BLOCKS = 8


@pytest.fixture(scope="session", name="kubelet")
def kubelet_fixture(cluster: Cluster) -> Iterator[ProcessKubelet]:
    """The node that the session's tests share."""
    with kubelet_on(cluster, "node-0", blocks=_BLOCKS) as kubelet:
        yield kubelet


@contextmanager
def kubelet_on(
    cluster: Cluster,
    node: str,
    *,
    blocks: int = 1,
    images: Mapping[str, Path | Image] | None = None,
    nameserver: str | None = None,
) -> Iterator[ProcessKubelet]:
    """Another node of the cluster, with 256 addresses in each of its blocks; ``dualmap`` is on its pods' PATH.

    With ``images``, all other nodes are cordoned, because the scheduler cannot read which node has which images. Raises
    RootsError if containers cannot have their own root file systems here.
    """
    logs = cluster.logs / node
    logs.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    networks = [cluster.address_block() for _ in range(blocks)]
    kubelet = ProcessKubelet(
        cluster.kubeconfig(f"kubelet-{node}"),
        node,
        networks,
        environment={"PATH": path, "HOME": str(logs)},
        logs=logs,
        api_server=API_SERVER,
        images=images,
        nameserver=nameserver,
    )
    others = []
    if images:
        others = cluster.kubectl("get", "nodes", "--field-selector", "spec.unschedulable!=true", "-o", "name").split()
    with kubelet:
        for other in others:
            cluster.kubectl("cordon", other)
        try:
            yield kubelet
        finally:
            for other in others:
                cluster.kubectl("uncordon", other)


@contextmanager
def persistent_volume(cluster: Cluster, namespace: str, claim: str, folder: Path) -> Iterator[None]:
    """A claim in ``namespace`` for a volume in ``folder``, which pods of all nodes may write, as all are this machine.

    The end of the context deletes the volume, which the cluster keeps as long as the claim. The folder stays.
    """
    name = f"{namespace}-{claim}"
    anywhere = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "Exists"}]}]}
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeMode": "Filesystem"}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            **shared,
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": claim},
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": anywhere},
        },
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": namespace},
        "spec": {**shared, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": name},
    }
    document = {"apiVersion": "v1", "kind": "List", "items": [volume, wanted]}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(document))
    try:
        yield
    finally:
        cluster.kubectl("delete", "persistentvolume", name, "--wait=false", "--ignore-not-found")
