"""DualMap on the tests' control plane: operator, routers and Envoy as processes, and simulated engines as pods.

The installation is like a user's: the repository's CRD and RBAC, service account tokens, and ``envoy-config`` with the
output of kubectl. ``harness.traffic`` generates the load.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from controlplane import crds
from controlplane.history import History
from emulated_cluster.api.client import ApiClient
from emulated_cluster.control_plane.cluster import Cluster
from harness.envoy import Envoy
from harness.processes import Child, dualmap_argv
from harness.stack import Router
from harness.traffic import Traffic
from harness.waiting import until
from redis_server import redis_server

ROOT = Path(__file__).parents[2]
MODEL = "qwen-model"
SYSTEM = "dualmap-system"
_WAIT_S = 120.0
# The API server is slow with a thousand pods on a busy machine.
_ANSWER_S = 60.0


# A shell that kills the engine at SIGTERM, to act like an engine without a graceful shutdown.
_ABRUPT = ("/bin/sh", "-c", '"$@" & trap "kill -KILL $!" TERM; wait', "engine")
# Addresses for a Service's endpoints, which must not be loopback addresses. All pod addresses are local to this
# machine.
_ROUTER_ADDRESS = "10.244.255.{}"


def pool_manifest(
    name: str, namespace: str, *, replicas: int, speed: float = 1.0, abrupt: bool = False, **spec: Any
) -> dict[str, Any]:
    """Return an InferencePool with simulated engines as pods. ``spec`` replaces fields of the pool's spec.

    ``abrupt`` engines end at SIGTERM, without a delay by preStop. Their streams complete only if the operator drains
    them before SIGTERM.
    """
    engine = [sys.executable, "-m", "dualmap_cli", "engine-sim", "--host", "$(POD_IP)", "--port", "8000"]
    # On a busy machine a pod may take seconds to answer.
    probe = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1, "timeoutSeconds": 10}
    container: dict[str, Any] = {
        "name": "engine",
        "image": "dualmap:e2e",
        "command": [*engine, "--model", MODEL, "--preset", "7b", "--speed", f"{speed:g}"],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": probe,
    }
    pod: dict[str, Any] = {"containers": [container]}
    if abrupt:
        container["command"] = [*_ABRUPT, *container["command"]]
        container["lifecycle"] = {"preStop": {"exec": {"command": ["true"]}}}
        pod["terminationGracePeriodSeconds"] = 5
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"name": MODEL},
            "engine": {"type": "vLLM"},
            "replicas": replicas,
            "workload": {"template": {"spec": pod}},
            "drain": {"timeout": "60s"},
            **spec,
        },
    }


class Operator(Child):
    """A ``dualmap operator`` process with the API server of ``kubeconfig``."""

    def __init__(
        self, *, kubeconfig: Path, directory: Path, name: str, namespace: str, arguments: Sequence[str] = ()
    ) -> None:
        ports = ("--host", "127.0.0.1", "--metrics-port", "0", "--health-port", "0")
        environment = ("/usr/bin/env", f"KUBECONFIG={kubeconfig}", f"POD_NAMESPACE={namespace}", f"POD_NAME={name}")
        argv = [*environment, *dualmap_argv("operator", *ports, "--log-level", "debug", *arguments)]
        super().__init__(name, argv, directory=directory)
        self.ports: dict[str, int] = {}

    async def start(self) -> None:
        """Start the operator and wait for its ready line, which has the ports."""
        before = len(self.output())
        await super().start()
        line = await self.wait_for_line(r"dualmap operator ready (.*)", after=before)
        self.ports = {
            kind: int(address.rpartition(":")[2]) for kind, address in (part.split("=", 1) for part in line[1].split())
        }

    async def healthy(self) -> bool:
        """Return whether ``/healthz`` answers 200."""
        url = f"http://127.0.0.1:{self.ports['health']}/healthz"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status == 200


class Product:
    """Operators, routers with Redis, and Envoy after a call of ``open_gateway``.

    The end of the context stops all started processes and removes the pools.
    """

    def __init__(self, cluster: Cluster, directory: Path, *, routers: int = 2) -> None:
        self.cluster = cluster
        self.directory = directory
        self.namespace = ""
        self.routers: list[Router] = []
        self.envoy: Envoy | None = None
        self._client: ApiClient
        self._audited = 0
        self._count = routers
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._audited = len(self.cluster.audit())
        await asyncio.to_thread(self._install)
        self._client = self.cluster.client()
        self._stack.push_async_callback(self._client.close)
        if self._count:
            redis = self._stack.enter_context(redis_server(self.directory / "redis"))
            routers = [self._router(f"router-{number}", redis.url) for number in range(self._count)]
            self.routers += await asyncio.gather(*map(self._stack.enter_async_context, routers))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        await asyncio.to_thread(crds.remove_namespace, self.cluster, self.namespace)

    async def operator(
        self,
        name: str = "operator-0",
        *arguments: str,
        finds_routers: bool = False,
        kubeconfig: Path | None = None,
    ) -> Operator:
        """Start an operator, which runs until the end of this context.

        The operator receives the routers' addresses from flags, or with ``finds_routers`` from the Service of
        ``publish_routers``. By default, the operator uses DualMap's service account; ``kubeconfig`` overrides this
        account.
        """
        known = [part for router in self.routers for part in ("--router", f"127.0.0.1:{router.ports['metrics']}")]
        if finds_routers:
            known = []
        operator = Operator(
            kubeconfig=kubeconfig or self.kubeconfig("dualmap-operator"),
            directory=self.directory,
            name=name,
            namespace=SYSTEM,
            arguments=("--namespace", self.namespace, *known, *arguments),
        )
        return await self._stack.enter_async_context(operator)

    def kubeconfig(self, account: str) -> Path:
        """Return a kubeconfig with the token of a DualMap service account."""
        return self.cluster.service_account_kubeconfig(SYSTEM, account)

    async def account_like_the_operators(self, name: str) -> str:
        """Create another service account with the operator's roles, for a separate user in the audit log; return its
        name.
        """
        account = {"kind": "ServiceAccount", "name": name, "namespace": SYSTEM}
        made = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": SYSTEM}}
        await self.apply(made, SYSTEM)
        for namespace in (SYSTEM, self.namespace):
            binding = {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": {"name": name, "namespace": namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "dualmap-operator"},
                "subjects": [account],
            }
            await self.apply(binding, namespace)
        return name

    async def publish_routers(self) -> None:
        """Create the headless Service for router discovery, and its endpoints, until the end of this context.

        No controller creates EndpointSlices for these processes, because they run outside pods. Each router has its own
        EndpointSlice with its ports.
        """
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "dualmap-router", "namespace": SYSTEM},
            "spec": {"clusterIP": "None", "ports": [{"name": "metrics", "port": 9090}]},
        }
        await self.apply(service, SYSTEM)
        slices = [f"endpointslice/{router.name}" for router in self.routers]
        gone = ("delete", "service/dualmap-router", *slices, "-n", SYSTEM, "--ignore-not-found")
        self._stack.push_async_callback(self.kubectl, *gone)
        for number, router in enumerate(self.routers, start=1):
            slice_ = {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": router.name,
                    "namespace": SYSTEM,
                    "labels": {
                        "kubernetes.io/service-name": "dualmap-router",
                        "endpointslice.kubernetes.io/managed-by": "e2e.dualmap.dev",
                    },
                },
                "addressType": "IPv4",
                "ports": [{"name": "metrics", "port": router.ports["metrics"]}],
                "endpoints": [
                    {"addresses": [_ROUTER_ADDRESS.format(10 + number)], "conditions": {"ready": True}},
                ],
            }
            await self.apply(slice_, SYSTEM)

    def audit(self) -> list[dict[str, Any]]:
        """Return the audit log's entries since the start of this context, for the pools' namespace and the system's
        namespace.
        """
        return [
            entry
            for entry in self.cluster.audit()[self._audited :]
            if entry.get("objectRef", {}).get("namespace") in (SYSTEM, self.namespace)
        ]

    def recording(self, name: str = "qwen") -> AbstractAsyncContextManager[History]:
        """Record every version of a pool and its StatefulSet."""
        return History(self._client, self.namespace, name).recording()

    async def kubectl(self, *arguments: str, input: str | None = None, check: bool = True) -> str:
        """Run kubectl as the administrator, by default in the pools' namespace."""
        scope = () if {"-n", "--namespace", "-A"} & set(arguments) else ("-n", self.namespace)
        return await asyncio.to_thread(lambda: self.cluster.kubectl(*scope, *arguments, input=input, check=check))

    async def apply(self, manifest: Mapping[str, Any], namespace: str | None = None) -> None:
        """Apply an object as a user does, by default in the pools' namespace."""
        where = namespace or self.namespace
        await self.kubectl("apply", "--server-side", "-n", where, "-f", "-", input=json.dumps(manifest))

    async def pool(self, name: str = "qwen") -> dict[str, Any]:
        """Return the pool's object from the API server."""
        path = f"/apis/serving.dualmap.dev/v1alpha1/namespaces/{self.namespace}/inferencepools/{name}"
        return await self._client.request("GET", path, timeout_s=_ANSWER_S)

    async def pods(self) -> dict[str, dict[str, Any]]:
        """Return the namespace's pods from the API server, by name."""
        answer = await self._client.request("GET", f"/api/v1/namespaces/{self.namespace}/pods", timeout_s=_ANSWER_S)
        return {pod["metadata"]["name"]: pod for pod in answer["items"]}

    async def states(self, name: str = "qwen") -> dict[str, str]:
        """Return the published members' states by id."""
        ring = (await self.pool(name)).get("status", {}).get("ring", {})
        return {member["id"]: member["state"] for member in ring.get("members", [])}

    async def until_active(self, count: int, name: str = "qwen", *, timeout_s: float = 240.0) -> None:
        """Wait until the ring has exactly the first ``count`` ordinals, all Active, and the StatefulSet has ``count``
        replicas.
        """
        wanted = {f"{name}-{number}": "Active" for number in range(count)}
        await self.until(lambda status: _states(status) == wanted and status.get("replicas") == count, name, timeout_s)

    async def until_in_ring(self, count: int, name: str = "qwen") -> None:
        """Wait until exactly the first ``count`` ordinals receive requests: they are Active, or Joining for 30 s."""
        wanted = {f"{name}-{number}" for number in range(count)}

        def in_ring(status: dict[str, Any]) -> bool:
            states = _states(status)
            return (
                states.keys() == wanted
                and set(states.values()) <= {"Active", "Joining"}
                and (status.get("replicas") == count)
            )

        await self.until(in_ring, name)

    async def until(
        self, holds: Callable[[dict[str, Any]], bool], name: str = "qwen", timeout_s: float = _WAIT_S
    ) -> None:
        """Wait until the pool's status meets the condition. A failure's message has the last status."""
        last: dict[str, Any] = {}

        async def as_wanted() -> bool:
            last.clear()
            last.update((await self.pool(name)).get("status", {}))
            return holds(last)

        try:
            await until(as_wanted, f"the status of {name} is as wanted", timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; the status is {json.dumps(last, indent=1)}") from error

    async def open_gateway(self, name: str = "qwen") -> Envoy:
        """Start an Envoy in front of the pool, configured from kubectl's output, and return it."""
        file = self.directory / f"{name}.yaml"
        file.write_text(await self.kubectl("get", f"dmpool/{name}", "-o", "yaml"))
        grpc, als = (",".join(f"127.0.0.1:{router.ports[port]}" for router in self.routers) for port in ("grpc", "als"))
        argv = dualmap_argv(
            "envoy-config", "--pool", file, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
            "--router", grpc, "--als", als,
        )  # fmt: skip
        made = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        config, _ = await made.communicate()
        assert made.returncode == 0
        self.envoy = await self._stack.enter_async_context(Envoy(config.decode(), directory=self.directory))
        return self.envoy

    def traffic(
        self, *, streams: int = 8, plain: int = 2, tokens: int = 60, prompt: Callable[[int], str] | None = None
    ) -> Traffic:
        """Return clients of the gateway that constantly keep ``streams`` streams of ``tokens`` tokens open.

        ``prompt`` returns a request's text by its number; the default alternates between eight conversations.
        """
        envoy = self.envoy
        assert envoy is not None, "open_gateway first"

        def body(number: int) -> dict[str, Any]:
            messages = _turn(number) if prompt is None else [{"role": "user", "content": prompt(number)}]
            return {"model": MODEL, "messages": messages, "max_tokens": tokens}

        return Traffic(lambda: envoy.url, body, streams=streams, plain=plain)

    def _install(self) -> None:
        """Create a namespace for pools, with the CRD and the namespaced permissions."""
        kubectl = self.cluster.kubectl
        self.namespace = self.cluster.namespace()
        crds.install(self.cluster)
        manifests = ROOT / "manifests"
        kubectl("apply", "-f", str(manifests / "namespace.yaml"), "-f", str(manifests / "rbac" / "system.yaml"))
        kubectl("apply", "-n", self.namespace, "-f", str(manifests / "rbac" / "namespaced.yaml"))

    def _router(self, name: str, redis_url: str) -> Router:
        # The router listens on all addresses: tests use loopback, and an operator uses the addresses of EndpointSlices.
        arguments = ("--kube", "--namespace", self.namespace, "--redis", redis_url, "--host", "0.0.0.0")
        router = Router((), directory=self.directory, name=name, arguments=arguments)
        router.argv = ["/usr/bin/env", f"KUBECONFIG={self.kubeconfig('dualmap-router')}", *router.argv]
        return router


def _states(status: Mapping[str, Any]) -> dict[str, str]:
    return {member["id"]: member["state"] for member in status.get("ring", {}).get("members", [])}


def _turn(number: int) -> list[dict[str, str]]:
    """Return a prompt with one of eight prefixes; an eighth of the requests shares each prefix."""
    beginning = f"You are assistant {number % 8}. " * 40
    return [{"role": "system", "content": beginning}, {"role": "user", "content": f"question {number}"}]
