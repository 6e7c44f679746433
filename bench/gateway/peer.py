"""The files and the command line of llm-d's endpoint picker. The benchmark runs the picker that ``--peer`` names.

The picker has the plugins and weights of llm-d's chart and finds the engines in a file, so it needs no Kubernetes. It
reads the engines' metrics once a second, serves plain text as the router does, and traces nothing. Its Envoy is the
router's in ``FULL_DUPLEX_STREAMED``, without what only the router uses.
"""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

_HOST = "127.0.0.1"
_SCORERS = {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3}
_PORTS = ("grpc-port", "grpc-health-port", "metrics-port")


def command(program: Path, engines: Sequence[str], folder: Path) -> tuple[tuple[str, ...], str]:
    """Write the picker's files to ``folder``; return its command line and the address of its gRPC port."""
    endpoints, config = folder / "peer-endpoints.yaml", folder / "peer-config.yaml"
    endpoints.write_text(yaml.safe_dump({"endpoints": [_endpoint(each) for each in engines]}))
    config.write_text(yaml.safe_dump(_config(endpoints)))
    # The program cannot tell which port the kernel selects. A port may be taken until it starts, which ends the run.
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    options = {**ports, "pool-name": "bench", "config-file": config, "refresh-metrics-interval": "1s"}
    switches = {"secure-serving": "false", "tracing": "false"}
    arguments = (f"--{name}={value}" for name, value in (options | switches).items())
    return (str(program.resolve()), *arguments), f"{_HOST}:{ports['grpc-port']}"


def without_router_checks(document: dict[str, Any]) -> dict[str, Any]:
    """Return Envoy's configuration without health checks and PINGs of the picker, which grpc-go refuses each second."""
    for cluster in document["static_resources"]["clusters"]:
        if "health_checks" in cluster:
            del cluster["health_checks"]
            (options,) = cluster["typed_extension_protocol_options"].values()
            options["explicit_http_config"]["http2_protocol_options"] = {}
    return document


def _endpoint(address: str) -> dict[str, str]:
    host, _, port = address.rpartition(":")
    return {"name": f"engine-{port}", "address": host, "port": port}


def _config(endpoints: Path) -> dict[str, Any]:
    plugins = [{"type": name} for name in (*_SCORERS, "metrics-data-source", "core-metrics-extractor")]
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": "file-discovery", "parameters": {"path": str(endpoints.resolve())}}, *plugins],
        "schedulingProfiles": [
            {"name": "default", "plugins": [{"pluginRef": name, "weight": n} for name, n in _SCORERS.items()]}
        ],
        "dataLayer": {"discovery": {"pluginRef": "file-discovery"}},
    }


def _free_ports(number: int) -> list[int]:
    """Return ports that were free a moment ago, all of them different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind((_HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
