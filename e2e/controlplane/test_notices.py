"""Tests of pods with notice: annotated, marked as disrupted, and evicted with a short grace period."""

import json
import time
from typing import Any

import pytest

from controlplane.product import Product, pool_manifest
from dualmap.objects.times import time_text

# The pods of this test keep serving for this time after their deletion.
STOP_S = 20


def member(status: dict[str, Any], name: str) -> dict[str, Any]:
    members = status.get("ring", {}).get("members", [])
    return next((each for each in members if each["id"] == name), {})


async def until_leaving(product: Product, name: str, leave_at: str) -> None:
    """Wait until a pod's member is Draining with this leaving time, and the other members have none."""

    def leaves(status: dict[str, Any]) -> bool:
        others = [each for each in status["ring"]["members"] if each["id"] != name]
        found = member(status, name)
        return (found.get("state"), found.get("leaveAt")) == ("Draining", leave_at) and not any(
            "leaveAt" in each for each in others
        )

    await product.until(leaves)


@pytest.mark.timeout(300, func_only=True)
async def test_pod_with_notice_drains_until_its_time(product: Product) -> None:
    await product.operator()
    manifest = pool_manifest("qwen", product.namespace, replicas=3)
    pod = manifest["spec"]["workload"]["template"]["spec"]
    pod["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(STOP_S)]}}}
    await product.apply(manifest)
    await product.until_active(3)

    leave_at = time_text(time.time() + 3600)
    await product.kubectl("annotate", "pod/qwen-2", f"serving.dualmap.dev/leave-at={leave_at}")
    await until_leaving(product, "qwen-2", leave_at)
    await product.kubectl("annotate", "pod/qwen-2", "serving.dualmap.dev/leave-at-")
    await product.until_active(3)

    began_s = int(time.time())
    await disrupt(product, "qwen-1", "True", began_s)
    grace_s = (await product.pods())["qwen-1"]["spec"]["terminationGracePeriodSeconds"]
    await until_leaving(product, "qwen-1", time_text(began_s + grace_s))
    await disrupt(product, "qwen-1", "False", began_s)
    await product.until_active(3)

    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "qwen-0", "namespace": product.namespace},
        "deleteOptions": {"gracePeriodSeconds": STOP_S + 10},
    }
    path = f"/api/v1/namespaces/{product.namespace}/pods/qwen-0/eviction"
    await product.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(eviction))
    leave_at = (await product.pods())["qwen-0"]["metadata"]["deletionTimestamp"]
    # The eviction itself also sets the condition DisruptionTarget, whose grace period ends later.
    await until_leaving(product, "qwen-0", leave_at)
    assert member((await product.pool())["status"], "qwen-0")["weight"] == 0
    await product.until_active(3)


async def disrupt(product: Product, name: str, status: str, since_s: float) -> None:
    """Set a pod's condition DisruptionTarget, as the scheduler does before a preemption."""
    condition = {
        "type": "DisruptionTarget",
        "status": status,
        "reason": "PreemptionByScheduler",
        "message": "test",
        "lastTransitionTime": time_text(since_s),
    }
    patch = json.dumps({"status": {"conditions": [condition]}})
    await product.kubectl("patch", f"pod/{name}", "--subresource=status", "--type=strategic", "-p", patch)
