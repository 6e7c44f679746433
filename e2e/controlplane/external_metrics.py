"""Serves external metrics to a HorizontalPodAutoscaler like a metrics adapter, with values from the test.

``serving`` starts the server, registers it with the API server, and waits until the API server forwards requests. The
HPA controller then queries ``external.metrics.k8s.io/v1beta1``. A function of the test returns the values. The function
may sum the metrics of routers (``total``). ``registered`` registers another server (``keda``).
"""

import json
import re
import ssl
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit

from prometheus_client.parser import text_string_to_metric_families

from emulated_cluster.control_plane.certificates import Authority
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.control_plane.programs import wait_until

GROUP_VERSION = "external.metrics.k8s.io/v1beta1"
_API_SERVICE = "v1beta1.external.metrics.k8s.io"
_METRIC = re.compile(rf"/apis/{GROUP_VERSION}/namespaces/(?P<namespace>[^/]+)/(?P<metric>[^/]+)")
_AVAILABLE_TIMEOUT_S = 60.0
_SCRAPE_TIMEOUT_S = 5.0

Source = Callable[[str, str, Mapping[str, str]], float | None]
"""Returns a metric's value by namespace, name and labels, or None without a value."""


@contextmanager
def serving(cluster: Cluster, directory: Path, source: Source) -> Iterator[None]:
    """Serve ``source`` as the cluster's external metrics; write keys to ``directory``. Only one such server can run at
    a time.
    """
    with _server(directory, source) as port, registered(cluster, port):
        yield


@contextmanager
def registered(cluster: Cluster, port: int) -> Iterator[None]:
    """Register the server on this local port for external metrics; wait until the API server forwards requests to
    it."""
    namespace = cluster.namespace()
    objects = {"apiVersion": "v1", "kind": "List", "items": [_service(namespace, port), _group(namespace, port)]}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(objects))
    try:
        wait_until(lambda: _handed_on(cluster), f"{_API_SERVICE} is available", timeout_s=_AVAILABLE_TIMEOUT_S)
        yield
    finally:
        # An unavailable APIService would break API discovery and the deletion of namespaces in other tests. The
        # deletion is repeated, because a request to a busy API server may time out.
        wait_until(lambda: _forgotten(cluster), f"{_API_SERVICE} is gone", timeout_s=_AVAILABLE_TIMEOUT_S)


def _forgotten(cluster: Cluster) -> bool:
    cluster.kubectl("delete", "apiservice", _API_SERVICE, "--ignore-not-found", check=False)
    return cluster.kubectl("get", "apiservice", _API_SERVICE, "--ignore-not-found", "-o", "name", check=False) == ""


def total(metrics_ports: Iterable[int], metric: str, pool: str) -> float | None:
    """Return the sum of a gauge of ``pool`` (namespace/name) over local routers; None if no router exports it."""
    values = [value for port in metrics_ports if (value := _scraped(port, metric, pool)) is not None]
    return sum(values) if values else None


def _scraped(port: int, metric: str, pool: str) -> float | None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_SCRAPE_TIMEOUT_S) as response:
        page = response.read().decode()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == metric and sample.labels.get("pool") == pool:
                return float(sample.value)
    return None


class _Server(ThreadingHTTPServer):
    """Answers requests with values of ``source``, each request in its own thread."""

    daemon_threads = True

    def __init__(self, source: Source) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.source = source


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer requests for single metrics, and for the API group's version, so that the APIService becomes
        available.
        """
        url = urlsplit(self.path)
        found = _METRIC.fullmatch(url.path)
        if url.path == f"/apis/{GROUP_VERSION}":
            # The list may be empty, because the HPA controller queries metrics by name.
            self._answer(200, {"kind": "APIResourceList", "groupVersion": GROUP_VERSION, "resources": []})
        elif found is None:
            self._answer(404, {"kind": "Status", "status": "Failure", "code": 404, "message": f"no {url.path} here"})
        else:
            selector = parse_qs(url.query).get("labelSelector", [""])[0]
            labels = dict(each.split("=", 1) for each in selector.split(",") if each)
            value = self.server.source(found["namespace"], found["metric"], labels)
            items = [] if value is None else [_item(found["metric"], labels, value)]
            self._answer(200, {"kind": "ExternalMetricValueList", "metadata": {}, "items": items})

    def _answer(self, code: int, document: Mapping[str, object]) -> None:
        version = GROUP_VERSION if document["kind"] == "ExternalMetricValueList" else "v1"
        body = json.dumps({"apiVersion": version, **document}).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def _item(metric: str, labels: Mapping[str, str], value: float) -> dict[str, object]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    # Metrics adapters also report values in thousandths.
    return {"metricName": metric, "metricLabels": dict(labels), "timestamp": now, "value": f"{round(value * 1000)}m"}


@contextmanager
def _server(directory: Path, source: Source) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority().server("external-metrics", ["localhost"]).write(directory, "external-metrics"))
    with _Server(source) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _service(namespace: str, port: int) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "external-metrics", "namespace": namespace},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
    }


def _group(namespace: str, port: int) -> dict[str, object]:
    group, version = GROUP_VERSION.split("/")
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": _API_SERVICE},
        "spec": {
            "group": group,
            "version": version,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": "external-metrics", "namespace": namespace, "port": port},
        },
    }


def _handed_on(cluster: Cluster) -> bool:
    # The API server sets the condition Available slightly before it forwards requests.
    return cluster.kubectl("get", "--raw", f"/apis/{GROUP_VERSION}", check=False).startswith("{")
