"""A namespace for one test: applies objects and waits for the state of pods and endpoints.

The module also returns short manifests of pods.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from emulated_cluster.api.client import ApiClient
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.isolation.roots import Image, why_not
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from emulated_cluster.waiting import until

Object = dict[str, Any]

WITHIN_S = 60.0
GATE = "example.com/in-ring"
IMAGE = "registry.example/busybox:1"
PYTHON = "registry.example/python:1"
# The security context that the Pod Security Standard `restricted` requires, with a read-only root file system.
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@asynccontextmanager
async def new_namespace(cluster: Cluster) -> AsyncIterator[Namespace]:
    """Create a namespace, yield it, and delete the namespace at the end."""
    client = cluster.client()
    try:
        namespace = Namespace(cluster, client)
        yield namespace
        cluster.remove_namespace(namespace.name)
    finally:
        await client.close()


class Namespace:
    """One namespace of the cluster: applies objects, and waits for states of pods and endpoints."""

    def __init__(self, cluster: Cluster, client: ApiClient) -> None:
        self.name = cluster.namespace()
        self._cluster = cluster
        self._client = client
        self.pods = f"/api/v1/namespaces/{self.name}/pods"
        self.slices = f"/apis/discovery.k8s.io/v1/namespaces/{self.name}/endpointslices"

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Apply objects of this namespace."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self._cluster.kubectl("apply", "-n", self.name, "-f", "-", input=document)

    def kubectl(self, *args: str) -> str:
        """Run kubectl in this namespace as the administrator; return the output."""
        return self._cluster.kubectl("-n", self.name, *args)

    def label_pod(self, name: str, label: str) -> None:
        """Add a label, ``key=value``, to a pod."""
        self.kubectl("label", "pod", name, label)

    def delete_pod(self, name: str, *flags: str) -> None:
        """Delete a pod without waiting for its end."""
        self._cluster.kubectl("delete", "pod", name, "-n", self.name, "--wait=false", *flags)

    def scale(self, name: str, replicas: int) -> None:
        """Scale a StatefulSet."""
        self._cluster.kubectl("scale", "statefulset", name, "-n", self.name, f"--replicas={replicas}")

    async def pod(self, name: str) -> Object:
        """Return a pod's object."""
        return await self._client.request("GET", f"{self.pods}/{name}")

    async def ready_pods(self) -> set[str]:
        """Return the names of the pods that are ready and not terminating."""
        pods = await self._client.request("GET", self.pods)
        return {
            pod["metadata"]["name"]
            for pod in pods["items"]
            if condition(pod, "Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
        }

    async def until_ready(self, name: str) -> Object:
        """Wait until a pod is ready, and return the pod."""
        return await self.until_conditions(name, Ready="True")

    async def until_conditions(self, name: str, **conditions: str) -> Object:
        """Wait until a pod's conditions have these statuses, and return the pod."""
        said: list[Object] = []

        async def there() -> bool:
            said.append(await self.pod(name))
            return all(condition(said[-1], kind) == status for kind, status in conditions.items())

        await until(there, f"{name} has {conditions}", timeout_s=WITHIN_S)
        return said[-1]

    async def until_gone(self, name: str) -> list[Object]:
        """Wait until a pod's object is deleted; return the object's versions from the watch."""
        seen: list[Object] = []
        query = (("fieldSelector", f"metadata.name={name}"), ("resourceVersion", "0"))
        async with asyncio.timeout(WITHIN_S), aclosing(self._client.watch(self.pods, query=query)) as events:
            async for event in events:
                if event.type == "DELETED":
                    return seen
                if event.type in {"ADDED", "MODIFIED"}:
                    seen.append(event.object)
        raise AssertionError(f"{name} was not deleted while the watch lasted")

    async def log(self, kubelet: ProcessKubelet, name: str, words: str) -> str:
        """Wait until a pod's log contains this text, and return the log."""

        async def written() -> bool:
            try:
                return words in kubelet.log(kubelet.pod(self.name, name))
            except LookupError:
                return False

        await until(written, f"{name} writes {words!r}", timeout_s=WITHIN_S)
        return kubelet.log(kubelet.pod(self.name, name))

    async def set_gate(self, name: str, status: str) -> None:
        """Patch a pod's readiness gate, as an operator does."""
        patch = {"status": {"conditions": [{"type": GATE, "status": status}]}}
        await self._client.request(
            "PATCH", f"{self.pods}/{name}/status", body=patch, content_type="application/strategic-merge-patch+json"
        )

    async def ready_endpoints(self, service: str) -> set[str]:
        """Return the ready addresses of a Service's EndpointSlices."""
        query = (("labelSelector", f"kubernetes.io/service-name={service}"),)
        slices = await self._client.request("GET", self.slices, query=query)
        return {
            address
            for each in slices["items"]
            for endpoint in each["endpoints"] or ()
            if endpoint["conditions"]["ready"]
            for address in endpoint["addresses"]
        }


def statefulset(
    name: str, *, replicas: int, container: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
) -> tuple[Object, Object]:
    """Return a headless Service and a StatefulSet of one container."""
    labels = {"app": name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": labels, "ports": [{"name": "http", "port": 8000}]},
    }
    workload = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "serviceName": name,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels, **(metadata or {})}, "spec": {"containers": [container]}},
        },
    }
    return service, workload


def pod(name: str, container: Mapping[str, Any], **spec: Any) -> Object:
    """Return a pod of one container; ``spec`` adds fields to its spec."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], **spec},
    }


def shell(script: str) -> Object:
    """Return a container without an image that runs a script."""
    return {"name": "main", "image": "any", "command": ["sh", "-c", script]}


def busybox(script: str, **more: Any) -> Object:
    """Return a container of busybox that runs a script; ``more`` are further fields."""
    return {"name": "main", "image": IMAGE, "command": ["sh", "-c", script], "securityContext": RESTRICTED, **more}


def restricted(name: str, container: Object, *, security: Object | None = None, **spec: Any) -> Object:
    """Return a pod that satisfies the standard `restricted`; ``security`` is its security context."""
    user = {"runAsUser": 1000} if container["image"] == IMAGE else {}
    # The kernel ignores SIGTERM for process 1 if the program has no signal handler.
    grace = {"terminationGracePeriodSeconds": 1}
    return pod(name, container, securityContext={**user, **(security or {})}, **grace, **spec)


def busybox_root(folder: Path) -> Path:
    """Create a root file system with only busybox in an empty folder and return it; skip the test if impossible.

    The root file system has a user ``web`` (1000, group 1001).
    """
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox not found: apt-get install busybox-static")
    for name in ("bin", "etc", "run", "tmp", "var"):
        (folder / name).mkdir()
    (folder / "tmp").chmod(0o1777)
    # In Debian's images /var/run is a link to /run. Mounts under /var/run must be in the image's /run, not in this
    # machine's.
    (folder / "var" / "run").symlink_to("/run")
    (folder / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nweb:x:1000:1001::/home/web:/bin/sh\n")
    shutil.copy(busybox, folder / "bin" / "busybox")
    installed = subprocess.run(["chroot", str(folder), "/bin/busybox", "--install", "-s", "/bin"], capture_output=True)
    if installed.returncode:
        pytest.skip("busybox is not static: apt-get install busybox-static")
    return folder


def this_machine() -> Image:
    """Return an image of this machine's own files, which include Python; skip the test if impossible.

    The image's user is root, because Python may be in a folder that only root can read.
    """
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
        pytest.skip("in a user namespace no overlay lies over a whole machine: run as root")
    return Image(root=Path("/"), entrypoint=(sys.executable,))


def condition(document: Mapping[str, Any], kind: str) -> str | None:
    """Return the status of a pod's or node's condition, or None."""
    conditions = {each["type"]: each["status"] for each in document["status"].get("conditions") or ()}
    return conditions.get(kind)


def container_status(document: Mapping[str, Any]) -> Object:
    """Return the status of a pod's only container."""
    (only,) = document["status"]["containerStatuses"]
    status: Object = only
    return status
