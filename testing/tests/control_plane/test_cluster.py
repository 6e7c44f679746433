"""The control plane stores objects, authenticates users, writes an audit log and survives a restart."""

import json
import re
from typing import Any

import pytest

from emulated_cluster.control_plane.build import KUBERNETES_VERSION
from emulated_cluster.control_plane.cluster import Cluster, KubectlError
from emulated_cluster.control_plane.programs import wait_until

AUDITED_WITHIN_S = 10.0
LOST_WITHIN_S = 60.0


def test_kubectl_and_api_server_have_the_pinned_version(cluster: Cluster) -> None:
    said = json.loads(cluster.kubectl("version", "-o", "json"))

    assert said["clientVersion"]["gitVersion"] == KUBERNETES_VERSION
    assert said["serverVersion"]["gitVersion"] == KUBERNETES_VERSION


def test_applied_object_is_stored_and_audited(cluster: Cluster) -> None:
    namespace = cluster.namespace()

    cluster.kubectl("apply", "-n", namespace, "-f", "-", input=config_map("kept", colour="blue"))

    assert read(cluster, namespace, "kept") == {"colour": "blue"}
    entry = audited(cluster, namespace=namespace, verb="create", name="kept")
    assert entry["user"].get("username", "") == "admin"
    assert entry["objectRef"]["resource"] == "configmaps"
    assert entry["responseStatus"]["code"] == 201


def test_objects_persist_across_api_server_restart(cluster: Cluster) -> None:
    namespace = cluster.namespace()
    cluster.kubectl("apply", "-n", namespace, "-f", "-", input=config_map("survivor", colour="green"))

    cluster.stop_apiserver()
    with pytest.raises(KubectlError, match=r"refused|connect"):
        cluster.kubectl("get", "configmap", "survivor", "-n", namespace)
    cluster.start_apiserver()

    assert read(cluster, namespace, "survivor") == {"colour": "green"}
    # The controllers also survived, because `namespace` waits for the service account that the controllers create.
    assert cluster.namespace() != namespace


def test_user_without_rights_gets_403_and_is_audited(cluster: Cluster) -> None:
    namespace = cluster.namespace()
    nobody = cluster.kubeconfig("nobody", groups=())

    with pytest.raises(KubectlError, match='User "nobody" cannot list resource "pods"'):
        cluster.kubectl("get", "pods", "-n", namespace, "--kubeconfig", str(nobody))

    entry = audited(cluster, namespace=namespace, verb="list", name=None)
    assert entry["user"].get("username", "") == "nobody"
    assert entry["responseStatus"]["code"] == 403


def test_user_has_the_groups_of_its_certificate(cluster: Cluster) -> None:
    member = cluster.kubeconfig("mia", groups=("readers", "writers"))

    said = json.loads(cluster.kubectl("auth", "whoami", "-o", "json", "--kubeconfig", str(member)))

    assert said["status"]["userInfo"]["username"] == "mia"
    assert {"readers", "writers"} <= set(said["status"]["userInfo"]["groups"])


def test_service_account_authenticates_by_token(cluster: Cluster) -> None:
    namespace = cluster.namespace()
    cluster.kubectl("create", "serviceaccount", "robot", "-n", namespace)
    robot = cluster.service_account_kubeconfig(namespace, "robot")

    said = json.loads(cluster.kubectl("auth", "whoami", "-o", "json", "--kubeconfig", str(robot)))
    refused = cluster.kubectl("get", "pods", "--kubeconfig", str(robot), check=False)

    assert said["status"]["userInfo"]["username"] == f"system:serviceaccount:{namespace}:robot"
    assert re.search(rf'cannot list resource "pods" .* in the namespace "{namespace}"', refused)


def test_cluster_address_blocks_do_not_overlap(cluster: Cluster) -> None:
    assert not cluster.address_block().overlaps(cluster.address_block())


def test_silent_node_is_lost_only_with_node_lifecycle_controller(cluster: Cluster) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"generateName": "silent-"}}
    name = cluster.kubectl("create", "-o", "name", "-f", "-", input=json.dumps(node)).strip()
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
    cluster.kubectl("patch", name, "--subresource", "status", "-p", json.dumps({"status": {"conditions": [ready]}}))

    def state() -> str:
        return cluster.kubectl("get", name, "-o", 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')

    assert state() == "True"
    with cluster.node_lifecycle():
        wait_until(lambda: state() == "Unknown", f"{name} is lost", timeout_s=LOST_WITHIN_S)
    cluster.kubectl("delete", name)


def config_map(name: str, **data: str) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})


def read(cluster: Cluster, namespace: str, name: str) -> object:
    return json.loads(cluster.kubectl("get", "configmap", name, "-n", namespace, "-o", "json"))["data"]


def audited(cluster: Cluster, *, namespace: str, verb: str, name: str | None) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found.extend(
            entry
            for entry in cluster.audit()
            if entry["verb"] == verb
            and entry.get("objectRef", {}).get("namespace") == namespace
            and entry["objectRef"].get("name") == name
        )
        return bool(found)

    wait_until(there, f"{verb} {name} in the audit log", timeout_s=AUDITED_WITHIN_S)
    return found[0]
