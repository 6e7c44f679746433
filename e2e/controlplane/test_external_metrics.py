"""Tests that a real HorizontalPodAutoscaler scales a pool's scale subresource by the sum of two routers' metrics.

The HPA is an example from manifests/. The pool has no instances and no operator, so the test writes the status fields
that an HPA needs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from controlplane import crds, external_metrics
from dualmap.requests import PoolSnapshot
from dualmap.scaling.scaling import PoolSignals
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.telemetry.metrics import Metrics
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.control_plane.programs import wait_until

HPA = Path(__file__).parents[2] / "manifests" / "examples" / "hpa.yaml"
POOL = f"{crds.NAME}/qwen"
METRIC = "dualmap_pool_desired_replicas"
# The HPA in this test queries every 2 s, but the machine may be busy.
SCALED_WITHIN_S = 60.0


def test_hpa_follows_metric_and_keeps_replicas_without_metric(cluster: Cluster, tmp_path: Path) -> None:
    crds.install(cluster)
    namespace = cluster.namespace()
    make_pool(cluster, namespace, replicas=2)
    with ExitStack() as open_until_the_end:
        open_until_the_end.callback(crds.remove_namespace, cluster, namespace)
        routers = [open_until_the_end.enter_context(Router.serving(f"{namespace}/qwen")) for _ in range(2)]
        asked = Asked(namespace, [router.server_port for router in routers])
        open_until_the_end.enter_context(external_metrics.serving(cluster, tmp_path, asked))
        cluster.kubectl("apply", "-f", "-", input=json.dumps(impatient_hpa(namespace)))

        routers[0].wish, routers[1].wish = 2.6, 1.6
        follow(cluster, namespace, to=5)

        asked.lost = True
        wait_until(
            lambda: scaling_active(cluster, namespace) == "False", "the HPA misses it", timeout_s=SCALED_WITHIN_S
        )
        assert pool(cluster, namespace)["spec"]["replicas"] == 5
        asked.lost = False

        routers[0].wish, routers[1].wish = 0.5, 0.4
        follow(cluster, namespace, to=2)
    assert not asked.odd


class Asked:
    """Answers the HPA with the sum of the routers' metrics, or without a value while ``lost``.

    ``odd`` records unexpected queries.
    """

    def __init__(self, namespace: str, metrics_ports: Sequence[int]) -> None:
        self._namespace = namespace
        self._metrics_ports = metrics_ports
        self.lost = False
        self.odd: list[tuple[str, Mapping[str, str]]] = []

    def __call__(self, namespace: str, metric: str, labels: Mapping[str, str]) -> float | None:
        if namespace != self._namespace:
            return None  # This query is from an HPA of another test that was not deleted.
        if (metric, labels) != (METRIC, {"pool_name": "qwen"}):
            self.odd.append((metric, labels))
        if self.lost:
            return None
        return external_metrics.total(self._metrics_ports, metric, f"{namespace}/{labels['pool_name']}")


class Wish(Demand):
    """A router that reports the test's desired replicas."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self._pool = pool
        self.replicas = 2.0

    def signals(self, statuses: Sequence[PoolSnapshot]) -> Mapping[str, PoolSignals]:
        return {
            self._pool: PoolSignals(
                pending_prefill_tokens_per_endpoint=0.0,
                arriving_uncached_tokens_per_second=0.0,
                slo_attainment=None,
                desired_replicas=self.replicas,
            )
        }


class Router(ThreadingHTTPServer):
    """A router's /metrics, with the test's desired replicas."""

    def __init__(self, pool: str) -> None:
        super().__init__(("127.0.0.1", 0), _MetricsPage)
        self._demand = Wish(pool)
        self.signals = self._demand.signals
        self.metrics = Metrics(version="1", replica_id="router")

    @property
    def wish(self) -> float:
        return self._demand.replicas

    @wish.setter
    def wish(self, replicas: float) -> None:
        self._demand.replicas = replicas

    @classmethod
    @contextmanager
    def serving(cls, pool: str) -> Iterator["Router"]:
        with cls(pool) as router:
            thread = Thread(target=router.serve_forever)
            thread.start()
            try:
                yield router
            finally:
                router.shutdown()
                thread.join()


class _MetricsPage(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        body = self.server.metrics.render([], self.server.signals([]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def make_pool(cluster: Cluster, namespace: str, *, replicas: int) -> None:
    """Create a pool with the status that an operator would write."""
    made = {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen", "namespace": namespace},
        "spec": {
            "model": {"name": "m"},
            "replicas": replicas,
            "workload": {"template": {"spec": {"containers": [{"name": "engine", "image": "engine"}]}}},
        },
    }
    cluster.kubectl("apply", "-f", "-", input=json.dumps(made))
    run(cluster, namespace, replicas)


def run(cluster: Cluster, namespace: str, replicas: int) -> None:
    """Write the number of running instances into the status."""
    status = {"status": {"replicas": replicas, "selector": "serving.dualmap.dev/pool=qwen"}}
    cluster.kubectl("patch", POOL, "-n", namespace, "--subresource=status", "--type=merge", "-p", json.dumps(status))


def impatient_hpa(namespace: str) -> Mapping[str, Any]:
    """Return the example HPA of manifests/ for this namespace, without a scale-down delay."""
    hpa: dict[str, Any] = yaml.safe_load(HPA.read_text())
    hpa["metadata"]["namespace"] = namespace
    hpa["spec"]["behavior"]["scaleDown"] = {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
    }
    return hpa


def follow(cluster: Cluster, namespace: str, *, to: int) -> None:
    """Wait until the HPA has set the replicas in the pool's spec; then report them as running."""
    wait_until(
        lambda: pool(cluster, namespace)["spec"]["replicas"] == to,
        f"the HPA scales to {to}",
        timeout_s=SCALED_WITHIN_S,
    )
    run(cluster, namespace, to)


def pool(cluster: Cluster, namespace: str) -> Any:
    return json.loads(cluster.kubectl("get", POOL, "-n", namespace, "-o", "json"))


def scaling_active(cluster: Cluster, namespace: str) -> str:
    """Return the HPA's condition ScalingActive, which shows whether the HPA can read its metric."""
    hpa = json.loads(cluster.kubectl("get", "hpa", "qwen", "-n", namespace, "-o", "json"))
    conditions = hpa.get("status", {}).get("conditions", [])
    return next((each["status"] for each in conditions if each["type"] == "ScalingActive"), "Unknown")
