"""The chart's ValidatingAdmissionPolicy on a real API server: who may write the pod template of a pool."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane import crds
from controlplane.product import ROOT, SYSTEM, Product, pool_manifest
from emulated_cluster.control_plane.cluster import Cluster, KubectlError
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from harness.waiting import until

POLICY = "dualmap-pod-templates"
REASON = "requires the permission to create pods"
SOON_S = 60.0


class Team:
    """A namespace with two users: ``pools`` may write pools, ``both`` may also create pods."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.template = pool_manifest("qwen", product.namespace, replicas=1)

    async def prepare(self) -> None:
        """Apply the policy of manifests/install.yaml and the users' rights; wait until the policy is enforced."""
        documents = yaml.safe_load_all((ROOT / "manifests" / "install.yaml").read_text())
        for each in documents:
            if each["kind"].startswith("ValidatingAdmissionPolicy"):
                await self.product.kubectl("apply", "-f", "-", input=json.dumps(each))
        pools = {"apiGroups": ["serving.dualmap.dev"], "resources": ["inferencepools", "inferencepools/scale"]}
        pools["verbs"] = ["get", "list", "create", "update", "patch", "delete"]
        pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
        for user, rules in (("pools", [pools]), ("both", [pools, pods])):
            name = {"name": user, "namespace": self.product.namespace}
            rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": name}
            await self.product.apply({**rbac, "kind": "Role", "rules": rules})
            reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": user}
            subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
            await self.product.apply({**rbac, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]})

        async def enforced() -> bool:
            return REASON in await self.try_as("pools", "create", "--dry-run=server", "-f", "-", manifest=self.template)

        await until(enforced, "the policy is enforced", timeout_s=SOON_S)

    async def run_as(self, user: str, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
        """Run kubectl as the user; raises KubectlError."""
        return await self.product.kubectl(*arguments, "--as", user, input=json.dumps(manifest) if manifest else None)

    async def try_as(self, user: str, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
        """Run kubectl as the user; return its output, or its error."""
        try:
            return await self.run_as(user, *arguments, manifest=manifest)
        except KubectlError as error:
            return str(error)


@pytest.fixture
async def team(cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> AsyncIterator[Team]:
    async with Product(cluster, tmp_path, routers=0) as product:
        team = Team(product)
        try:
            await team.prepare()
            yield team
        finally:
            for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
                await product.kubectl("delete", f"{kind}/{POLICY}", "--ignore-not-found")


async def test_pod_template_is_denied_without_the_right_to_create_pods(team: Team) -> None:
    said = await team.try_as("pools", "create", "-f", "-", manifest=team.template)
    assert "spec.workload.template" in said
    assert REASON in said
    assert not await team.product.kubectl("get", "dmpool", "-o", "name")

    await team.run_as("both", "create", "-f", "-", manifest=team.template)
    image = [{"op": "replace", "path": "/spec/workload/template/spec/containers/0/image", "value": "evil"}]
    patch = ("patch", "dmpool/qwen", "--type=json", "-p", json.dumps(image))
    assert REASON in await team.try_as("pools", *patch)
    await team.run_as("both", *patch)


async def test_pool_without_pod_template_needs_no_right_to_create_pods(team: Team) -> None:
    adopting = pool_manifest("adopting", team.product.namespace, replicas=1)
    adopting["spec"]["workload"] = {"selector": {"matchLabels": {"app": "qwen"}}}
    await team.run_as("pools", "create", "-f", "-", manifest=adopting)


async def test_pool_changes_outside_the_template_need_no_right_to_create_pods(team: Team) -> None:
    await team.run_as("both", "create", "-f", "-", manifest=team.template)
    await team.run_as("pools", "scale", "dmpool/qwen", "--replicas=2")
    await team.run_as("pools", "label", "dmpool/qwen", "team=a")
    await team.run_as("pools", "patch", "dmpool/qwen", "--type=merge", "-p", '{"spec": {"slo": {"ttft": "2s"}}}')
    pool = await team.product.pool()
    assert (pool["spec"]["replicas"], pool["spec"]["slo"]["ttft"]) == (2, "2s")
    await team.run_as("pools", "delete", "dmpool/qwen")


@pytest.mark.timeout(240, func_only=True)
async def test_operator_reconciles_and_deletes_pools_with_the_policy(team: Team) -> None:
    may = await team.product.kubectl(
        "auth", "can-i", "create", "pods", f"--as=system:serviceaccount:{SYSTEM}:dualmap-operator", check=False
    )
    assert may.startswith("no")
    await team.product.operator()
    await team.run_as("both", "create", "-f", "-", manifest=team.template)
    await team.product.until_active(1)
    await team.run_as("pools", "delete", "dmpool/qwen", "--timeout=90s")
    left = await asyncio.to_thread(team.product.cluster.kubectl, "get", crds.NAME, "-n", team.product.namespace)
    assert "qwen" not in left
