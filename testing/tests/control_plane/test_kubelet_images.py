"""Tests of pods with images on the process kubelet: file systems, volumes, users, networks, init containers, jobs."""

import base64
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.fixtures import kubelet_on, persistent_volume
from emulated_cluster.kubelet.isolation.network import interface_of
from emulated_cluster.kubelet.isolation.roots import Image
from emulated_cluster.kubelet.process_kubelet import PodView, ProcessKubelet
from emulated_cluster.waiting import until
from namespaces import (
    IMAGE,
    PYTHON,
    RESTRICTED,
    WITHIN_S,
    Namespace,
    busybox,
    busybox_root,
    container_status,
    new_namespace,
    pod,
    restricted,
    this_machine,
)

Object = dict[str, Any]

WEB = "registry.example/web:1"
FOREVER = "while :; do sleep 0.05; done"
ENFORCE = "pod-security.kubernetes.io/enforce"


@pytest.fixture(scope="module", name="root")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return busybox_root(tmp_path_factory.mktemp("busybox"))


@pytest.fixture(scope="module", name="kubelet")
def _kubelet(cluster: Cluster, root: Path) -> Iterator[ProcessKubelet]:
    """A node with two images: busybox without and with an image configuration."""
    web = Image(root=root, entrypoint=("sh", "-c"), environment={"FROM": "image"}, user="web", directory="/run")
    with kubelet_on(cluster, "rooted", images={IMAGE: root, WEB: web}) as kubelet:
        yield kubelet


@pytest_asyncio.fixture(name="namespace")
async def _namespace(cluster: Cluster, kubelet: ProcessKubelet) -> AsyncIterator[Namespace]:
    async with new_namespace(cluster) as namespace:
        namespace.kubectl("label", "namespace", namespace.name, f"{ENFORCE}=restricted")
        yield namespace


async def test_restricted_pod_has_user_id_read_only_root_and_volumes(
    namespace: Namespace, kubelet: ProcessKubelet, root: Path
) -> None:
    before = files_of(root)
    script = (
        "id; pwd; hostname; echo $HOME; touch /x /work/y /scratch/z; ls -ln /work /scratch; cat /etc/hosts; echo done"
    )
    work = {"name": "work", "emptyDir": {}}
    scratch = {"name": "scratch", "emptyDir": {"medium": "Memory"}}
    mounts = [{"name": "work", "mountPath": "/work", "readOnly": True}, {"name": "scratch", "mountPath": "/scratch"}]
    container = busybox(f"{script}; {FOREVER}", volumeMounts=mounts, workingDir="/srv/here")
    namespace.apply(
        restricted("user", container, volumes=[work, scratch], security={"runAsUser": 1000, "fsGroup": 2000})
    )
    ready = await namespace.until_ready("user")

    said = await namespace.log(kubelet, "user", "done\n")

    assert "uid=1000(web) gid=1001 groups=1001,2000" in said
    assert "/srv/here\nuser\n/home/web\n" in said
    assert "touch: /x: Read-only file system" in said
    assert "touch: /work/y: Read-only file system" in said
    assert "1000     2000" in said.partition("/scratch:")[2]
    assert f"{ready['status']['podIP']} user" in said
    assert files_of(root) == before


async def test_writable_root_is_private_to_its_container(
    namespace: Namespace, kubelet: ProcessKubelet, root: Path
) -> None:
    writable = {**RESTRICTED, "readOnlyRootFilesystem": False}
    namespace.apply(
        restricted("writer", busybox(f"cd /tmp; echo mine > it; cat it; {FOREVER}", securityContext=writable))
    )
    await namespace.until_ready("writer")

    assert await namespace.log(kubelet, "writer", "\n") == "mine\n"
    assert root / "tmp" / "it" not in files_of(root)


async def test_volume_files_update_with_configmap_and_secret(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    namespace.apply(config("settings", {"a": "1", "b": "2"}), secret("keys", {"tls.key": "k1", "tls.crt": "c1"}))
    volumes = [
        {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o400, "items": [
            {"key": "tls.key", "path": "private/key", "mode": 0o440}, {"key": "tls.crt", "path": "crt"}]}},
        {"name": "absent", "secret": {"secretName": "absent", "optional": True}},
        {"name": "about", "downwardAPI": {"items": [
            {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    ]  # fmt: skip
    mounts = [{"name": each["name"], "mountPath": f"/mnt/{each['name']}"} for each in volumes]
    mounts.append({"name": "settings", "mountPath": "/fixed/a", "subPath": "a"})
    container = busybox(FOREVER, volumeMounts=mounts)
    namespace.apply(restricted("reader", container, volumes=volumes, security={"runAsUser": 1000, "fsGroup": 2000}))
    await namespace.until_ready("reader")
    view = kubelet.pod(namespace.name, "reader")

    def run(script: str) -> str:
        return kubelet.execute(view, "main", ["sh", "-c", script])[1]

    assert run("cd /mnt/settings && ls && cat a b") == "a\nb\n12"
    assert (
        run("cat /mnt/keys/private/key /mnt/keys/crt; ls /mnt/absent /mnt/keys")
        == "k1c1/mnt/absent:\n\n/mnt/keys:\ncrt\nprivate\n"
    )
    assert run("stat -L -c '%a %g' /mnt/keys/private/key /mnt/keys/crt") == "440 2000\n440 2000\n"
    before = run("readlink /mnt/settings/..data")

    namespace.apply(config("settings", {"a": "3", "c": "4"}))
    namespace.label_pod("reader", "colour=red")

    async def changed() -> bool:
        return run("cd /mnt/settings && ls && cat a c") == "a\nc\n34"

    async def labelled() -> bool:
        return run("cat /mnt/about/labels") == 'colour="red"\n'

    await until(changed, "the files follow", timeout_s=WITHIN_S)
    await until(labelled, "the labels follow", timeout_s=WITHIN_S)
    assert run("readlink /mnt/settings/a") == "..data/a\n"
    assert run("readlink /mnt/settings/..data") != before
    assert run("cat /fixed/a") == "1"


async def test_files_of_a_persistent_volume_outlive_the_pod_and_belong_to_the_group(
    namespace: Namespace, kubelet: ProcessKubelet, cluster: Cluster, tmp_path: Path
) -> None:
    mounts = [{"name": "kept", "mountPath": "/kept"}]
    owned = {"runAsUser": 1000, "fsGroup": 2000}
    writable: Object = {"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}}
    read_only: Object = {"name": "kept", "persistentVolumeClaim": {"claimName": "kept", "readOnly": True}}
    first = busybox(f"mkdir /kept/a && umask 077 && echo mine > /kept/a/b && echo done; {FOREVER}", volumeMounts=mounts)
    second = busybox(f"cat /kept/a/b; ls -ln /kept/a; touch /kept/c; echo done; {FOREVER}", volumeMounts=mounts)

    with persistent_volume(cluster, namespace.name, "kept", tmp_path):
        namespace.apply(restricted("first", first, volumes=[writable], security=owned))
        await namespace.log(kubelet, "first", "done\n")
        namespace.delete_pod("first", "--grace-period=1")
        await namespace.until_gone("first")
        namespace.apply(restricted("second", second, volumes=[writable], security={**owned, "runAsUser": 1001}))
        namespace.apply(restricted("reader", second, volumes=[read_only], security=owned))
        said = await namespace.log(kubelet, "second", "done\n")
        refused = await namespace.log(kubelet, "reader", "done\n")

    assert said.startswith("mine\n")
    assert "-rw-rw----    1 1000     2000" in said
    assert "touch" not in said
    assert "touch: /kept/c: Read-only file system" in refused
    assert (tmp_path / "c").exists()


async def test_container_waits_for_a_missing_claim(namespace: Namespace, cluster: Cluster, tmp_path: Path) -> None:
    volume = {"name": "late", "persistentVolumeClaim": {"claimName": "late"}}
    container = busybox(FOREVER, volumeMounts=[{"name": "late", "mountPath": "/late"}])
    namespace.apply(restricted("waits", container, volumes=[volume]))

    async def says_why() -> bool:
        found = [each for each in (await namespace.pod("waits"))["status"].get("conditions", ()) if "message" in each]
        return any('persistentvolumeclaim "late" not found' in each["message"] for each in found)

    await until(says_why, "the reason", timeout_s=WITHIN_S)
    with persistent_volume(cluster, namespace.name, "late", tmp_path):
        await namespace.until_ready("waits")


async def test_container_waits_for_a_missing_secret(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    source = {"secretKeyRef": {"name": "late", "key": "password"}}
    container = busybox(
        f"echo $PASSWORD; cat /mnt/password; {FOREVER}", env=[{"name": "PASSWORD", "valueFrom": source}]
    )
    container["volumeMounts"] = [{"name": "late", "mountPath": "/mnt"}]
    namespace.apply(restricted("waits", container, volumes=[{"name": "late", "secret": {"secretName": "late"}}]))

    async def says_why() -> bool:
        states = (await namespace.pod("waits"))["status"].get("containerStatuses") or [{"state": {}}]
        return 'secret "late" not found' in states[0]["state"].get("waiting", {}).get("message", "")

    await until(says_why, "the reason", timeout_s=WITHIN_S)
    namespace.apply(secret("late", {"password": "word"}))
    await namespace.until_ready("waits")

    assert await namespace.log(kubelet, "waits", "word\nword") == "word\nword"


async def test_container_uses_the_config_of_its_image(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    container = {"name": "main", "image": WEB, "args": [f"id -un; pwd; echo $FROM; {FOREVER}"]}
    namespace.apply(restricted("web", {**container, "securityContext": RESTRICTED}))

    assert await namespace.log(kubelet, "web", "image\n") == "web\n/run\nimage\n"


async def test_pod_calls_the_api_as_its_service_account(namespace: Namespace, cluster: Cluster) -> None:
    script = (
        "from kubernetes import client, config; config.load_incluster_config();"
        "review = client.AuthenticationV1Api().create_self_subject_review({});"
        "print(review.status.user_info.username, flush=True); import time; time.sleep(3600)"
    )
    namespace.kubectl("label", "namespace", namespace.name, f"{ENFORCE}-")
    with kubelet_on(cluster, "python", images={PYTHON: this_machine()}) as kubelet:
        namespace.apply(pod("client", {"name": "main", "image": PYTHON, "args": ["-c", script]}))
        said = await namespace.log(kubelet, "client", "system:")

    assert said == f"system:serviceaccount:{namespace.name}:default\n"
    mounted = (await namespace.pod("client"))["spec"]["volumes"]
    assert [each["name"].rpartition("-")[0] for each in mounted] == ["kube-api-access"]


async def test_every_pod_has_its_own_network(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    server = "mkdir /www/{0} && echo {0} > /www/name && exec httpd -f -p 8000 -h /www"
    probe = {"exec": {"command": ["wget", "-q", "-O", "-", "http://127.0.0.1:8000/name"]}, "periodSeconds": 1}
    volumes = [{"name": "www", "emptyDir": {}}]
    mounts = [{"name": "www", "mountPath": "/www"}]
    for name in ("left", "right"):
        container = busybox(server.format(name), volumeMounts=mounts, readinessProbe={**probe, "timeoutSeconds": 5})
        namespace.apply(restricted(name, container, volumes=volumes))
    addresses = [(await namespace.until_ready(name))["status"]["podIP"] for name in ("left", "right")]
    left = kubelet.pod(namespace.name, "left")

    said = [
        kubelet.execute(left, "main", ["wget", "-q", "-O", "-", f"http://{address}:8000/name"])
        for address in (*addresses, "127.0.0.1")
    ]

    assert said == [(0, "left\n"), (0, "right\n"), (0, "left\n")]


async def test_init_containers_run_in_order_and_share_files(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    first = busybox("sleep 0.2; echo first >> /shared/log", volumeMounts=mounts, name="first")
    # The container fails once: a file in its volume marks the second attempt.
    again = "test -e /shared/tried || { touch /shared/tried; exit 1; }; echo second >> /shared/log"
    second = busybox(again, volumeMounts=mounts, name="second")
    main = busybox(f"cat /shared/log; {FOREVER}", volumeMounts=mounts)
    volumes = [{"name": "shared", "emptyDir": {}}]
    namespace.apply(restricted("staged", main, volumes=volumes, initContainers=[first, second]))
    staged = await namespace.until_ready("staged")

    assert (await namespace.log(kubelet, "staged", "second\n")).startswith("first\nsecond\n")
    assert [each["restartCount"] for each in staged["status"]["initContainerStatuses"]] == [0, 1]


async def test_failed_init_container_fails_pod_with_restart_never(
    namespace: Namespace, kubelet: ProcessKubelet
) -> None:
    failing = busybox("exit 3", name="failing")
    namespace.apply(restricted("failed", busybox("true"), initContainers=[failing], restartPolicy="Never"))

    status = (await until_phase(namespace, "failed", "Failed"))["status"]

    assert status["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    assert "waiting" in status["containerStatuses"][0]["state"]


async def test_job_succeeds_after_a_failed_container(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    mounts = [{"name": "state", "mountPath": "/state"}]
    script = "test -e /state/tried && exit 0; touch /state/tried; exit 1"
    template = restricted("", busybox(script, volumeMounts=mounts), volumes=[{"name": "state", "emptyDir": {}}])["spec"]
    template["restartPolicy"] = "OnFailure"
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "once"},
        "spec": {"backoffLimit": 3, "template": {"spec": template}},
    }
    namespace.apply(job, restricted("single", busybox("exit 4"), restartPolicy="Never"))

    namespace.kubectl("wait", "job/once", "--for=condition=Complete", "--timeout=50s")
    single = await until_phase(namespace, "single", "Failed")

    assert container_status(single)["state"]["terminated"]["exitCode"] == 4
    (ended,) = json.loads(namespace.kubectl("get", "pods", "-l", "job-name=once", "-o", "json"))["items"]
    assert ended["status"]["phase"] == "Succeeded"
    assert container_status(ended)["restartCount"] == 1


async def test_deleted_pod_leaves_no_files_or_network_interfaces(namespace: Namespace, kubelet: ProcessKubelet) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /proc/1/fd/1"]}}}
    container = busybox(f"trap 'echo term; exit' TERM; echo up; {FOREVER}", lifecycle=hook)
    namespace.apply(restricted("leaver", container, security={"runAsUser": 1000}))
    await namespace.until_ready("leaver")
    view = kubelet.pod(namespace.name, "leaver")
    await namespace.log(kubelet, "leaver", "up")
    was_there = traces(view)
    namespace.delete_pod("leaver")
    await namespace.until_gone("leaver")

    assert kubelet.log(view).split() == ["up", "hook", "term"]
    assert was_there == [f"dualmap-kubelet-/{view.uid}", interface_of(view.address)]
    assert traces(view) == []


def traces(view: PodView) -> list[str]:
    """Return a pod's folders and network interfaces on this machine."""
    folders = [
        f"dualmap-kubelet-/{each.name}" for each in Path(tempfile.gettempdir()).glob(f"dualmap-kubelet-*/{view.uid}")
    ]
    interfaces = [name for _, name in socket.if_nameindex() if name == interface_of(view.address)]
    return folders + interfaces


def files_of(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


def config(name: str, data: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def secret(name: str, data: dict[str, str]) -> Object:
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": encoded}


async def until_phase(namespace: Namespace, name: str, phase: str) -> Object:
    said: list[Object] = []

    async def there() -> bool:
        said.append(await namespace.pod(name))
        return bool(said[-1]["status"]["phase"] == phase)

    await until(there, f"{name} is {phase}", timeout_s=WITHIN_S)
    return said[-1]
