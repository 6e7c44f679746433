"""Tests of least privilege with the audit log: operator and router get no 403 and use every granted verb.

Only requests of this test count.
"""

import json
from contextlib import suppress
from typing import Any

import pytest

from controlplane.product import SYSTEM, Product, pool_manifest
from emulated_cluster.control_plane.cluster import Cluster
from harness.waiting import until

ACCOUNTS = ("dualmap-operator", "dualmap-router")
GENERATED = {
    "authority": "dualmap-authority",
    "server": "dualmap-router-mtls",
    "client": "dualmap-gateway-mtls",
    "redis": "dualmap-redis-password",
    "hash": "dualmap-hash-key",
}
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


@pytest.mark.timeout(240, func_only=True)
async def test_granted_rbac_rights_equal_the_rights_in_use(product: Product, cluster: Cluster) -> None:
    # Remove the Lease of earlier tests, because the creation of a Lease needs its own permission.
    await product.kubectl("delete", "lease/dualmap-operator", "-n", SYSTEM, "--ignore-not-found")
    # A complete life cycle: create, grow, roll out, shrink, delete; leader election, router discovery by Service, a
    # deleted child; the generated Secrets.
    await product.publish_routers()
    await empty_secrets(product)
    generating = [f"--generate={kind}={name}" for kind, name in GENERATED.items()]
    operator = await product.operator("operator-rights", "--leader-election", *generating, finds_routers=True)
    manifest = pool_manifest("qwen", product.namespace, replicas=1)
    await product.apply(manifest)
    await product.until_active(1)
    manifest["spec"]["replicas"] = 2
    await product.apply(manifest)
    await product.until_active(2)
    manifest["spec"]["workload"]["template"]["metadata"] = {"labels": {"release": "two"}}
    await product.apply(manifest)
    await product.until(lambda status: any(each["state"] == "Draining" for each in status["ring"]["members"]))
    await product.kubectl("delete", "service/qwen", "poddisruptionbudget/qwen")
    await product.until_active(2)
    await product.kubectl("scale", "dmpool/qwen", "--replicas=1")
    await product.until_active(1)
    await product.kubectl("delete", "dmpool/qwen", "--timeout=60s")
    assert await operator.stop() == 0
    await product.kubectl("delete", "secret", *GENERATED.values(), "-n", SYSTEM)

    granted = {account: _granted(cluster, account, product.namespace) for account in ACCOUNTS}

    async def all_used() -> bool:
        used, _ = _used(product)
        return all(granted[account] <= used[account] for account in ACCOUNTS)

    # The API server writes the entry of a request after its response. The assertions below say what is missing.
    with suppress(AssertionError):
        await until(all_used, "every permission is used")
    used, refused = _used(product)
    assert refused == []
    for account in ACCOUNTS:
        assert granted[account] - used[account] == set(), f"{account} never uses"
        assert used[account] - granted[account] == set(), f"{account} does what its roles do not say"


def _used(product: Product) -> tuple[dict[str, set[Right]], list[tuple[str, Right]]]:
    """Return the permissions that each account has used, and the refused requests."""
    used: dict[str, set[Right]] = {account: set() for account in ACCOUNTS}
    refused = []
    for entry in product.audit():
        account = entry["user"].get("username", "").removeprefix(f"system:serviceaccount:{SYSTEM}:")
        if account not in used:
            continue
        right = _right(entry["objectRef"], entry["verb"])
        code = entry.get("responseStatus", {}).get("code")
        if code == 403:
            refused.append((account, right))
        else:
            used[account].add(right)
        # A server-side apply of a new object also needs the permission `create`, but the log has only the verb `patch`.
        if (entry["verb"], code) == ("patch", 201):
            used[account].add(_right(entry["objectRef"], "create"))
    return used, refused


async def empty_secrets(product: Product) -> None:
    """Create the Secrets that the operator generates, as the installation has them: without content."""
    await product.kubectl("delete", "secret", *GENERATED.values(), "-n", SYSTEM, "--ignore-not-found")
    for name in GENERATED.values():
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": SYSTEM}}
        await product.apply(secret, SYSTEM)


def _right(reference: dict[str, Any], verb: str) -> Right:
    resource = reference["resource"]
    if "subresource" in reference:
        resource += f"/{reference['subresource']}"
    return reference.get("apiGroup", ""), resource, verb


def _granted(cluster: Cluster, account: str, namespace: str) -> set[Right]:
    """Return the permissions of all roles bound to the account: cluster-wide, in the pools' namespace, and in the
    system's namespace.
    """
    bindings = json.loads(cluster.kubectl("get", "clusterrolebindings", "-o", "json"))["items"]
    for where in (SYSTEM, namespace):
        bindings += json.loads(cluster.kubectl("get", "rolebindings", "-n", where, "-o", "json"))["items"]
    granted: set[Right] = set()
    for binding in bindings:
        subjects = {(each["kind"], each.get("namespace"), each["name"]) for each in binding.get("subjects", ())}
        if ("ServiceAccount", SYSTEM, account) not in subjects:
            continue
        role, where = binding["roleRef"], binding["metadata"].get("namespace")
        scope = ("-n", where) if role["kind"] == "Role" else ()
        answer = cluster.kubectl("get", role["kind"], role["name"], *scope, "-o", "json")
        granted |= {
            (group, resource, verb)
            for rule in json.loads(answer)["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
    return granted
