"""Istio on the tests' control plane: istiod as a process, which creates the gateways' pods from its own template.

Istio's plugins are not part of the Envoy of PyPI. Therefore the settings turn off telemetry, mutual TLS between
proxies, and the two filters for Istio's own protocols.
"""

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from controlplane import crds
from emulated_cluster.control_plane.build import binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.control_plane.programs import Program
from gateways.build import GATEWAY_API_CRDS, GATEWAYS, ISTIO_CHART, ISTIO_CRDS, ISTIOD

NAMESPACE = "istio-system"
CLASS = "istio"
GATEWAY_LABEL = "gateway.networking.k8s.io/gateway-name"
PORT = 80
# The version of Istio's chart and proxies. The source is a commit of the main branch before this release.
VERSION = "1.31.0"
PROXY_IMAGE = "registry.example/istio/proxyv2:e2e"
_READY_TIMEOUT_S = 90.0
_STOP_GRACE_S = 5.0
_BALANCER_PERIOD_S = 0.2
_CHART_VALUES = {
    "global": {"proxy": {"image": PROXY_IMAGE}},
    "telemetry": {"enabled": False},
    "meshConfig": {"enableAutoMtls": False},
}
_ENVIRONMENT = (
    f"POD_NAMESPACE={NAMESPACE}",
    "POD_NAME=istiod",
    "REVISION=default",
    "CLUSTER_ID=Kubernetes",
    "ENABLE_GATEWAY_API_INFERENCE_EXTENSION=true",
    "PILOT_ENABLE_ALPN_FILTER=false",
    "PILOT_ENABLE_METADATA_EXCHANGE=false",
)


@contextmanager
def running(cluster: Cluster, directory: Path) -> Iterator[None]:
    """Run istiod and a load balancer for the Services of its gateways."""
    _install_definitions(cluster)
    _apply(cluster, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.kubectl("apply", "--server-side", "-f", "-", input=_config_maps(directory))
    # istiod reads and writes files in its working directory.
    istiod = Program(
        [
            "/usr/bin/env", "-C", directory, *_ENVIRONMENT, GATEWAYS.folder / ISTIOD, "discovery",
            f"--kubeconfig={cluster.kubeconfig('istiod')}",
        ],
        log=cluster.logs / "istiod.log",
    )  # fmt: skip
    istiod.start()
    try:
        istiod.wait_until(lambda: _accepted(cluster), f"GatewayClass {CLASS}", timeout_s=_READY_TIMEOUT_S)
        with _load_balancer(cluster):
            yield
    finally:
        istiod.stop(grace_s=_STOP_GRACE_S)


def gateway(name: str, pool: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a Gateway with port 80, and a route of all its requests to an InferencePool."""
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool}
    return (
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "Gateway",
            "metadata": {"name": name},
            "spec": {"gatewayClassName": CLASS, "listeners": [{"name": "http", "port": PORT, "protocol": "HTTP"}]},
        },
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": {"name": name},
            "spec": {"parentRefs": [{"name": name}], "rules": [{"backendRefs": [backend]}]},
        },
    )


def use_tls_without_verification(cluster: Cluster, service: str, namespace: str) -> None:
    """Let the gateways connect to a picker's Service with TLS and accept every certificate, as the protocol says."""
    rule = {
        "apiVersion": "networking.istio.io/v1",
        "kind": "DestinationRule",
        "metadata": {"name": f"{namespace}-{service}", "namespace": NAMESPACE},
        "spec": {
            "host": f"{service}.{namespace}.svc.cluster.local",
            "trafficPolicy": {"tls": {"mode": "SIMPLE", "insecureSkipVerify": True}},
        },
    }
    _apply(cluster, rule)


def _install_definitions(cluster: Cluster) -> None:
    for file in sorted((GATEWAYS.folder / GATEWAY_API_CRDS).glob("*.yaml")):
        cluster.kubectl("apply", "--server-side", "-f", str(file))
    cluster.kubectl("apply", "--server-side", "-f", str(GATEWAYS.folder / ISTIO_CRDS))
    crds.install(cluster, crds.GAIE_FILE, crds.GAIE_NAME)


def _config_maps(directory: Path) -> str:
    """Return the ConfigMaps of Istio's chart: the mesh's settings and the templates of the gateways' pods."""
    values = directory / "istio-values.yaml"
    values.write_text(json.dumps(_CHART_VALUES))
    chart = GATEWAYS.folder / ISTIO_CHART
    shown = ("templates/configmap.yaml", "templates/istiod-injector-configmap.yaml")
    command = [
        binaries_folder() / "helm", "template", "istiod", chart.resolve(), "--namespace", NAMESPACE,
        "--values", values, *(each for name in shown for each in ("--show-only", name)),
    ]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _accepted(cluster: Cluster) -> bool:
    said = cluster.kubectl("get", "gatewayclass", CLASS, "--ignore-not-found", "-o", "json", check=False)
    if not said.startswith("{"):
        return False
    conditions = json.loads(said).get("status", {}).get("conditions", [])
    return any(each["type"] == "Accepted" and each["status"] == "True" for each in conditions)


@contextmanager
def _load_balancer(cluster: Cluster) -> Iterator[None]:
    """Publish the cluster address of each Service of type LoadBalancer as the Service's external address."""
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(_BALANCER_PERIOD_S):
            said = cluster.kubectl("get", "services", "--all-namespaces", "-o", "json", check=False)
            for service in json.loads(said)["items"] if said.startswith("{") else ():
                spec, metadata = service["spec"], service["metadata"]
                if spec["type"] != "LoadBalancer" or service["status"]["loadBalancer"]:
                    continue
                status = {"status": {"loadBalancer": {"ingress": [{"ip": spec["clusterIP"]}]}}}
                cluster.kubectl(
                    "patch", "service", metadata["name"], "--namespace", metadata["namespace"],
                    "--subresource=status", "--type=merge", "-p", json.dumps(status), check=False,
                )  # fmt: skip

    thread = threading.Thread(target=publish, name="load-balancer")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(objects))
