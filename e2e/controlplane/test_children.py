"""Tests that a real API server accepts a pool's child objects with strict validation, and does not change them."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from controlplane import crds
from dualmap_operator.decide.spec import PoolSpec, read_spec
from dualmap_operator.decide.workload.children import children
from emulated_cluster.control_plane.cluster import Cluster

ROOT = Path(__file__).parents[2]
ENGINE = {"name": "engine", "image": "vllm/vllm-openai:v0.32.0"}
PLAIN = {"spec": {"containers": [ENGINE]}}
RICH = {
    "metadata": {"labels": {"app": "qwen"}, "annotations": {"a": "b"}, "creationTimestamp": None},
    "spec": {
        "containers": [
            {"name": "proxy", "image": "envoy", "ports": [{"containerPort": 9901}]},
            {
                **ENGINE,
                "args": ["--model=m", "--shutdown-timeout=90"],
                "env": [{"name": "HOME", "value": "/tmp"}],
                "ports": [{"name": "http", "containerPort": 8000}],
                "lifecycle": {"postStart": {"exec": {"command": ["true"]}}},
                "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},
                "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "32Gi"}},
            },
        ],
        "readinessGates": [{"conditionType": "example.com/warm"}],
        "terminationGracePeriodSeconds": 30,
        "topologySpreadConstraints": [],
        "securityContext": None,
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    },
}
SIMULATED = {
    "spec": {
        "containers": [
            {
                **ENGINE,
                "command": ["dualmap", "engine-sim", "--model", "m", "--preset", "7b"],
                "args": ["--host", "$(POD_IP)", "--port", "8000"],
                "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
            }
        ]
    }
}
# The decoding takes about 14 s, three times the initial pause of the preStop script.
STREAMED_TOKENS = 600


@pytest.fixture(scope="module", name="namespace")
def _namespace(cluster: Cluster) -> Iterator[str]:
    crds.install(cluster)
    namespace = cluster.namespace()
    yield namespace
    crds.remove_namespace(cluster, namespace)


def create(cluster: Cluster, namespace: str, name: str, template: Mapping[str, Any], **spec: Any) -> PoolSpec:
    """Create the pool, which owns the children, and return its spec from the API server."""
    document = {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {"model": {"name": "m"}, "replicas": 2, "workload": {"template": template}, **spec},
    }
    made = cluster.kubectl("create", "-n", namespace, "-o", "json", "-f", "-", input=json.dumps(document))
    return read_spec(json.loads(made))


def apply(cluster: Cluster, child: Mapping[str, Any], *options: str) -> dict[str, Any]:
    """Apply one child as the operator does; return the object from the API server."""
    manager = ("--server-side", "--field-manager=dualmap-operator", "--validate=strict")
    answer: dict[str, Any] = json.loads(
        cluster.kubectl("apply", *manager, *options, "-o", "json", "-f", "-", input=json.dumps(child))
    )
    return answer


@pytest.mark.parametrize(
    ("name", "template", "spec"),
    [
        ("plain", PLAIN, {}),
        ("rich", RICH, {"drain": {"timeout": "500ms"}}),
        ("q" * 50, RICH, {"engine": {"type": "TensorRTLLM", "port": 65535}, "drain": {"timeout": "1h"}}),
    ],
)
def test_child_objects_pass_strict_validation(
    cluster: Cluster, namespace: str, name: str, template: dict[str, Any], spec: dict[str, Any]
) -> None:
    for child in children(create(cluster, namespace, name, template, **spec), replicas=2):
        answer = apply(cluster, child, "--dry-run=server")

        assert (answer["kind"], answer["metadata"]["name"]) == (child["kind"], name)


def test_child_objects_applied_twice_stay_unchanged(cluster: Cluster, namespace: str) -> None:
    spec = create(cluster, namespace, "again", RICH)

    for child in children(spec, replicas=0):
        first, second = apply(cluster, child), apply(cluster, child)

        # The generation counts changes of the spec. Services have no generation.
        assert second["metadata"].get("generation") == first["metadata"].get("generation")
        assert second["spec"] == first["spec"]


def test_pods_have_labels_readiness_gate_grace_and_pre_stop(cluster: Cluster, namespace: str) -> None:
    spec = create(cluster, namespace, "pods", RICH)
    for child in children(spec, replicas=1):
        apply(cluster, child)

    cluster.kubectl("wait", "-n", namespace, "--for=create", "--timeout=60s", "pod/pods-0")
    pod = json.loads(cluster.kubectl("get", "pod", "pods-0", "-n", namespace, "-o", "json"))

    assert pod["metadata"]["labels"]["serving.dualmap.dev/pool"] == "pods"
    assert pod["metadata"]["labels"]["app"] == "qwen"
    assert pod["spec"]["readinessGates"][-1] == {"conditionType": "serving.dualmap.dev/in-ring"}
    assert pod["spec"]["terminationGracePeriodSeconds"] == 600 + 10 + 90
    assert "preStop" in pod["spec"]["containers"][1]["lifecycle"]


def test_kubectl_shows_pre_stop_script_as_separate_lines(cluster: Cluster, namespace: str) -> None:
    set_, *_ = children(create(cluster, namespace, "shown", PLAIN), replicas=0)
    apply(cluster, set_)

    shown = cluster.kubectl("get", "statefulset", "shown", "-n", namespace, "-o", "yaml")

    lines = [line.strip() for line in shown.splitlines()]
    assert "port=8000 metrics=/metrics timeout=600 settle=5" in lines
    assert "sleep $settle || exit 1" in lines


@pytest.mark.usefixtures("kubelet")
async def test_pod_deletion_waits_for_open_streams_before_sigterm(cluster: Cluster, namespace: str) -> None:
    spec = create(cluster, namespace, "ending", SIMULATED, drain={"timeout": "60s"})
    for child in children(spec, replicas=1):
        apply(cluster, child)
    pod = ("pod/ending-0", "-n", namespace)
    cluster.kubectl("wait", *pod, "--for=create", "--timeout=60s")
    cluster.kubectl("wait", *pod, "--for=condition=ContainersReady", "--timeout=60s")
    address = json.loads(cluster.kubectl("get", *pod, "-o", "json"))["status"]["podIP"]

    assert await stream_through_deletion(cluster, pod, f"http://{address}:8000") > 0
    await asyncio.to_thread(cluster.kubectl, "wait", *pod, "--for=delete", "--timeout=60s")


async def stream_through_deletion(cluster: Cluster, pod: tuple[str, ...], engine: str) -> int:
    """Read a long stream to its end, and delete the pod at the first event.

    After SIGTERM an engine accepts no new connections. The test therefore checks the engine's health at every 50th
    event until shortly before the end. Returns the number of answered health checks; raises an error if a check fails
    or the stream breaks.
    """
    question = {"model": "m", "prompt": "count", "max_tokens": STREAMED_TOKENS, "stream": True}
    events = answered = 0
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        session.post(f"{engine}/v1/completions", json=question) as stream,
    ):
        async for line in stream.content:
            if line.strip() == b"data: [DONE]":
                return answered
            if not line.startswith(b"data:"):
                continue
            events += 1
            if events == 1:
                await asyncio.to_thread(cluster.kubectl, "delete", *pod, "--wait=false")
            if events % 50 == 0:
                async with session.get(f"{engine}/health") as health:
                    assert health.status == 200
                answered += 1
    raise AssertionError(f"the stream was cut after {events} events")
