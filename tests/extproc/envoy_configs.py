"""Helpers that generate Envoy's bootstrap, read it, and validate it with a real Envoy."""

import json
import subprocess
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

with warnings.catch_warnings():
    # envoy_data_plane 2.2 declares validators with an API that pydantic deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    # The command would import Envoy's types only at its call, after this block.
    import dualmap_extproc.envoy.config.bootstrap  # noqa: F401
    from dualmap_extproc.app.envoy_config import envoy_config

ENVOY = Path(sysconfig.get_path("scripts")) / "envoy"
MEMBERS = [
    {"id": "qwen-0", "address": "10.0.0.1", "port": 8000, "state": "Active"},
    {"id": "qwen-1", "address": "10.0.0.2", "port": 8000, "state": "Draining"},
    {"id": "qwen-2", "address": "fd00::3", "port": 8000, "state": "Joining"},
]


def pool_file(directory: Path, name: str = "qwen", **spec: Any) -> Path:
    path = directory / f"{name}.yaml"
    document = {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {"model": {"name": f"{name}-model"}, **spec},
        "status": {"ring": {"version": 1, "members": MEMBERS}},
    }
    path.write_text(json.dumps(document))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(envoy_config, [str(argument) for argument in arguments])


def config(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = yaml.safe_load(result.stdout)
    return document


def manager(document: dict[str, Any]) -> dict[str, Any]:
    (listener,) = document["static_resources"]["listeners"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def http_filter(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (f for f in manager(document)["http_filters"] if f["name"] == f"envoy.filters.http.{name}")
    typed: dict[str, Any] = found["typed_config"]
    return typed


def routes(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The routes after those that refuse methods."""
    return [route for route in all_routes(document) if route.get("direct_response", {}).get("status") != 405]


def all_routes(document: dict[str, Any]) -> list[dict[str, Any]]:
    (host,) = manager(document)["route_config"]["virtual_hosts"]
    found: list[dict[str, Any]] = host["routes"]
    return found


def clusters(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {cluster["name"]: cluster for cluster in document["static_resources"]["clusters"]}


def hosts(cluster: dict[str, Any]) -> list[str]:
    (locality,) = cluster["load_assignment"]["endpoints"]
    addresses = [h["endpoint"]["address"]["socket_address"] for h in locality["lb_endpoints"]]
    return [f"{a['address']} {a['port_value']}" for a in addresses]


def validate(directory: Path, bootstrap: str) -> None:
    """Validate a bootstrap with the real Envoy."""
    written = directory / "envoy.yaml"
    written.write_text(bootstrap)
    checked = subprocess.run(
        [str(ENVOY), "--mode", "validate", "--log-level", "warning", "-c", str(written)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert "deprecated" not in checked.stderr.lower()
