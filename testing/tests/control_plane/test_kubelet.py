"""Tests of the process kubelet with Kubernetes' own controllers."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from emulated_cluster.api.client import ApiError
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.fixtures import kubelet_on
from emulated_cluster.kubelet.pods import FAKE_ANNOTATION
from emulated_cluster.kubelet.process_kubelet import PodView, ProcessKubelet
from emulated_cluster.waiting import until
from namespaces import GATE, WITHIN_S, Namespace, condition, container_status, new_namespace, pod, shell, statefulset

FOREVER = "while :; do sleep 0.05; done"
ENGINE = {
    "name": "engine",
    "image": "any",
    "command": ["dualmap", "engine-sim"],
    "args": ["--host", "$(POD_IP)", "--port", "8000", "--model", "m", "--preset", "7b"],
    "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    "ports": [{"name": "http", "containerPort": 8000}],
    "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 5},
}


@pytest_asyncio.fixture(name="namespace")
async def _namespace(cluster: Cluster, kubelet: ProcessKubelet) -> AsyncIterator[Namespace]:
    async with new_namespace(cluster) as namespace:
        yield namespace


async def test_scaled_statefulset_has_matching_endpoints(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    namespace.apply(*statefulset("chat", replicas=2, container=ENGINE))
    for replicas in (2, 4, 1):
        namespace.scale("chat", replicas)
        wanted = {f"chat-{ordinal}" for ordinal in range(replicas)}

        async def settled(wanted: set[str] = wanted) -> bool:
            addresses = {pod.address for pod in pods_of(namespace, kubelet) if pod.name in wanted}
            return (
                await namespace.ready_pods() == wanted
                and {pod.name for pod in pods_of(namespace, kubelet)} == wanted
                and await namespace.ready_endpoints("chat") == addresses
            )

        await until(settled, f"{replicas} pods and as many endpoints", timeout_s=WITHIN_S)

    (address,) = await namespace.ready_endpoints("chat")
    assert (await namespace.pod("chat-0"))["status"]["podIP"] == address
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}:8000/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "m"


async def test_pod_with_false_readiness_gate_is_not_ready(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    namespace.apply(pod("gated", shell(FOREVER), readinessGates=[{"conditionType": GATE}]))

    await namespace.until_conditions("gated", ContainersReady="True", Ready="False")
    await namespace.set_gate("gated", "True")
    await namespace.until_conditions("gated", ContainersReady="True", Ready="True")
    await namespace.set_gate("gated", "False")
    await namespace.until_conditions("gated", ContainersReady="True", Ready="False")


async def test_pre_stop_delays_sigterm_while_pod_stays_ready(
    namespace: Namespace, kubelet: ProcessKubelet, tmp_path: Path
) -> None:
    hook = f"echo hook; until test -e {tmp_path}/go; do sleep 0.05; done; echo done"
    container = shell(f"trap 'echo term; exit 0' TERM; echo up; {FOREVER}")
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", hook]}}}
    namespace.apply(pod("slow", container))
    await namespace.until_ready("slow")
    process = kubelet.pod(namespace.name, "slow")
    await until_written(kubelet, process, "up")

    namespace.delete_pod("slow")
    await until_written(kubelet, process, "up hook")
    while_it_ends = await namespace.pod("slow")
    (tmp_path / "go").touch()
    await namespace.until_gone("slow")

    assert "deletionTimestamp" in while_it_ends["metadata"]
    assert condition(while_it_ends, "Ready") == "True"
    assert "running" in container_status(while_it_ends)["state"]
    assert kubelet.log(process).split() == ["up", "hook", "done", "term"]


async def test_crashed_container_restarts_and_increments_count(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    namespace.apply(pod("crashing", ENGINE))
    before = await namespace.until_ready("crashing")

    kubelet.kill(kubelet.pod(namespace.name, "crashing"))

    async def restarted() -> bool:
        return bool(container_status(await namespace.pod("crashing"))["restartCount"] == 1)

    await until(restarted, "a restart", timeout_s=WITHIN_S)
    after = await namespace.until_ready("crashing")
    assert container_status(after)["lastState"]["terminated"]["exitCode"] == 137
    assert after["status"]["podIP"] == before["status"]["podIP"]
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


async def test_process_that_ignores_sigterm_is_killed_after_grace(
    namespace: Namespace, kubelet: ProcessKubelet
) -> None:
    namespace.apply(pod("stubborn", shell(f"trap '' TERM; echo up; {FOREVER}"), terminationGracePeriodSeconds=3))
    await namespace.until_ready("stubborn")
    stubborn = kubelet.pod(namespace.name, "stubborn")
    await until_written(kubelet, stubborn, "up")

    namespace.delete_pod("stubborn")
    seen = await namespace.until_gone("stubborn")

    assert container_status(seen[-1])["state"]["terminated"]["exitCode"] == 137
    assert condition(seen[-1], "ContainersReady") == "False"
    assert not runs(stubborn)


async def test_forced_deletion_shortens_the_grace_period(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    namespace.apply(pod("forced", shell(f"trap '' TERM; {FOREVER}"), terminationGracePeriodSeconds=3600))
    await namespace.until_ready("forced")
    forced = kubelet.pod(namespace.name, "forced")

    namespace.delete_pod("forced")
    namespace.delete_pod("forced", "--force", "--grace-period=0")

    async def ended() -> bool:
        return not runs(forced) and not pods_of(namespace, kubelet)

    await until(ended, "the process and its worker end", timeout_s=WITHIN_S)


async def test_processes_keep_running_across_api_server_restart(
    cluster: Cluster, namespace: Namespace, kubelet: ProcessKubelet
) -> None:
    namespace.apply(pod("survivor", shell(FOREVER), readinessGates=[{"conditionType": GATE}]))
    await namespace.until_conditions("survivor", ContainersReady="True", Ready="False")
    before = pods_of(namespace, kubelet)

    await asyncio.to_thread(cluster.restart_apiserver)
    await namespace.set_gate("survivor", "True")

    assert container_status(await namespace.until_ready("survivor"))["restartCount"] == 0
    assert [each.processes for each in pods_of(namespace, kubelet)] == [each.processes for each in before]


async def test_lost_node_is_detected_and_its_processes_end(cluster: Cluster, namespace: Namespace) -> None:
    with cluster.node_lifecycle(), kubelet_on(cluster, "lost") as lost:
        namespace.apply(pod("stranded", shell(FOREVER), nodeName="lost"))
        await namespace.until_ready("stranded")
        stranded = lost.pod(namespace.name, "stranded")

        lost.freeze_node()
        await namespace.until_conditions("stranded", Ready="False")
        ran_on = runs(stranded)
        lost.lose_node()

        assert ran_on
        assert not runs(stranded)
        nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
        assert {each["metadata"]["name"]: condition(each, "Ready") for each in nodes} == {
            "node-0": "True",
            "lost": "Unknown",
        }
    assert "lost" not in cluster.kubectl("get", "nodes", "-o", "name")


async def test_fake_pods_have_a_status_but_no_process(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    fake = {"annotations": {FAKE_ANNOTATION: "true"}}
    namespace.apply(*statefulset("many", replicas=40, container={"name": "engine", "image": "any"}, metadata=fake))

    async def served() -> bool:
        return len(await namespace.ready_endpoints("many")) == 40

    await until(served, "40 endpoints", timeout_s=WITHIN_S)
    assert not any(each.processes for each in pods_of(namespace, kubelet))
    namespace.scale("many", 0)

    async def gone() -> bool:
        return not pods_of(namespace, kubelet)

    await until(gone, "no pod left", timeout_s=WITHIN_S)


async def test_container_without_command_reports_error_reason(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    namespace.apply(pod("imaginary", {"name": "engine", "image": "any"}))

    async def refused() -> bool:
        states = (await namespace.pod("imaginary"))["status"].get("containerStatuses") or [{"state": {}}]
        return "command is missing" in states[0]["state"].get("waiting", {}).get("message", "")

    await until(refused, "the reason", timeout_s=WITHIN_S)
    namespace.delete_pod("imaginary")
    await namespace.until_gone("imaginary")
    with pytest.raises(ApiError, match="not found"):
        await namespace.pod("imaginary")


def pods_of(namespace: Namespace, kubelet: ProcessKubelet) -> tuple[PodView, ...]:
    return tuple(each for each in kubelet.pods() if each.namespace == namespace.name)


async def until_written(kubelet: ProcessKubelet, pod: PodView, words: str) -> None:
    async def written() -> bool:
        return kubelet.log(pod).split() == words.split()

    await until(written, f"{pod.name} writes {words}", timeout_s=WITHIN_S)


def runs(pod: PodView) -> bool:
    (process,) = pod.processes.values()
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
