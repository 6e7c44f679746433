"""Least privilege: nothing is refused to operator and router, and no granted verb goes unused, by the audit log."""

import json
from typing import Any

import pytest

from controlplane.cluster import Cluster
from controlplane.product import SYSTEM, Product, pool_manifest

ACCOUNTS = ("dualmap-operator", "dualmap-router")
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


@pytest.mark.timeout(240, func_only=True)
async def test_every_right_is_used_and_none_is_missing(product: Product, cluster: Cluster) -> None:
    # A life with everything in it: made, rolled, drained, deleted; a leader elected, routers found by their Service.
    await product.operator("operator-rights", "--leader-election", finds_routers=True)
    manifest = pool_manifest("qwen", product.namespace, replicas=2)
    await product.apply(manifest)
    await product.until_active(2)
    manifest["spec"]["workload"]["template"]["metadata"] = {"labels": {"release": "two"}}
    await product.apply(manifest)
    await product.until(lambda status: any(each["state"] == "Draining" for each in status["ring"]["members"]))
    await product.until_active(2)
    await product.kubectl("delete", "dmpool/qwen", "--timeout=60s")
    used: dict[str, set[Right]] = {account: set() for account in ACCOUNTS}
    refused = []
    for entry in cluster.audit():
        account = entry["user"]["username"].rpartition(":")[2]
        if account not in used or "objectRef" not in entry:
            continue
        right = _right(entry["objectRef"], entry["verb"])
        code = entry.get("responseStatus", {}).get("code")
        if code == 403:
            refused.append((account, right))
        else:
            used[account].add(right)
        # A server-side apply that makes its object needs the right to create, too, and is logged as the patch it is.
        if (entry["verb"], code) == ("patch", 201):
            used[account].add(_right(entry["objectRef"], "create"))
    assert refused == []
    for account in ACCOUNTS:
        granted = _granted(cluster, account, product.namespace)
        assert granted - used[account] == set(), f"{account} never uses"
        assert used[account] - granted == set(), f"{account} does what its roles do not say"


def _right(reference: dict[str, Any], verb: str) -> Right:
    resource = reference["resource"]
    if "subresource" in reference:
        resource += f"/{reference['subresource']}"
    return reference.get("apiGroup", ""), resource, verb


def _granted(cluster: Cluster, account: str, namespace: str) -> set[Right]:
    granted: set[Right] = set()
    for where in (SYSTEM, namespace):
        answer = cluster.kubectl("get", "roles", account, "-n", where, "-o", "json", "--ignore-not-found")
        for rule in json.loads(answer)["rules"] if answer else ():
            granted |= {
                (group, resource, verb)
                for group in rule["apiGroups"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
    return granted
