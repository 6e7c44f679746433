"""Real KEDA on the tests' control plane: its operator and its metrics adapter as processes, and ScaledObjects.

Between 0 and 1 instances, KEDA's operator scales: it queries a scaler, here a router. Above 1, a
HorizontalPodAutoscaler from KEDA scales. The HPA queries KEDA's adapter, and the adapter queries KEDA's operator.
"""

import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from controlplane import crds, external_metrics
from controlplane.product import Product
from emulated_cluster.control_plane.build import KEDA_CRDS, binaries_folder
from emulated_cluster.control_plane.certificates import Authority
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.control_plane.programs import Program
from emulated_cluster.services.names import DOMAIN

NAMESPACE = "keda"
# An empty WATCH_NAMESPACE selects all namespaces. KEDA rejects an environment without this variable.
_ENVIRONMENT = (
    "/usr/bin/env",
    f"POD_NAMESPACE={NAMESPACE}",
    f"KEDA_CLUSTER_OBJECT_NAMESPACE={NAMESPACE}",
    "WATCH_NAMESPACE=",
)
# Both ports listen on loopback: only the API server calls the adapter, and only the adapter calls the operator's port.
_ADAPTER_PORT = 6644
_METRICS_SERVICE_PORT = 9666
_READY_TIMEOUT_S = 60.0
_STOP_GRACE_S = 5.0


@contextmanager
def running(cluster: Cluster, directory: Path, *, nameserver: str | None = None) -> Iterator[None]:
    """Run KEDA for all namespaces and register its metrics with the API server; write keys to ``directory``.

    KEDA resolves the names of scalers with ``nameserver``, like a pod (``services.py``); default: this machine's
    resolver.

    Tests cannot use ``external_metrics.serving`` while KEDA runs. KEDA's CRDs stay installed.
    """
    for file in KEDA_CRDS:
        group, _, plural = file.removesuffix(".yaml").rpartition("_")
        crds.install(cluster, binaries_folder() / file, f"{plural}.{group}")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(namespace))
    _write_certificates(directory)
    programs = [_operator(cluster, directory, nameserver), _adapter(cluster, directory)]
    try:
        for program, port in zip(programs, (_METRICS_SERVICE_PORT, _ADAPTER_PORT), strict=True):
            program.start()
            program.wait_until(partial(_listens, port), f"port {port}", timeout_s=_READY_TIMEOUT_S)
        with external_metrics.registered(cluster, _ADAPTER_PORT):
            yield
    finally:
        for program in reversed(programs):
            program.stop(grace_s=_STOP_GRACE_S)


def scaled_object(namespace: str, *, scaler: str, **spec: Any) -> dict[str, Any]:
    """Return a ScaledObject that scales the pool ``qwen`` to the desired replicas of the router at ``scaler``
    (host:port).

    The intervals are short, for tests. ``spec`` replaces fields of the ScaledObject's spec.
    """
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "qwen", "namespace": namespace},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "serving.dualmap.dev/v1alpha1",
                "kind": "InferencePool",
                "name": "qwen",
            },
            "pollingInterval": 2,
            "cooldownPeriod": 5,
            "minReplicaCount": 1,
            "maxReplicaCount": 3,
            "advanced": {
                "horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}
            },
            "triggers": [
                {
                    "type": "external-push",
                    "metricType": "AverageValue",
                    "metadata": {"scalerAddress": scaler, "pool": f"{namespace}/qwen"},
                }
            ],
            **spec,
        },
    }


@asynccontextmanager
async def scaling(product: Product, manifest: Mapping[str, Any]) -> AsyncIterator[None]:
    """Apply a ScaledObject while the context is open; KEDA deletes its HPA afterwards."""
    await product.apply(manifest)
    try:
        yield
    finally:
        await product.kubectl("delete", f"scaledobject/{manifest['metadata']['name']}", "--timeout=30s")


def _write_certificates(directory: Path) -> None:
    """Write the certificates for mutual TLS between KEDA's operator and adapter."""
    authority = Authority()
    (directory / "ca.crt").write_bytes(authority.certificate)
    authority.peer("keda", ["localhost"]).write(directory, "tls")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _operator(cluster: Cluster, directory: Path, nameserver: str | None) -> Program:
    return Program(
        [
            *([] if nameserver is None else _asking(nameserver, directory)),
            *_ENVIRONMENT,
            binaries_folder() / "keda-operator",
            f"--kubeconfig={cluster.kubeconfig('keda-operator')}",
            f"--cert-dir={directory}",
            "--metrics-bind-address=:18081",
        ],
        log=cluster.logs / "keda-operator.log",
    )


def _asking(nameserver: str, directory: Path) -> list[str | Path]:
    """Return a command prefix that sets a command's name server, as in a pod of KEDA's namespace."""
    searched = f"{NAMESPACE}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    resolver = directory / "resolv.conf"
    resolver.write_text(f"nameserver {nameserver}\nsearch {searched}\noptions ndots:5\n")
    bind = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", bind, resolver]


def _adapter(cluster: Cluster, directory: Path) -> Program:
    kubeconfig = cluster.kubeconfig("keda-adapter")
    return Program(
        [
            *_ENVIRONMENT,
            binaries_folder() / "keda-adapter",
            f"--kubeconfig={kubeconfig}",
            f"--lister-kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--secure-port={_ADAPTER_PORT}",
            f"--metrics-service-address=localhost:{_METRICS_SERVICE_PORT}",
            f"--client-ca-file={directory / 'ca.crt'}",
            f"--tls-cert-file={directory / 'tls.crt'}",
            f"--tls-private-key-file={directory / 'tls.key'}",
            f"--cert-dir={directory}",
        ],
        log=cluster.logs / "keda-adapter.log",
    )
