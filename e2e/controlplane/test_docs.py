"""Runs the documents' kubectl, helm and sed commands unchanged on a real control plane with the chart's pods.

Each command runs once, after the commands that it depends on. ``NOT_RUN`` has the reason for each documented command
that does not run. A new command on a documentation page needs an entry in this file.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane import crds
from controlplane.chart_node import chart_kubelet  # noqa: F401  # pytest finds fixtures by import
from controlplane.helm import Helm, binary, references
from controlplane.site import CRD, RELEASE, pool_of_engines
from doc_commands import ROOT, commands
from emulated_cluster.control_plane.build import binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from harness.waiting import until

INSTALL = (
    "kubectl create namespace dualmap-system",
    "kubectl label namespace dualmap-system pod-security.kubernetes.io/enforce=restricted",
    "helm install dualmap helm/dualmap --namespace dualmap-system --set image.registry=REGISTRY,image.repository=NAME",
    "kubectl rollout status --namespace dualmap-system deployment/dualmap-router",
)
POOLS = (
    "kubectl create namespace llm",
    "kubectl apply -f pool.yaml",
    "kubectl wait --namespace llm --for=condition=Available dmpool/qwen --timeout 15m",
    "kubectl get dmpool --namespace llm",
    "kubectl get --namespace llm dmpool/qwen -o yaml > pool.yaml",
    "kubectl scale --namespace llm dmpool/qwen --replicas 4",
    "kubectl scale --namespace llm dmpool/qwen --replicas 2",
    "kubectl apply -f qwen.yaml",
    "kubectl get dmpool qwen",
    "kubectl scale dmpool qwen --replicas 2",
)
REMOVE = (
    "kubectl delete dmpool --all --all-namespaces",
    "helm uninstall dualmap --namespace dualmap-system",
)
# Without an operator, a deleted pool remains until its finalizer is removed.
LET_GO = """kubectl patch --namespace llm dmpool/qwen --type merge --patch '{"metadata": {"finalizers": null}}'"""
REMOVE_DEFINITION = f"kubectl delete crd --ignore-not-found {CRD}"
WITHOUT_HELM = (
    "kubectl apply --server-side -f crds/",
    "sed 's|ghcr.io/dualmap/dualmap:0.1.0|REGISTRY/NAME:TAG|' manifests/install.yaml"
    " | kubectl apply --server-side -f -",
    "sed 's|ghcr.io/dualmap/dualmap:0.1.0|REGISTRY/NAME:TAG|' manifests/install-namespaced.yaml"
    " | kubectl apply --server-side -f -",
    "helm template dualmap helm/dualmap --namespace dualmap-system --no-hooks"
    " --set crds.enabled=false,watchNamespace=chat > install.yaml",
)
# Namespaces that both the documents' commands and other tests create.
NAMESPACES = ("dualmap-system", "llm")
NOT_RUN = {
    "kubectl port-forward --namespace dualmap-system service/dualmap-gateway 8080:80": "no kubelet here forwards ports",
    "kubectl port-forward --namespace dualmap-system deployment/dualmap-router 9090": "no kubelet here forwards ports",
    "kubectl edit --namespace dualmap-system configmap/dualmap-models": "the command opens an editor",
    "kubectl patch secret dualmap-authority --namespace dualmap-system --type merge --patch '{\"data\": null}'": (
        "test_helm_secrets.py replaces the authority"
    ),
    "kubectl annotate pod qwen-3 serving.dualmap.dev/leave-at=2026-11-27T21:00:00Z": "test_notices.py annotates a pod",
}


class Shell:
    """A user's folder: the repository's files, pools of simulated engines, kubectl and helm."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        helm = binary(3, binaries_folder())
        assert helm is not None
        for name in ("helm", "manifests", "crds"):
            (folder / name).symlink_to(ROOT / name)
        for name, namespace in (("pool", "llm"), ("qwen", "default")):
            (folder / f"{name}.yaml").write_text(json.dumps(pool_of_engines(namespace, 1)))
        path = f"{binaries_folder()}:{helm.parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "KUBECONFIG": str(cluster.kubeconfig())}
        self._folder = folder

    async def run(self, *lines: str) -> None:
        """Run these commands one after the other. The first failed command fails the test."""
        image = references().dualmap
        registry, _, name = image.partition(":")[0].partition("/")
        for line in lines:
            typed = line.replace("REGISTRY/NAME:TAG", image).replace("registry=REGISTRY", f"registry={registry}")
            typed = typed.replace("repository=NAME", f"repository={name}")
            done = await asyncio.to_thread(
                subprocess.run,
                ["bash", "-o", "pipefail", "-c", typed],
                cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, f"$ {typed}\n{done.stdout}{done.stderr}"


@pytest.fixture(name="shell")
def _shell(cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> Iterator[Shell]:
    """A user's shell on a cluster without DualMap; the fixture removes DualMap after the test."""
    clear(cluster, tmp_path)
    yield Shell(cluster, tmp_path)
    clear(cluster, tmp_path)


def clear(cluster: Cluster, folder: Path) -> None:
    """Remove all objects with the documents' names, also objects of other tests."""
    helm = binary(3, binaries_folder())
    assert helm is not None
    release = Helm(helm, kubeconfig=cluster.kubeconfig(), namespace=NAMESPACES[0], directory=folder)
    release("uninstall", RELEASE, "--ignore-not-found", "--no-hooks")
    crds.remove(cluster)
    for namespace in NAMESPACES:
        crds.remove_namespace(cluster, namespace)
    for form in ("install-namespaced", "install"):
        file = str(ROOT / "manifests" / f"{form}.yaml")
        cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", file)
    for namespace in NAMESPACES:
        cluster.kubectl("wait", f"namespace/{namespace}", "--for=delete", "--timeout=55s")


def test_every_docs_command_is_in_the_test_list() -> None:
    # test_gaie.py runs the commands of this page.
    elsewhere = "docs/change-the-picker.md"
    typed = {each.line for each in commands("kubectl", "helm", "sed") if each.page != elsewhere}
    assert typed == {*INSTALL, *POOLS, *REMOVE, LET_GO, REMOVE_DEFINITION, *WITHOUT_HELM, *NOT_RUN}


@pytest.mark.timeout(900, func_only=True)
async def test_docs_commands_succeed(cluster: Cluster, shell: Shell) -> None:
    await shell.run(*INSTALL, *POOLS)

    async def scaled() -> bool:
        shown = await asyncio.to_thread(
            cluster.kubectl, "-n", "llm", "get", "statefulset/qwen", "-o", "jsonpath={.spec.replicas}"
        )
        return shown == "2"

    await until(scaled, "the pool has two instances", timeout_s=180.0)
    await shell.run(REMOVE[0], "kubectl apply -f pool.yaml", POOLS[2], REMOVE[1])
    await shell.run("kubectl delete --namespace llm dmpool/qwen --wait=false", LET_GO)
    await shell.run("kubectl wait --namespace llm --for=delete dmpool/qwen", REMOVE_DEFINITION)

    await shell.run("kubectl delete namespace dualmap-system", *WITHOUT_HELM[:2], INSTALL[-1], *WITHOUT_HELM[2:])
