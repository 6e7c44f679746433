"""The project's CRD on a control plane of the tests."""

from pathlib import Path

from controlplane.cluster import Cluster
from controlplane.programs import wait_until

NAME = "inferencepools.serving.dualmap.dev"
FILE = Path(__file__).parents[2] / "crds" / "serving.dualmap.dev_inferencepools.yaml"
_ESTABLISHED_WITHIN_S = 60.0
_ESTABLISHED = '-o=jsonpath={.status.conditions[?(@.type=="Established")].status}'


def install(cluster: Cluster) -> None:
    """Apply the CRD and wait until it is served; nothing happens when it is already.

    ``kubectl wait`` is no help: on a CRD that has just been made it fails, for it has no conditions yet.
    """
    cluster.kubectl("apply", "--server-side", "-f", str(FILE))
    wait_until(
        lambda: cluster.kubectl("get", "crd", NAME, _ESTABLISHED) == "True",
        f"{NAME} is established",
        timeout_s=_ESTABLISHED_WITHIN_S,
    )
