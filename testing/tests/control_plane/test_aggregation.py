"""Tests that the API server forwards an API group to another server, as for metrics adapters.

The group's Service is an ExternalName for localhost, because the control plane has no Service network.
"""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from emulated_cluster.control_plane.certificates import Authority
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.control_plane.programs import wait_until

GROUP = "echo.e2e.test"
AVAILABLE_WITHIN_S = 60.0


def test_aggregated_api_receives_the_user_name(cluster: Cluster, tmp_path: Path) -> None:
    namespace = cluster.namespace()
    user = cluster.kubeconfig("eve", groups=("system:masters",))
    with echo_server(tmp_path) as port, api_service(cluster, namespace, port):
        answer = ""

        def answers() -> bool:
            nonlocal answer
            answer = cluster.kubectl("get", "--raw", f"/apis/{GROUP}/v1/who", "--kubeconfig", str(user), check=False)
            return answer.startswith("{")

        wait_until(answers, f"{GROUP} answers", timeout_s=AVAILABLE_WITHIN_S)

    assert json.loads(answer) == {"path": f"/apis/{GROUP}/v1/who", "user": "eve"}


class Echo(BaseHTTPRequestHandler):
    """A handler that returns the path and the user of the request."""

    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "user": self.headers["X-Remote-User"]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def echo_server(directory: Path) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority().server("echo", ["localhost"]).write(directory, "echo"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def api_service(cluster: Cluster, namespace: str, port: int) -> Iterator[None]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "echo", "namespace": namespace},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
    }
    group = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"v1.{GROUP}"},
        "spec": {
            "group": GROUP,
            "version": "v1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": "echo", "namespace": namespace, "port": port},
        },
    }
    cluster.kubectl(
        "apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, group]})
    )
    try:
        yield
    finally:
        # An unavailable APIService would break API discovery and the deletion of namespaces in other tests.
        cluster.kubectl("delete", "apiservice", f"v1.{GROUP}")
