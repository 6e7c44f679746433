"""Custom resource definitions for the tests: DualMap's, and the Gateway API Inference Extension's."""

import json
from pathlib import Path

from emulated_cluster.control_plane.build import GAIE_CRD, binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.control_plane.programs import wait_until

NAME = "inferencepools.serving.dualmap.dev"
FILE = Path(__file__).parents[2] / "crds" / "serving.dualmap.dev_inferencepools.yaml"
GAIE_NAME = "inferencepools.inference.networking.k8s.io"
GAIE_FILE = binaries_folder() / GAIE_CRD
_ESTABLISHED_WITHIN_S = 60.0
_ESTABLISHED = '-o=jsonpath={.status.conditions[?(@.type=="Established")].status}'


def install(cluster: Cluster, file: Path = FILE, name: str = NAME) -> None:
    """Apply a definition and wait until the API server serves the kind; do nothing if the kind is already served.

    ``kubectl wait`` fails on a new CRD, which has no conditions yet.
    """
    cluster.kubectl("apply", "--server-side", "-f", str(file))
    wait_until(
        # kubectl's jsonpath also fails if the conditions are missing.
        lambda: cluster.kubectl("get", "crd", name, _ESTABLISHED, check=False) == "True",
        f"{name} is established",
        timeout_s=_ESTABLISHED_WITHIN_S,
    )


def remove(cluster: Cluster) -> None:
    """Delete DualMap's definition, and the pools without an operator that other tests did not delete."""
    if _let_go(cluster, "--all-namespaces"):
        cluster.kubectl("delete", "crd", NAME, "--timeout=60s")


def remove_namespace(cluster: Cluster, namespace: str) -> None:
    """Delete a namespace, its pods and its pools without an operator; do not wait.

    Remaining pods would slow down later tests.
    """
    cluster.remove_namespace(namespace)
    _let_go(cluster, "--namespace", namespace)


def _let_go(cluster: Cluster, *where: str) -> bool:
    """Remove the finalizers of all pools in the namespace; return whether the API server has DualMap's definition."""
    if not cluster.kubectl("get", "crd", NAME, "--ignore-not-found", "-o", "name"):
        return False
    for pool in json.loads(cluster.kubectl("get", NAME, *where, "-o", "json"))["items"]:
        place = ("--namespace", pool["metadata"]["namespace"])
        let_go = ("--type", "merge", "-p", '{"metadata": {"finalizers": null}}')
        cluster.kubectl("patch", f"{NAME}/{pool['metadata']['name']}", *place, *let_go, check=False)
    return True
