"""Tests that a real API server accepts all files of manifests/, and that operator and routers start with these
permissions.

test_examples.py tests the examples. test_rights.py tests that all permissions are necessary and sufficient.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from controlplane import crds
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.control_plane.programs import wait_until

MANIFESTS = Path(__file__).parents[2] / "manifests"
SYSTEM = "dualmap-system"
STARTED_WITHIN_S = 60.0
STOPPED_WITHIN_S = 30.0
POOL = """
apiVersion: serving.dualmap.dev/v1alpha1
kind: InferencePool
metadata: {name: qwen}
spec:
  model: {name: m}
  replicas: 2
  workload: {template: {spec: {containers: [{name: engine, image: engine}]}}}
"""


@pytest.fixture(name="installed")
def _installed(cluster: Cluster) -> Cluster:
    """The cluster with the CRD, the service accounts, and the operator's permissions in the operator's namespace."""
    crds.install(cluster)
    apply(cluster, "namespace.yaml", "rbac/system.yaml")
    return cluster


def test_manifests_pass_strict_validation(installed: Cluster) -> None:
    namespace = installed.namespace()
    for file in sorted([*MANIFESTS.glob("*.yaml"), *MANIFESTS.glob("rbac/*.yaml")]):
        # A user creates the namespace of the pools.
        text = file.read_text().replace("namespace: llm", f"namespace: {namespace}")
        confined = ("-n", namespace) if file.name == "namespaced.yaml" else ()
        installed.kubectl("apply", "--dry-run=server", "--validate=strict", *confined, "-f", "-", input=text)


@pytest.mark.parametrize("form", ["cluster", "namespaced"])
def test_operator_and_router_with_manifest_rbac_get_no_403(installed: Cluster, form: str) -> None:
    namespace = installed.namespace()
    scope = "--all-namespaces" if form == "cluster" else f"--namespace={namespace}"
    apply(installed, f"rbac/{form}.yaml", namespace=None if form == "cluster" else namespace)
    seen = len(installed.audit())
    try:
        with ExitStack() as running:
            running.enter_context(
                program(installed, "operator", scope, "--leader-election", "--metrics-port=0", "--health-port=0")
            )
            ports = [f"--{name}-port=0" for name in ("grpc", "health", "metrics", "als")]
            running.enter_context(program(installed, "router", "--kube", scope, "--host=127.0.0.1", *ports))
            installed.kubectl("apply", "-n", namespace, "-f", "-", input=POOL)
            wait_until(lambda: "2" in children(installed, namespace), "its StatefulSet", timeout_s=STARTED_WITHIN_S)
            wait_until(
                lambda: {"operator", "router"} <= {who(each) for each in asked_for_pools(installed, seen)},
                "both watch pools",
                timeout_s=STARTED_WITHIN_S,
            )
            installed.kubectl("delete", "dmpool", "qwen", "-n", namespace, "--timeout=60s")
    finally:
        # Cluster-wide permissions would hide missing namespaced permissions.
        remove(installed, f"rbac/{form}.yaml", namespace=None if form == "cluster" else namespace)
    refused = [each for each in ours(installed, seen) if each.get("responseStatus", {}).get("code") == 403]
    assert not [(who(each), each["verb"], each["requestURI"]) for each in refused]


def apply(cluster: Cluster, *files: str, namespace: str | None = None) -> None:
    cluster.kubectl("apply", *_within(namespace), *(f"--filename={MANIFESTS / file}" for file in files))


def remove(cluster: Cluster, file: str, *, namespace: str | None) -> None:
    cluster.kubectl("delete", *_within(namespace), f"--filename={MANIFESTS / file}")


def _within(namespace: str | None) -> tuple[str, ...]:
    return () if namespace is None else ("--namespace", namespace)


def children(cluster: Cluster, namespace: str) -> str:
    return cluster.kubectl("get", "statefulset", "-n", namespace, "-o", "jsonpath={.items[*].spec.replicas}")


@contextmanager
def program(cluster: Cluster, command: str, *args: str) -> Iterator[None]:
    """Run a dualmap command with its service account; after SIGTERM, the exit status must be 0."""
    kubeconfig = cluster.service_account_kubeconfig(SYSTEM, f"dualmap-{command}")
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": SYSTEM}
    process = subprocess.Popen([Path(sys.executable).parent / "dualmap", command, *args], env=environment)
    try:
        yield
        assert process.poll() is None
    finally:
        process.terminate()
        try:
            process.wait(STOPPED_WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == 0


def ours(cluster: Cluster, seen: int) -> list[dict[str, Any]]:
    return [each for each in cluster.audit()[seen:] if who(each) in ("operator", "router")]


def asked_for_pools(cluster: Cluster, seen: int) -> list[dict[str, Any]]:
    return [
        each
        for each in ours(cluster, seen)
        if each["verb"] == "watch" and each.get("objectRef", {}).get("resource") == "inferencepools"
    ]


def who(entry: dict[str, Any]) -> str:
    return str(entry["user"].get("username", "")).removeprefix(f"system:serviceaccount:{SYSTEM}:dualmap-")
