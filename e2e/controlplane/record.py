"""Records objects of the real API server for tests/controlplane. The README in that folder describes how to run this
file.

The records are JSON without managedFields: pods in the states that the operator distinguishes, their StatefulSet and an
InferencePool. This file needs the built programs and the network namespace, like the tests in this folder.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from controlplane import crds
from dualmap.objects.times import time_text
from dualmap.pools.pool import MemberState
from dualmap_operator.decide.observed import Condition, PoolStatus, RingMember, TrafficStatus
from dualmap_operator.decide.spec import read_spec
from dualmap_operator.decide.status import status_document
from dualmap_operator.decide.workload.children import children
from dualmap_operator.names import IN_RING_GATE
from emulated_cluster.control_plane.build import binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.fixtures import kubelet_on
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet

_ROOT = Path(__file__).parents[2]
_RECORDED = _ROOT / "tests" / "controlplane" / "recorded"
_WITHIN_S = 90.0
_FOREVER = "while :; do sleep 0.1; done"
_Object = dict[str, Any]


class _Recorder:
    """One namespace of the cluster, and the objects recorded from it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._namespace = cluster.namespace()

    def apply(self, *objects: _Object) -> None:
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "-f", "-", input=document)

    def kubectl(self, *args: str, input: str | None = None) -> str:
        return self._cluster.kubectl("-n", self._namespace, *args, input=input)

    def get(self, kind: str, name: str) -> _Object:
        found: _Object = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def patch_status(self, kind: str, name: str, status: _Object, *, how: str) -> None:
        self.kubectl("patch", kind, name, "--subresource=status", f"--type={how}", "-p", json.dumps({"status": status}))

    def close_or_open_gate(self, name: str, status: str) -> None:
        condition = {"type": IN_RING_GATE, "status": status, "lastTransitionTime": time_text(time.time())}
        self.patch_status("pod", name, {"conditions": [condition]}, how="strategic")

    def record(self, file: str, kind: str, name: str, when: Callable[[_Object], object]) -> None:
        """Wait until ``when`` is true for the object, and write the object to a file."""
        until = time.monotonic() + _WITHIN_S
        while not when(found := self.get(kind, name)):
            if time.monotonic() > until:
                raise TimeoutError(f"{kind} {name} did not become {file}:\n{json.dumps(found, indent=1)}")
            time.sleep(0.2)
        found["metadata"].pop("managedFields", None)
        (_RECORDED / f"{file}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(file, file=sys.stderr)


def _condition(kind: str, status: str) -> Callable[[_Object], bool]:
    return lambda pod: any(
        (each["type"], each["status"]) == (kind, status) for each in pod["status"].get("conditions", ())
    )


def _pool() -> _Object:
    engine = {"name": "engine", "image": "engine:1", "command": ["sh", "-c", _FOREVER]}
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen"},
        "spec": {
            "model": {"name": "Qwen/Qwen2.5-7B-Instruct"},
            "replicas": 3,
            "workload": {"template": {"spec": {"containers": [engine]}}},
        },
    }


def _pod(name: str, script: str, **spec: object) -> _Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "vllm"}},
        "spec": {"containers": [{"name": "engine", "image": "engine:1", "command": ["sh", "-c", script]}], **spec},
    }


def _status(pods: list[_Object]) -> PoolStatus:
    now_s = float(int(time.time()))
    states = (MemberState.ACTIVE, MemberState.JOINING)
    return PoolStatus(
        observed_generation=1,
        replicas=3,
        ready_replicas=1,
        in_ring=1,
        selector="serving.dualmap.dev/pool=qwen",
        ring_version=4,
        members=tuple(
            RingMember(
                id=pod["metadata"]["name"],
                address=pod["status"]["podIP"],
                port=8000,
                state=state,
                weight=100 if state is MemberState.ACTIVE else 25,
                since_s=now_s,
                incarnation=f"{pod['metadata']['uid'][:8]}-0",
            )
            for pod, state in zip(pods, states, strict=True)
        ),
        traffic=TrafficStatus(slo_attainment="0.97", cache_hit_rate="0.63"),
        conditions=(
            Condition(
                type="Accepted",
                status=True,
                reason="Accepted",
                message="the spec can be carried out",
                since_s=now_s,
                observed_generation=1,
            ),
        ),
    )


def _record_pool(recorder: _Recorder, kubelet: ProcessKubelet) -> None:
    recorder.apply(_pool())
    spec = read_spec(recorder.get("dmpool", "qwen"))
    recorder.apply(*children(spec, replicas=3))
    served = _condition("ContainersReady", "True")
    recorder.record("pod_gate_closed", "pod", "qwen-1", served)
    recorder.close_or_open_gate("qwen-0", "True")
    recorder.record("pod_in_ring", "pod", "qwen-0", _condition("Ready", "True"))
    recorder.record("statefulset", "statefulset", "qwen", lambda found: found["status"].get("readyReplicas") == 1)
    pods = [recorder.get("pod", f"qwen-{ordinal}") for ordinal in (0, 1)]
    recorder.patch_status("dmpool", "qwen", status_document(_status(pods)), how="merge")
    recorder.record("inferencepool", "dmpool", "qwen", lambda found: found["status"]["ring"]["version"] == 4)
    recorder.kubectl("delete", "pod", "qwen-0", "--wait=false")
    recorder.record("pod_terminating", "pod", "qwen-0", lambda found: found["metadata"].get("deletionTimestamp"))
    recorder.kubectl("delete", "pod", "qwen-0", "--grace-period=0", "--force")


def _record_others(recorder: _Recorder, cluster: Cluster) -> None:
    recorder.apply(
        _pod("crashing", "sleep 1; exit 1"),
        _pod("failed", "exit 1", restartPolicy="Never"),
        _pod("pending", _FOREVER, nodeSelector={"gpu": "h200"}),
    )
    recorder.record("pod_pending", "pod", "pending", _condition("PodScheduled", "False"))
    recorder.record("pod_failed", "pod", "failed", lambda found: found["status"]["phase"] == "Failed")

    def crashed(found: _Object) -> bool:
        (container,) = found["status"].get("containerStatuses") or [{"restartCount": 0, "ready": False}]
        return bool(container["restartCount"] > 0 and not container["ready"])

    recorder.record("pod_crashed", "pod", "crashing", crashed)
    with cluster.node_lifecycle(), kubelet_on(cluster, "lost") as node:
        gates = [{"conditionType": IN_RING_GATE}]
        recorder.apply(_pod("stranded", _FOREVER, nodeName="lost", readinessGates=gates))
        recorder.close_or_open_gate("stranded", "True")
        while not _condition("Ready", "True")(recorder.get("pod", "stranded")):
            time.sleep(0.2)
        node.freeze_node()
        recorder.record("pod_node_lost", "pod", "stranded", _condition("Ready", "False"))
        node.lose_node()


def _main() -> None:
    _RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, Cluster(binaries_folder(), Path(directory)) as cluster:
        crds.install(cluster)
        with kubelet_on(cluster, "node-0") as kubelet:
            recorder = _Recorder(cluster)
            _record_pool(recorder, kubelet)
            _record_others(recorder, cluster)


if __name__ == "__main__":
    try:
        _main()
    except (OSError, subprocess.SubprocessError, TimeoutError) as error:
        sys.exit(str(error))
