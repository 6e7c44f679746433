"""Envoy Gateway without Kubernetes: it reads its objects from a folder and runs Envoy as a process.

Envoy Gateway has no InferencePool. A Backend with the engines' addresses and an EnvoyExtensionPolicy for the picker
take its place. Only the destination header selects the engine (BackendTrafficPolicy `endpointOverride`).
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from emulated_cluster.control_plane.programs import Program
from gateways.build import ENVOY_GATEWAY, GATEWAYS

PORT = 8888
_ENVOY_VERSION = "1.40.0"
_CONTROLLER = "gateway.envoyproxy.io/gatewayclass-controller"
_GROUP = "gateway.envoyproxy.io"
_API = f"{_GROUP}/v1alpha1"
_GATEWAY_API = "gateway.networking.k8s.io/v1"
# Envoy Gateway has Envoy write the address into this file of its state.
_ADMIN_ADDRESS = "admin-address.txt"
_STOP_GRACE_S = 10.0

Address = tuple[str, int]


@contextmanager
def running(
    directory: Path, envoy: Path, *, engines: Sequence[Address], picker: Address, retries: bool = True
) -> Iterator[None]:
    """Run Envoy Gateway with a route at `PORT` to the engines, by the picks of a picker with TLS.

    ``envoy`` is the program that Envoy Gateway would otherwise download. Without ``retries``, the second endpoint of a
    list is never used. Logs are in ``directory``.
    """
    homes = {name: directory / name for name in ("configHome", "dataHome", "stateHome", "runtimeDir", "objects")}
    for each in homes.values():
        each.mkdir()
    program = homes["dataHome"] / "envoy-versions" / _ENVOY_VERSION / "bin" / "envoy"
    program.parent.mkdir(parents=True)
    program.symlink_to(envoy)
    objects = homes.pop("objects")
    (objects / "objects.yaml").write_text(yaml.safe_dump_all(_objects(engines, picker, retries)))
    config = directory / "envoy-gateway.yaml"
    config.write_text(yaml.safe_dump(_config(objects, homes)))
    gateway = GATEWAYS.folder / ENVOY_GATEWAY
    environment = {**os.environ, "HOME": str(directory)}
    certificates = [gateway, "certgen", "--local", "--config-home", homes["configHome"]]
    subprocess.run(certificates, check=True, capture_output=True, env=environment)
    server = Program(
        ["/usr/bin/env", "-C", directory, f"HOME={directory}", gateway, "server", "--config-path", config],
        log=directory / "envoy-gateway.log",
    )
    server.start()
    try:
        yield
    finally:
        server.stop(grace_s=_STOP_GRACE_S)


def admin(directory: Path) -> str:
    """Return the URL of the admin interface of the Envoy that Envoy Gateway runs in ``directory``."""
    (file,) = directory.rglob(_ADMIN_ADDRESS)
    return f"http://{file.read_text().strip()}"


def _config(objects: Path, homes: Mapping[str, Path]) -> dict[str, Any]:
    host = {name: str(path) for name, path in homes.items()}
    return {
        "apiVersion": _API,
        "kind": "EnvoyGateway",
        "gateway": {"controllerName": _CONTROLLER},
        "provider": {
            "type": "Custom",
            "custom": {
                "resource": {"type": "File", "file": {"paths": [str(objects)]}},
                "infrastructure": {"type": "Host", "host": host},
            },
        },
        "logging": {"level": {"default": "info"}},
        "extensionApis": {"enableBackend": True},
    }


def _objects(engines: Sequence[Address], picker: Address, retries: bool) -> list[dict[str, Any]]:
    route = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "engines"}
    proxy = {"group": _GROUP, "kind": "EnvoyProxy", "name": "proxy", "namespace": "default"}
    modes = {"body": "FullDuplexStreamed"}
    policy: dict[str, Any] = {
        "targetRefs": [route],
        "loadBalancer": {
            "type": "RoundRobin",
            "endpointOverride": {"extractFrom": [{"header": "x-gateway-destination-endpoint"}]},
        },
        "timeout": {"http": {"requestTimeout": "0s"}},
    }
    if retries:
        policy["retry"] = {"numRetries": 2, "retryOn": {"triggers": ["connect-failure"]}}
    extension = {
        "backendRefs": [{"group": _GROUP, "kind": "Backend", "name": "picker", "port": picker[1]}],
        "processingMode": {"request": modes, "response": modes},
        "messageTimeout": "1000s",
    }
    return [
        {
            "apiVersion": _API,
            "kind": "EnvoyProxy",
            "metadata": {"name": "proxy", "namespace": "default"},
            "spec": {"provider": {"type": "Host", "host": {"envoyVersion": _ENVOY_VERSION}}},
        },
        {
            "apiVersion": _GATEWAY_API,
            "kind": "GatewayClass",
            "metadata": {"name": "eg"},
            "spec": {"controllerName": _CONTROLLER, "parametersRef": proxy},
        },
        {
            "apiVersion": _GATEWAY_API,
            "kind": "Gateway",
            "metadata": {"name": "eg", "namespace": "default"},
            "spec": {
                "gatewayClassName": "eg",
                "listeners": [{"name": "http", "protocol": "HTTP", "port": PORT}],
            },
        },
        {
            "apiVersion": _GATEWAY_API,
            "kind": "HTTPRoute",
            "metadata": {"name": "engines", "namespace": "default"},
            "spec": {
                "parentRefs": [{"name": "eg"}],
                "rules": [{"backendRefs": [{"group": _GROUP, "kind": "Backend", "name": "engines"}]}],
            },
        },
        _backend("engines", engines),
        _backend("picker", [picker], tls={"insecureSkipVerify": True}),
        _object("BackendTrafficPolicy", "engines", policy),
        _object("EnvoyExtensionPolicy", "engines", {"targetRefs": [route], "extProc": [extension]}),
    ]


def _backend(name: str, addresses: Sequence[Address], **spec: Any) -> dict[str, Any]:
    endpoints = [{"ip": {"address": address, "port": port}} for address, port in addresses]
    return _object("Backend", name, {"endpoints": endpoints, **spec})


def _object(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": _API,
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": dict(spec),
    }
