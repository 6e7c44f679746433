"""Tests that a real API server accepts manifests/examples unchanged, and that the operator creates the described
objects.

The cluster has the real CRDs of KEDA and LeaderWorkerSet, but not their controllers. test_keda.py runs KEDA.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane import crds
from controlplane.product import Product
from emulated_cluster.control_plane.build import LWS_CRD, binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet

EXAMPLES = sorted((Path(__file__).parents[2] / "manifests" / "examples").glob("*.yaml"))
DEFINITIONS = {
    "keda.sh_scaledobjects.yaml": "scaledobjects.keda.sh",
    LWS_CRD: "leaderworkersets.leaderworkerset.x-k8s.io",
}


@pytest.mark.timeout(300, func_only=True)
async def test_each_example_is_accepted_and_reconciled(
    cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path
) -> None:
    for file, name in DEFINITIONS.items():
        crds.install(cluster, binaries_folder() / file, name)
    async with Product(cluster, tmp_path, routers=0) as product:
        await product.operator()
        for file in EXAMPLES:
            # A user creates the namespace of the examples.
            text = file.read_text().replace("namespace: llm", f"namespace: {product.namespace}")
            await product.kubectl("apply", "--validate=strict", "-f", "-", input=text)
            for pool in yaml.safe_load_all(text):
                if pool["kind"] == "InferencePool":
                    await carried_out(product, pool)


async def carried_out(product: Product, pool: dict[str, Any]) -> None:
    """Wait until the operator has created a pool's child objects without a warning."""
    name = pool["metadata"]["name"]

    def accepted(status: dict[str, Any]) -> bool:
        return any((each["type"], each["reason"]) == ("Accepted", "Accepted") for each in status.get("conditions", ()))

    await product.until(accepted, name)
    template = pool["spec"]["workload"].get("template")
    if template is not None:
        await product.until(lambda status: status.get("replicas") == pool["spec"]["replicas"], name)
        made = json.loads(await product.kubectl("get", "statefulset", name, "-o", "json"))
        containers = zip(made["spec"]["template"]["spec"]["containers"], template["spec"]["containers"], strict=True)
        assert all(container["args"] == wanted["args"] for container, wanted in containers)
