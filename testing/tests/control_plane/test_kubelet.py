"""The process kubelet works with Kubernetes' own controllers as a real one does."""

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
from team import GATE, WITHIN_S, Team, condition, container_status, pod, shell, statefulset, team_on

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


@pytest_asyncio.fixture(name="team")
async def _team(cluster: Cluster, kubelet: ProcessKubelet) -> AsyncIterator[Team]:
    async with team_on(cluster) as team:
        yield team


async def test_statefulset_scaled_has_matching_endpoints(team: Team, kubelet: ProcessKubelet) -> None:
    team.apply(*statefulset("chat", replicas=2, container=ENGINE))
    for replicas in (2, 4, 1):
        team.scale("chat", replicas)
        wanted = {f"chat-{ordinal}" for ordinal in range(replicas)}

        async def settled(wanted: set[str] = wanted) -> bool:
            addresses = {pod.address for pod in pods_of(team, kubelet) if pod.name in wanted}
            return (
                await team.ready_pods() == wanted
                and {pod.name for pod in pods_of(team, kubelet)} == wanted
                and await team.ready_endpoints("chat") == addresses
            )

        await until(settled, f"{replicas} pods and as many endpoints", timeout_s=WITHIN_S)

    (address,) = await team.ready_endpoints("chat")
    assert (await team.pod("chat-0"))["status"]["podIP"] == address
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}:8000/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "m"


async def test_pod_with_closed_gate_is_not_ready(team: Team, kubelet: ProcessKubelet) -> None:
    team.apply(pod("gated", shell(FOREVER), readinessGates=[{"conditionType": GATE}]))

    await team.until_says("gated", ContainersReady="True", Ready="False")
    await team.set_gate("gated", "True")
    await team.until_says("gated", ContainersReady="True", Ready="True")
    await team.set_gate("gated", "False")
    await team.until_says("gated", ContainersReady="True", Ready="False")


async def test_pre_stop_delays_sigterm_and_the_pod_stays_ready(
    team: Team, kubelet: ProcessKubelet, tmp_path: Path
) -> None:
    hook = f"echo hook; until test -e {tmp_path}/go; do sleep 0.05; done; echo done"
    container = shell(f"trap 'echo term; exit 0' TERM; echo up; {FOREVER}")
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", hook]}}}
    team.apply(pod("slow", container))
    await team.until_ready("slow")
    process = kubelet.pod(team.namespace, "slow")
    await until_written(kubelet, process, "up")

    team.delete_pod("slow")
    await until_written(kubelet, process, "up hook")
    while_it_ends = await team.pod("slow")
    (tmp_path / "go").touch()
    await team.until_gone("slow")

    assert "deletionTimestamp" in while_it_ends["metadata"]
    assert condition(while_it_ends, "Ready") == "True"
    assert "running" in container_status(while_it_ends)["state"]
    assert kubelet.log(process).split() == ["up", "hook", "done", "term"]


async def test_container_crashed_restarts_and_is_counted(team: Team, kubelet: ProcessKubelet) -> None:
    team.apply(pod("crashing", ENGINE))
    before = await team.until_ready("crashing")

    kubelet.kill(kubelet.pod(team.namespace, "crashing"))

    async def restarted() -> bool:
        return bool(container_status(await team.pod("crashing"))["restartCount"] == 1)

    await until(restarted, "a restart", timeout_s=WITHIN_S)
    after = await team.until_ready("crashing")
    assert container_status(after)["lastState"]["terminated"]["exitCode"] == 137
    assert after["status"]["podIP"] == before["status"]["podIP"]
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


async def test_process_ignoring_sigterm_is_killed_after_grace(team: Team, kubelet: ProcessKubelet) -> None:
    team.apply(pod("stubborn", shell(f"trap '' TERM; echo up; {FOREVER}"), terminationGracePeriodSeconds=3))
    await team.until_ready("stubborn")
    stubborn = kubelet.pod(team.namespace, "stubborn")
    await until_written(kubelet, stubborn, "up")

    team.delete_pod("stubborn")
    seen = await team.until_gone("stubborn")

    assert container_status(seen[-1])["state"]["terminated"]["exitCode"] == 137
    assert condition(seen[-1], "ContainersReady") == "False"
    assert not runs(stubborn)


async def test_forced_deletion_shortens_the_grace_period(team: Team, kubelet: ProcessKubelet) -> None:
    team.apply(pod("forced", shell(f"trap '' TERM; {FOREVER}"), terminationGracePeriodSeconds=3600))
    await team.until_ready("forced")
    forced = kubelet.pod(team.namespace, "forced")

    team.delete_pod("forced")
    team.delete_pod("forced", "--force", "--grace-period=0")

    async def ended() -> bool:
        return not runs(forced) and not pods_of(team, kubelet)

    await until(ended, "the process and its worker end", timeout_s=WITHIN_S)


async def test_processes_survive_a_restart_of_the_api_server(
    cluster: Cluster, team: Team, kubelet: ProcessKubelet
) -> None:
    team.apply(pod("survivor", shell(FOREVER), readinessGates=[{"conditionType": GATE}]))
    await team.until_says("survivor", ContainersReady="True", Ready="False")
    before = pods_of(team, kubelet)

    await asyncio.to_thread(cluster.restart_apiserver)
    await team.set_gate("survivor", "True")

    assert container_status(await team.until_ready("survivor"))["restartCount"] == 0
    assert [each.processes for each in pods_of(team, kubelet)] == [each.processes for each in before]


async def test_node_lost_is_detected_and_its_processes_end(cluster: Cluster, team: Team) -> None:
    with cluster.node_lifecycle(), kubelet_on(cluster, "lost") as lost:
        team.apply(pod("stranded", shell(FOREVER), nodeName="lost"))
        await team.until_ready("stranded")
        stranded = lost.pod(team.namespace, "stranded")

        lost.freeze_node()
        await team.until_says("stranded", Ready="False")
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


async def test_fake_pods_have_a_status_and_no_process(team: Team, kubelet: ProcessKubelet) -> None:
    fake = {"annotations": {FAKE_ANNOTATION: "true"}}
    team.apply(*statefulset("many", replicas=40, container={"name": "engine", "image": "any"}, metadata=fake))

    async def served() -> bool:
        return len(await team.ready_endpoints("many")) == 40

    await until(served, "40 endpoints", timeout_s=WITHIN_S)
    assert not any(each.processes for each in pods_of(team, kubelet))
    team.scale("many", 0)

    async def gone() -> bool:
        return not pods_of(team, kubelet)

    await until(gone, "no pod left", timeout_s=WITHIN_S)


async def test_container_without_command_reports_the_reason(team: Team, kubelet: ProcessKubelet) -> None:
    team.apply(pod("imaginary", {"name": "engine", "image": "any"}))

    async def refused() -> bool:
        states = (await team.pod("imaginary"))["status"].get("containerStatuses") or [{"state": {}}]
        return "command is missing" in states[0]["state"].get("waiting", {}).get("message", "")

    await until(refused, "the reason", timeout_s=WITHIN_S)
    team.delete_pod("imaginary")
    await team.until_gone("imaginary")
    with pytest.raises(ApiError, match="not found"):
        await team.pod("imaginary")


def pods_of(team: Team, kubelet: ProcessKubelet) -> tuple[PodView, ...]:
    return tuple(each for each in kubelet.pods() if each.namespace == team.namespace)


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
