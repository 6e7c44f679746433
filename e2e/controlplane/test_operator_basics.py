"""Tests that the operator creates a pool's pods and status on a real control plane, and writes only after changes."""

import asyncio
import json
from typing import Any

import pytest

from controlplane.product import SYSTEM, Operator, Product, pool_manifest
from harness.waiting import until

OPERATOR = "system:serviceaccount:dualmap-system:dualmap-operator"
WRITES = ("create", "update", "patch", "delete", "deletecollection")
REST_S = 20.0
# Time limits for the takeover by another operator, and for an operator's exit after SIGTERM.
TAKE_OVER_S = 60.0
STOP_S = 30.0
CHILDREN = ("statefulset", "service", "poddisruptionbudget")


def condition(status: dict[str, Any], kind: str) -> str:
    return {each["type"]: each["status"] for each in status.get("conditions", [])}.get(kind, "absent")


async def joined(product: Product, *, replicas: int) -> None:
    """Apply a pool and wait until all its members receive requests."""
    await product.apply(pool_manifest("qwen", product.namespace, replicas=replicas))
    await product.until_in_ring(replicas)


async def applied(product: Product, *, replicas: int, **spec: Any) -> None:
    """Apply a pool and wait until all its members are in the ring, and the status no longer changes."""
    await product.apply(pool_manifest("qwen", product.namespace, replicas=replicas, **spec))
    await product.until_active(replicas)
    await product.until(
        lambda status: (
            status.get("readyReplicas") == replicas
            and condition(status, "Available") == "True"
            and condition(status, "Progressing") != "True"
            and condition(status, "RingSynced") == "True"
        )
    )


def operators_requests(product: Product) -> list[dict[str, Any]]:
    """Return the audit log's entries of the operator's account, one per request, including open watches."""
    return [
        entry
        for entry in product.cluster.audit()
        if entry["user"].get("username", "") == OPERATOR and entry["stage"] == "ResponseComplete"
    ]


async def leader(product: Product) -> str:
    lease = json.loads(await product.kubectl("get", "lease/dualmap-operator", "-n", "dualmap-system", "-o", "json"))
    holder: str = lease["spec"].get("holderIdentity", "")
    return holder


async def test_applied_pool_gets_ready_pods_and_a_status(product: Product) -> None:
    operator = await product.operator()
    await applied(product, replicas=2)

    pool = await product.pool()
    status = pool["status"]
    assert (status["replicas"], status["readyReplicas"], status["inRing"]) == (2, 2, 2)
    assert status["selector"] == "serving.dualmap.dev/pool=qwen"
    assert status["observedGeneration"] == pool["metadata"]["generation"]
    assert {each["observedGeneration"] for each in status["conditions"]} == {pool["metadata"]["generation"]}
    assert pool["metadata"]["finalizers"] == ["serving.dualmap.dev/drain"]
    assert await operator.healthy()
    header, row = (await product.kubectl("get", "dmpool")).splitlines()
    assert header.split() == ["NAME", "DESIRED", "READY", "IN-RING", "SLO", "HIT", "POLICY", "AGE"]
    assert row.split()[:4] == ["qwen", "2", "2", "2"]
    events = await product.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}")
    assert {"Accepted", "MemberActive"} <= set(events.split())


@pytest.mark.timeout(240, func_only=True)
async def test_pool_serves_until_its_prefill_pool_is_usable(product: Product) -> None:
    def accepted(status: dict[str, Any]) -> tuple[str, str]:
        found = {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions", [])}
        return found.get("Accepted", ("absent", ""))

    async def told() -> bool:
        events = await product.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}")
        return "PrefillPoolUnusable" in events.split()

    await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=1, prefillPool="qwen-prefill"))
    await product.until(
        lambda status: accepted(status) == ("False", "PrefillPoolUnusable") and condition(status, "Available") == "True"
    )
    await until(told, "an Event names the reason", timeout_s=60.0)

    await product.apply(pool_manifest("qwen-prefill", product.namespace, replicas=1))
    await product.until(lambda status: accepted(status)[0] == "True" and condition(status, "Available") == "True")


async def test_idle_operator_writes_nothing_and_reads_little(product: Product) -> None:
    # After a restart by other tests, the API server rejects all requests for a short time.
    began = len(operators_requests(product))
    await product.operator("operator-0", "--leader-election")
    await applied(product, replicas=1)
    await asyncio.sleep(2.0)
    before = len(operators_requests(product)) - began
    await asyncio.sleep(REST_S)

    requests = operators_requests(product)[began:]
    while_resting = requests[before:]
    written = [
        (entry["verb"], entry["objectRef"]["resource"])
        for entry in while_resting
        if entry["verb"] in WRITES and entry["objectRef"]["resource"] != "leases"
    ]
    assert written == []
    assert len(while_resting) <= REST_S
    assert [entry for entry in requests if entry["responseStatus"]["code"] == 403] == []


@pytest.mark.parametrize("kind", CHILDREN)
async def test_deleted_child_object_is_recreated(product: Product, kind: str) -> None:
    await product.operator()
    await applied(product, replicas=1)
    before = await product.kubectl("get", f"{kind}/qwen", "-o", "jsonpath={.metadata.uid}")
    ring = (await product.pool())["status"]["ring"]
    orphan = ("--cascade=orphan",) if kind == "statefulset" else ()
    await product.kubectl("delete", f"{kind}/qwen", *orphan)

    async def back() -> bool:
        uid = await product.kubectl("get", f"{kind}/qwen", "-o", "jsonpath={.metadata.uid}", check=False)
        return "NotFound" not in uid and uid != before

    await until(back, f"{kind} is back", timeout_s=60.0)
    child = json.loads(await product.kubectl("get", f"{kind}/qwen", "-o", "json"))
    (owner,) = child["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("InferencePool", "qwen", True)
    assert (await product.pool())["status"]["ring"] == ring, "its pods serve on"


async def test_edited_child_objects_are_restored(product: Product) -> None:
    await product.operator()
    await applied(product, replicas=1)
    await product.kubectl("scale", "statefulset/qwen", "--replicas=3")
    await product.kubectl("label", "service/qwen", "serving.dualmap.dev/pool-")
    await product.kubectl("patch", "poddisruptionbudget/qwen", "--type=merge", "-p", '{"spec":{"maxUnavailable":7}}')

    async def undone() -> bool:
        seen = [
            await product.kubectl("get", child, "-o", f"jsonpath={{{path}}}")
            for child, path in (
                ("statefulset/qwen", ".spec.replicas"),
                ("service/qwen", r".metadata.labels.serving\.dualmap\.dev/pool"),
                ("poddisruptionbudget/qwen", ".spec.maxUnavailable"),
            )
        ]
        return seen == ["1", "qwen", "1"]

    await until(undone, "all three are as they were", timeout_s=60.0)


async def test_deleted_pool_drains_and_removes_child_objects(product: Product) -> None:
    await product.operator()
    await joined(product, replicas=2)
    await product.kubectl("delete", "dmpool/qwen", "--timeout=60s")

    async def gone() -> bool:
        left = await product.kubectl("get", "statefulset,service,poddisruptionbudget,pods", "-o", "name")
        return left == ""

    await until(gone, "pods and children are gone", timeout_s=60.0)
    events = await product.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}")
    assert "MemberDraining" in events.split()


async def test_pool_deleted_without_operator_drains_after_operator_start(product: Product) -> None:
    first = await product.operator()
    await applied(product, replicas=1)
    await first.kill()
    await product.kubectl("delete", "dmpool/qwen", "--wait=false")

    await product.operator("operator-1")

    async def gone() -> bool:
        return await product.kubectl("get", "dmpool", "-o", "name") == ""

    await until(gone, "the pool is gone", timeout_s=60.0)
    events = await product.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}")
    assert "MemberDraining" in events.split()


@pytest.mark.timeout(240, func_only=True)
async def test_pod_deleted_during_watch_outage_leaves_the_ring(product: Product) -> None:
    operator = await product.operator()
    await joined(product, replicas=2)
    # The controllers must not recreate the pod before the operator has processed the deletion.
    operator.pause()
    await product.kubectl("delete", "statefulset/qwen", "--cascade=orphan")
    await product.kubectl("delete", "pod/qwen-1", "--force", "--grace-period=0")
    await asyncio.to_thread(product.cluster.restart_apiserver)
    operator.resume()

    await product.until(lambda status: [each["id"] for each in status["ring"]["members"]] == ["qwen-0"])
    # The StatefulSet controller creates the pod again, and the member joins.
    await product.until_in_ring(2)


@pytest.mark.timeout(240, func_only=True)
async def test_standby_of_two_operators_writes_nothing(product: Product) -> None:
    first = await product.operator("operator-0", "--leader-election")

    async def led() -> bool:
        return await leader(product) != ""

    await until(led, "somebody leads")
    holder = await leader(product)
    follower = await product.account_like_the_operators("dualmap-operator-1")
    second = await product.operator("operator-1", "--leader-election", kubeconfig=product.kubeconfig(follower))
    await applied(product, replicas=1)
    assert await leader(product) == holder
    assert await first.healthy()
    assert await second.healthy()
    assert written_by(product, "dualmap-operator") >= {"inferencepools", "statefulsets", "pods"}
    assert written_by(product, follower) <= {"leases"}, "a follower acts"

    await taken_over_after(product, holder, first.stop())
    assert first.returncode == 0
    assert await leader(product) != ""
    holder = await leader(product)
    third = await product.operator("operator-2", "--leader-election")
    await taken_over_after(product, holder, second.kill())
    await product.kubectl("scale", "dmpool/qwen", "--replicas=2")
    await product.until_in_ring(2)
    assert await third.healthy()
    leases = await product.kubectl("get", "leases", "-n", "dualmap-system", "-o", "name")
    assert len(leases.split()) == 1


def written_by(product: Product, account: str) -> set[str]:
    """Return the resources that a DualMap service account has written in this test."""
    return {
        entry["objectRef"]["resource"]
        for entry in product.audit()
        if entry["user"].get("username", "") == f"system:serviceaccount:{SYSTEM}:{account}" and entry["verb"] in WRITES
    }


async def taken_over_after(product: Product, holder: str, end: Any) -> None:
    await end

    async def another() -> bool:
        return await leader(product) not in ("", holder)

    await until(another, "another operator leads", timeout_s=TAKE_OVER_S)


async def test_leader_exits_within_grace_period_on_sigterm(product: Product) -> None:
    operator = await product.operator("operator-0", "--leader-election")
    await applied(product, replicas=1)
    await stopped(operator)
    assert await leader(product) == ""


async def test_standby_exits_within_grace_period_on_sigterm(product: Product) -> None:
    await product.operator("operator-0", "--leader-election")
    await stopped(await product.operator("operator-1", "--leader-election"))


async def stopped(operator: Operator) -> None:
    operator.terminate()
    assert await operator.wait(timeout_s=STOP_S) == 0


async def test_leader_that_cannot_renew_its_lease_exits(product: Product) -> None:
    operator = await product.operator("operator-0", "--leader-election")
    await applied(product, replicas=1)
    await asyncio.to_thread(product.cluster.stop_apiserver)
    try:
        assert await operator.wait(timeout_s=TAKE_OVER_S) == 1
    finally:
        await asyncio.to_thread(product.cluster.start_apiserver)
    assert "was not renewed within 8 s" in operator.output()
