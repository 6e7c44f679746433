"""Tests of kubectl with pools: columns, scale, explain, short names, and another CRD of the same kind."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import crds
from emulated_cluster.control_plane.cluster import Cluster

STATUS = {
    "replicas": 5,
    "readyReplicas": 4,
    "inRing": 3,
    "selector": "serving.dualmap.dev/pool=qwen",
    "traffic": {"sloAttainment": "0.97", "cacheHitRate": "0.63"},
    "ring": {"version": 7},
    "conditions": [
        {"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": "2026-11-20T08:00:00Z"}
        for kind, status, reason in (("Available", "True", "MembersReady"), ("Degraded", "False", "AsExpected"))
    ],
}


@pytest.fixture(scope="module", name="namespace")
def _namespace(cluster: Cluster) -> str:
    """A namespace with one DualMap pool, qwen, that has a status."""
    crds.install(cluster)
    namespace = cluster.namespace()
    create(cluster, namespace, "qwen", policy="dualmap_paper")
    change = json.dumps({"status": STATUS})
    cluster.kubectl("patch", "dmpool", "qwen", "-n", namespace, "--subresource=status", "--type=merge", "-p", change)
    return namespace


def create(
    cluster: Cluster, namespace: str, name: str, *, policy: str = "dualmap", model: str = "Qwen/Qwen2.5"
) -> None:
    document = {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": model},
            "replicas": 6,
            "workload": {"selector": {"matchLabels": {"app": name}}},
            "routing": {"policy": policy},
        },
    }
    cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(document))


def table(text: str) -> list[list[str]]:
    """Return a printed table as rows of words. No value in these tests has a space."""
    return [line.split() for line in text.splitlines()]


def test_kubectl_get_shows_the_main_columns(cluster: Cluster, namespace: str) -> None:
    head, row = table(cluster.kubectl("get", "dmpool", "qwen", "-n", namespace))
    assert head == ["NAME", "DESIRED", "READY", "IN-RING", "SLO", "HIT", "POLICY", "AGE"]
    assert row[:-1] == ["qwen", "6", "4", "3", "0.97", "0.63", "dualmap_paper"]


def test_kubectl_get_wide_shows_the_additional_columns(cluster: Cluster, namespace: str) -> None:
    head, row = table(cluster.kubectl("get", "dmpool", "qwen", "-n", namespace, "-o", "wide"))
    assert head[8:] == ["MODEL", "ENGINE", "TTFT", "ATTAINMENT", "RING", "AVAILABLE", "DEGRADED", "REASON"]
    assert row[8:] == ["Qwen/Qwen2.5", "vLLM", "5s", "0.9", "7", "True", "False", "AsExpected"]


def test_kubectl_scale_sets_replicas_within_bounds(cluster: Cluster, namespace: str) -> None:
    create(cluster, namespace, "scaled")
    cluster.kubectl("scale", "dmpool/scaled", "-n", namespace, "--replicas", "9", "--current-replicas", "6")
    assert cluster.kubectl("get", "dmpool", "scaled", "-n", namespace, "-o", "jsonpath={.spec.replicas}") == "9"
    refused = cluster.kubectl("scale", "dmpool/scaled", "-n", namespace, "--replicas", "10001", check=False)
    assert "spec.replicas" in refused
    assert "10000" in refused


def test_scale_subresource_has_replicas_and_selector(cluster: Cluster, namespace: str) -> None:
    path = f"/apis/serving.dualmap.dev/v1alpha1/namespaces/{namespace}/inferencepools/qwen/scale"
    scale: dict[str, Any] = json.loads(cluster.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 6}
    assert scale["status"] == {"replicas": 5, "selector": "serving.dualmap.dev/pool=qwen"}


def test_kubectl_explain_describes_fields(cluster: Cluster, namespace: str) -> None:
    said = cluster.kubectl("explain", f"{crds.NAME}.spec.routing.queue.dispatchWindow")
    assert (
        "An instance with more pending prefill than this is saturated; further requests for it are queued"
        in " ".join(said.split())
    )
    assert "dispatchWindow\t<string>" in cluster.kubectl("explain", f"{crds.NAME}.spec", "--recursive")


@pytest.mark.parametrize("name", ["dmpool", "dualmap", "inference", "inferencepool.serving.dualmap.dev"])
def test_kubectl_finds_pools_by_short_name_category_and_full_name(cluster: Cluster, namespace: str, name: str) -> None:
    assert "inferencepool.serving.dualmap.dev/qwen" in cluster.kubectl("get", name, "-n", namespace, "-o", "name")


def test_field_selectors_find_pools_by_model_and_policy(cluster: Cluster, namespace: str) -> None:
    create(cluster, namespace, "other", model="llama")
    for selector, found in (("spec.model.name=llama", "other"), ("spec.routing.policy=dualmap_paper", "qwen")):
        names = cluster.kubectl("get", "dmpool", "-n", namespace, "--field-selector", selector, "-o", "name")
        assert names.split() == [f"inferencepool.serving.dualmap.dev/{found}"]


@pytest.fixture(name="both")
def _both(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Install the Gateway API Inference Extension's CRD beside DualMap's, with a pool of that CRD named gaie."""
    crds.install(cluster, crds.GAIE_FILE, crds.GAIE_NAME)
    try:
        theirs = {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": {"name": "gaie"},
            "spec": {
                "selector": {"matchLabels": {"app": "vllm"}},
                "targetPorts": [{"number": 8000}],
                "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
            },
        }
        cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(theirs))
        yield
    finally:
        cluster.kubectl("delete", "crd", crds.GAIE_NAME)


@pytest.mark.usefixtures("both")
def test_short_name_dmpool_with_gaie_installed_finds_dualmap_pool(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    # kubectl caches API discovery, so a new cache folder makes kubectl read the API groups again.
    fresh = ("--cache-dir", str(tmp_path), "-n", namespace)
    for name in ("inferencepool", "inferencepools", "infpool", crds.GAIE_NAME):
        assert cluster.kubectl("get", name, "-o", "name", *fresh) == "inferencepool.inference.networking.k8s.io/gaie\n"
    for name in ("dmpool", crds.NAME):
        assert "inferencepool.serving.dualmap.dev/qwen" in cluster.kubectl("get", name, "-o", "name", *fresh)
    assert "not found" in cluster.kubectl("scale", "inferencepool/qwen", "--replicas", "2", *fresh, check=False)
    cluster.kubectl("scale", "dmpool/qwen", "--replicas", "6", *fresh)
