"""Tests of killed, deleted, evicted and rolled-out pods, of a lost node, and of a deleted pool."""

import json

import pytest

from controlplane.product import Operator, Product, pool_manifest
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.fixtures import kubelet_on
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from harness.traffic import failed, tally
from harness.waiting import until

pytestmark = pytest.mark.always_picked


async def serving(product: Product, replicas: int, *, abrupt: bool = False) -> Operator:
    operator = await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=replicas, abrupt=abrupt))
    await product.until_active(replicas)
    return operator


async def uids(product: Product) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in (await product.pods()).items()}


async def test_crashed_engine_rejoins_with_new_incarnation(product: Product, kubelet: ProcessKubelet) -> None:
    await product.operator()
    await product.apply(pool_manifest("qwen", product.namespace, replicas=2))
    await product.until_in_ring(2)
    (before,) = (each for each in (await product.pool())["status"]["ring"]["members"] if each["id"] == "qwen-1")
    kubelet.kill(kubelet.pod(product.namespace, "qwen-1"))
    await product.until(lambda status: "qwen-1" not in {each["id"] for each in status["ring"]["members"]})
    await product.until_in_ring(2)
    (after,) = (each for each in (await product.pool())["status"]["ring"]["members"] if each["id"] == "qwen-1")
    assert after["incarnation"] != before["incarnation"]


@pytest.mark.timeout(180, func_only=True)
@pytest.mark.parametrize("how", ["deleted", "evicted"])
async def test_deleted_or_evicted_pod_finishes_its_streams(product: Product, how: str) -> None:
    await serving(product, 2)
    await product.open_gateway()
    traffic = product.traffic(streams=6, plain=2, tokens=150)
    async with traffic.running():
        await traffic.streaming(5)
        before = await uids(product)
        if how == "deleted":
            await product.kubectl("delete", "pod/qwen-0", "--wait=false")
        else:
            eviction = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": "qwen-0", "namespace": product.namespace},
            }
            path = f"/api/v1/namespaces/{product.namespace}/pods/qwen-0/eviction"
            await product.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(eviction))

        async def replaced() -> bool:
            return (await uids(product)).get("qwen-0", before["qwen-0"]) != before["qwen-0"]

        await until(replaced, "qwen-0 has a successor", timeout_s=90.0)
        await product.until_in_ring(2)
    print(f"a pod {how} under 8 clients: {dict(tally(traffic.exchanges))}")
    assert failed(traffic.exchanges) == []


@pytest.mark.timeout(300, func_only=True)
async def test_template_change_rolls_one_pod_at_a_time(product: Product) -> None:
    operator = await serving(product, 3, abrupt=True)
    await product.open_gateway()
    before = await uids(product)
    manifest = pool_manifest("qwen", product.namespace, replicas=3, abrupt=True)
    manifest["spec"]["workload"]["template"]["metadata"] = {"labels": {"release": "two"}}
    traffic = product.traffic(streams=6, plain=2, tokens=100)

    async with product.recording() as history, traffic.running():
        await traffic.streaming(5)
        await product.apply(manifest)
        await product.until(lambda status: any(each["state"] == "Draining" for each in status["ring"]["members"]))
        # Another operator continues the work.
        await operator.kill()
        await product.operator("operator-1")

        async def rolled() -> bool:
            after = await uids(product)
            return after.keys() == before.keys() and not set(after.values()) & set(before.values())

        await until(rolled, "every pod is replaced", timeout_s=240.0)
        await product.until_active(3)
    print(f"roll-out of 3 pods under 8 clients: {dict(tally(traffic.exchanges))}")
    assert failed(traffic.exchanges) == []
    assert history.fewest_active() == 2
    assert [pod["metadata"]["labels"]["release"] for pod in (await product.pods()).values()] == ["two"] * 3


@pytest.mark.timeout(180, func_only=True)
async def test_deleted_pool_finishes_streams_and_removes_children(product: Product) -> None:
    operator = await serving(product, 2, abrupt=True)
    await product.open_gateway()
    traffic = product.traffic(streams=4, plain=0, tokens=400)
    async with traffic.running():
        await traffic.streaming(4)
        incident = traffic.incident()
        await product.kubectl("delete", "dmpool/qwen", "--wait=false")
        await product.until(lambda status: {each["state"] for each in status["ring"]["members"]} == {"Draining"})
        # Another operator continues the work.
        await operator.kill()
        await product.operator("operator-1")

        async def all_gone() -> bool:
            left = await product.kubectl("get", "dmpool,statefulset,service,pdb", "-o", "name")
            return left.split() == []

        await until(all_gone, "pool and children are gone", timeout_s=90.0)
    # During the drain, the router rejects new requests, and requests in flight complete.
    assert failed(incident.caught) == []


@pytest.mark.timeout(180, func_only=True)
async def test_terminating_adopted_pods_leave_the_ring(product: Product) -> None:
    await product.operator()
    template = pool_manifest("vllm", product.namespace, replicas=2)["spec"]["workload"]["template"]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm", "namespace": product.namespace},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "vllm"}},
            "template": {"metadata": {"labels": {"app": "vllm"}}, "spec": template["spec"]},
        },
    }
    pool = pool_manifest("qwen", product.namespace, replicas=7, workload={"selector": {"matchLabels": {"app": "vllm"}}})
    await product.apply(deployment)
    await product.apply(pool)
    await product.until(lambda status: status.get("inRing") == 2)
    limited = {each["type"]: each for each in (await product.pool())["status"]["conditions"]}["ScalingLimited"]
    assert limited["status"] == "True"
    for pod in (await product.pods()).values():
        owners = {each["kind"] for each in pod["metadata"]["ownerReferences"]}
        assert (owners, pod["metadata"].get("finalizers")) == ({"ReplicaSet"}, None)
    await product.kubectl("scale", "deployment/vllm", "--replicas=1")
    await product.until(lambda status: len(status["ring"]["members"]) == 1)


@pytest.mark.timeout(240, func_only=True)
async def test_pods_on_lost_node_leave_the_ring(product: Product, cluster: Cluster) -> None:
    with kubelet_on(cluster, "node-lost") as lost, cluster.node_lifecycle():
        manifest = pool_manifest("qwen", product.namespace, replicas=2)
        spec = manifest["spec"]["workload"]["template"]["spec"]
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"serving.dualmap.dev/pool": "qwen"}},
            }
        ]
        await product.operator()
        await product.apply(manifest)
        await product.until_active(2)
        # The node lifecycle controller marks only pods that were ready.
        await product.until(lambda status: status.get("readyReplicas") == 2)
        (gone,) = {pod.name for pod in lost.pods() if pod.namespace == product.namespace}
        lost.lose_node()
        await product.until(lambda status: [each["id"] for each in status["ring"]["members"]] == [_other(gone)])


def _other(name: str) -> str:
    return {"qwen-0": "qwen-1", "qwen-1": "qwen-0"}[name]
