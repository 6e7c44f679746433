"""Tests that `kubectl scale` changes the number of routers under load: Envoy and the routers find each other by DNS.

The test uses the chart's Deployment, probes and headless Services of the routers. The routers and Envoy run as
processes of this machine with a pod's DNS configuration. They have pool files and plain text instead of an API server
and certificates.
"""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from chart.rendering import render
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.isolation.roots import why_not
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from emulated_cluster.services.services import Services
from harness.documents import chat
from harness.envoy import Envoy
from harness.processes import dualmap_argv
from harness.stack import Engine, pool_document, write_pool
from harness.traffic import Traffic, failed, tally
from harness.waiting import until
from redis_server import redis_server

ROUTERS = "dualmap-router"
# Envoy uses one address for all routers, because a router accepts a report only from the Envoy of the request. Without
# this setting, the kernel would choose another address for each router.
ENVOY_ADDRESS = "10.244.255.80"
ENGINE_ADDRESS = "10.244.255.81"
# Envoy resolves names every second, and checks a new router's health at once.
USED_WITHIN_S = 20.0
GONE_WITHIN_S = 60.0
_TEST_S = 150


@dataclass(frozen=True, slots=True)
class Pod:
    """A running router."""

    name: str
    address: str

    async def metrics(self) -> Mapping[str, float]:
        """Return the sum of all samples of each metric, and ``expired``, the requests without a reported end."""
        url = f"http://{self.address}:9090/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            text = await response.text()
        sums: dict[str, float] = {"expired": 0.0}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                if sample.labels.get("outcome") == "expired":
                    sums["expired"] += sample.value
        return sums


class Routers:
    """The routers' Deployment, and an Envoy that knows only the name of their headless Service."""

    def __init__(self, cluster: Cluster, namespace: str, directory: Path, nameserver: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._directory = directory
        self._names = directory / "resolv.conf"
        # The same file as a kubelet writes for pods with the DNS policy ClusterFirst.
        domains = f"{namespace}.svc.cluster.local svc.cluster.local cluster.local"
        self._names.write_text(f"search {domains}\nnameserver {nameserver}\noptions ndots:5\n")

    async def deploy(self, pool: Path, redis_url: str) -> None:
        """Apply the chart's objects of the routers, with this machine's program instead of an image."""
        objects = [each for each in render(namespace=self._namespace) if each["metadata"]["name"].startswith(ROUTERS)]
        kept = [each for each in objects if each["kind"] in {"Deployment", "Service", "PodDisruptionBudget"}]
        (deployment,) = [each for each in kept if each["kind"] == "Deployment"]
        pod = deployment["spec"]["template"]["spec"]
        (router,) = pod["containers"]
        wanted = ("--drain-timeout=", "--peer=")
        options = [each for each in router["args"] if each.startswith(wanted)]
        key = self._directory / "hash.key"
        key.write_bytes(b"the hash key of this test")
        command = dualmap_argv(
            "router", "--pool", pool, "--host", "$(POD_IP)", "--replica-id", "$(POD_NAME)", "--redis", redis_url,
            "--hash-key-file", key, *options,
        )  # fmt: skip
        fields = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}
        environment = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
        container = {
            **{key: value for key, value in router.items() if key in {"name", "ports"} or key.endswith("Probe")},
            "image": "dualmap:e2e",
            "command": self.in_pod_dns(command),
            "env": environment,
        }
        # On a busy machine a router may take seconds to answer a probe.
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            container[probe] = {**container[probe], "timeoutSeconds": 10}
        deployment["spec"]["template"]["spec"] = {
            "containers": [container],
            "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        }
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": kept})
        await self.kubectl("apply", "-f", "-", input=document)

    def in_pod_dns(self, command: list[str]) -> list[str]:
        """Return a command that runs ``command`` with the DNS configuration of a pod."""
        mount = f"mount --bind {shlex.quote(str(self._names))} /etc/resolv.conf"
        return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]

    async def scale(self, replicas: int) -> None:
        """Change the number of routers as a user does."""
        await self.kubectl("scale", f"deployment/{ROUTERS}", f"--replicas={replicas}")

    async def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Run kubectl in the namespace; return its output."""
        return await asyncio.to_thread(lambda: self._cluster.kubectl("-n", self._namespace, *arguments, input=input))

    async def pods(self) -> list[Pod]:
        """Return the routers whose pods exist, also those that start or drain."""
        found = json.loads(await self.kubectl("get", "pods", "-l", "app.kubernetes.io/component=router", "-o", "json"))
        return [Pod(each["metadata"]["name"], each["status"].get("podIP", "")) for each in found["items"]]

    async def until_ready(self, count: int) -> list[Pod]:
        """Wait until exactly this number of routers exists, all ready; return them."""

        async def there() -> bool:
            found = json.loads(await self.kubectl("get", f"deployment/{ROUTERS}", "-o", "json"))
            ready = found["status"].get("readyReplicas", 0) == found["status"].get("replicas", 0) == count
            return ready and len(await self.pods()) == count

        await until(there, f"{count} routers are ready", timeout_s=GONE_WITHIN_S)
        return await self.pods()

    async def open_gateway(self) -> Envoy:
        """Return an Envoy, not yet started, that finds the routers by the name in the chart's configuration."""
        argv = dualmap_argv(
            "envoy-config", "--discover", "--router", f"{ROUTERS}.{self._namespace}:9002",
            "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
        )  # fmt: skip
        made = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        text, _ = await made.communicate()
        assert made.returncode == 0
        document = yaml.safe_load(text)
        source = {"address": ENVOY_ADDRESS, "port_value": 0}
        document["cluster_manager"] = {"upstream_bind_config": {"source_address": source}}
        envoy = Envoy(yaml.safe_dump(document), directory=self._directory, concurrency=2)
        envoy.child.argv = self.in_pod_dns(envoy.child.argv)
        return envoy


@pytest.fixture
async def routers(cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> AsyncIterator[Routers]:
    """Two routers, without an Envoy."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    namespace = cluster.namespace()
    async with AsyncExitStack() as stack:
        services = stack.enter_context(Services(cluster))
        redis = stack.enter_context(redis_server(tmp_path / "redis"))
        engines = [Engine(directory=tmp_path, name=f"engine-{number}", host=ENGINE_ADDRESS) for number in range(3)]
        await asyncio.gather(*map(stack.enter_async_context, engines))
        pool = write_pool(tmp_path / "pool.json", pool_document([engine.member for engine in engines]))
        deployed = Routers(cluster, namespace, tmp_path, services.nameserver)
        await deployed.deploy(pool, redis.url)
        try:
            yield deployed
        finally:
            await asyncio.to_thread(cluster.remove_namespace, namespace)


def _conversation(number: int) -> dict[str, Any]:
    beginning = f"You are assistant {number % 8}. " * 40
    return {**chat("qwen", f"{beginning} Question {number}."), "max_tokens": 60}


@pytest.mark.timeout(_TEST_S, func_only=True)
async def test_scaled_routers_lose_no_request(routers: Routers) -> None:
    await routers.until_ready(2)
    async with await routers.open_gateway() as envoy:
        traffic = Traffic(lambda: envoy.url, _conversation, streams=8, plain=2)
        async with traffic.running():
            await traffic.flowing(30)
            await routers.scale(4)
            four = await routers.until_ready(4)

            async def all_used() -> bool:
                return all([(await pod.metrics()).get("dualmap_requests_total", 0) >= 3 for pod in four])

            await until(all_used, "every router picks", timeout_s=USED_WITHIN_S)
            await traffic.flowing(30)
            await routers.scale(1)
            (last,) = await routers.until_ready(1)
            await traffic.flowing(30)
        print(f"2 to 4 to 1 routers: {dict(tally(traffic.exchanges))}")
        assert failed(traffic.exchanges) == []
        assert [each for each in traffic.exchanges if not each.routed] == []
        await envoy.wait_for_hosts("dualmap-routers", {f"{last.address}:9002"})

        async def idle() -> bool:
            return (await last.metrics())["dualmap_endpoint_in_flight_requests"] == 0

        await until(idle, "the router counts no request in flight", timeout_s=USED_WITHIN_S)
        metrics = await last.metrics()
        assert metrics["dualmap_completions_total"] == metrics["dualmap_requests_total"]
        assert metrics["expired"] == 0
