"""A namespace with the installed chart: the actions of a platform team, and the requests of clients.

`test_helm.py` tests the chart's life cycle. `test_helm_keda.py` scales a pool of the chart with KEDA. `helm.py` runs
helm, and `kubelet/` runs the pods from images.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from controlplane import crds
from controlplane.helm import CHART, Helm, references
from emulated_cluster.control_plane.cluster import Cluster
from harness import fail_open
from harness.traffic import Traffic
from harness.waiting import until

RELEASE = "dualmap"
MODEL = "qwen-model"
POOL = "qwen"
CRD = "inferencepools.serving.dualmap.dev"
DECISION = "x-dualmap-decision"
_DEFINITION = f"customresourcedefinition.apiextensions.k8s.io/{CRD}"
# The operator creates the Lease, and releases it for the next operator. helm does not remove the Lease.
_LEASE = "lease.coordination.k8s.io/dualmap-operator"
# Objects of `helm test` are not in the release; helm removes these objects before the next test.
_HOOKS = {f"pod/{RELEASE}-test", f"configmap/{RELEASE}-test"}
# Kinds of autoscaling objects, which have a pool's name.
_AUTOSCALING = {f"scaledobject.keda.sh/{POOL}", f"horizontalpodautoscaler.autoscaling/{POOL}"}
_HELM_WAIT = ("--wait", "--timeout", "5m")
_WAIT_S = 180.0
_REQUEST_S = 30.0
_PAUSE_S = 0.1
_ASK_AGAIN_S = 0.5
# The cluster's controllers write these objects some time after a namespace is created or its pods are deleted.
_NOT_OURS = {"events", "events.events.k8s.io"}
_EVERY_NAMESPACES = "configmap/kube-root-ca.crt"
_CLUSTER_WIDE = (
    "clusterroles",
    "clusterrolebindings",
    "customresourcedefinitions",
    "validatingadmissionpolicies",
    "validatingadmissionpolicybindings",
)


class Site:
    """One release of the chart, in a new namespace that enforces the Pod Security Standard `restricted`."""

    def __init__(self, cluster: Cluster, helm: Path, directory: Path) -> None:
        self._cluster = cluster
        self.namespace = cluster.namespace()
        cluster.kubectl("label", "namespace", self.namespace, "pod-security.kubernetes.io/enforce=restricted")
        # Remove the CRD that other tests applied, because this CRD belongs to no release.
        crds.remove(cluster)
        directory.mkdir(parents=True, exist_ok=True)
        self._helm = Helm(helm, kubeconfig=cluster.kubeconfig(), namespace=self.namespace, directory=directory)
        self._audited = len(cluster.audit())

    def leave(self) -> None:
        """Remove the release, if it still exists, and the namespace."""
        self._count_failures()
        self._helm("uninstall", RELEASE, "--ignore-not-found", "--no-hooks")
        crds.remove_namespace(self._cluster, self.namespace)

    def _count_failures(self) -> None:
        """Count the failures of the present routers, for the check after each test."""
        selector = "app.kubernetes.io/component=router"
        pods = self._cluster.kubectl("-n", self.namespace, "get", "pods", "-l", selector, "-o", "json")
        fail_open.count_pods(json.loads(pods)["items"])

    async def install(self, values: Mapping[str, Any]) -> None:
        """Install the unchanged chart and wait until helm reports that all components run."""
        await self.helm("install", RELEASE, CHART, "--values", self._helm.values("install", values), *_HELM_WAIT)

    async def upgrade(self, version: str, values: Mapping[str, Any]) -> None:
        """Upgrade to another version of the chart, with additional values."""
        chart = await asyncio.to_thread(self._helm.package, version)
        changed = self._helm.values("upgrade", values)
        await self.helm("upgrade", RELEASE, chart, "--reuse-values", "--values", changed, *_HELM_WAIT)

    async def helm(self, *arguments: str | Path) -> str:
        """Run a helm command in the namespace and return its output."""
        if arguments[0] == "uninstall":
            await asyncio.to_thread(self._count_failures)
        return await asyncio.to_thread(self._helm, *arguments)

    async def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Run kubectl in the namespace as the administrator and return its output."""
        return await asyncio.to_thread(lambda: self._cluster.kubectl("-n", self.namespace, *arguments, input=input))

    async def get(self, *what: str) -> dict[str, Any]:
        """Return an object or a list of objects from the API server."""
        answer: dict[str, Any] = json.loads(await self.kubectl("get", *what, "-o", "json"))
        return answer

    async def released(self) -> tuple[str, int]:
        """Return the installed chart (name and version) and revision."""
        (release,) = json.loads(await self.helm("list", "--output", "json"))
        return release["chart"], int(release["revision"])

    async def until_deployed(self, component: str, replicas: int) -> dict[str, Any]:
        """Wait until a component of the chart has exactly these replicas, all available; return the component's
        workload.
        """
        last: dict[str, Any] = {}

        async def there() -> bool:
            last.update(await self.get("deployment", f"{RELEASE}-{component}"))
            status = last["status"]
            current = status.get("observedGeneration") == last["metadata"]["generation"]
            counts = {status.get(key, 0) for key in ("replicas", "updatedReplicas", "availableReplicas")}
            return current and counts == {replicas}

        await until_so(there, f"{component} has {replicas} replicas")
        return last

    async def make_pool(self, replicas: int, *, speed: float = 1.0, **spec: Any) -> None:
        """Apply a pool of simulated engines and wait until the pool serves requests.

        ``spec`` replaces fields of the pool's spec.
        """
        await self.kubectl("apply", "-f", "-", input=json.dumps(pool_of_engines(self.namespace, replicas, speed, spec)))

        async def serves() -> bool:
            conditions = (await self.get("dmpool", POOL)).get("status", {}).get("conditions", [])
            return any(each["type"] == "Available" and each["status"] == "True" for each in conditions)

        await until_so(serves, f"{POOL} is available")

    async def until_active(self, fits: Callable[[int], bool], what: str) -> None:
        """Wait until ``fits`` accepts the number of active members, and all members are active."""
        last: dict[str, Any] = {}

        async def so() -> bool:
            last.clear()
            last.update((await self.get("dmpool", POOL)).get("status", {}))
            states = [member["state"] for member in last.get("ring", {}).get("members", [])]
            return set(states) == {"Active"} and fits(len(states)) and last.get("replicas") == len(states)

        try:
            await until_so(so, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; the status is {json.dumps(last, indent=1)}") from error

    async def delete_pool(self) -> None:
        """Delete the pool and wait until the pool and its pods no longer exist."""
        await self.kubectl("delete", f"dmpool/{POOL}", "--wait=false")

        async def gone() -> bool:
            found = await self.kubectl("get", "dmpool,pods", "-o", "name")
            return f"/{POOL}" not in found

        await until_so(gone, f"{POOL} has gone")

    async def traffic(
        self, *, streams: int, plain: int, tokens: int, prompt: Callable[[int], str] = "Question {}.".format
    ) -> Traffic:
        """Return clients of the gateway's Service. ``prompt`` returns a request's text by its number.

        The header ``x-request-id`` of a request is ``request-NUMBER``.
        """
        url = await self.gateway()

        def body(number: int) -> dict[str, Any]:
            messages = [{"role": "user", "content": prompt(number)}]
            return {"model": MODEL, "messages": messages, "max_tokens": tokens}

        return Traffic(
            lambda: url, body, streams=streams, plain=plain, headers=lambda number: {"x-request-id": request_id(number)}
        )

    async def chat(self, url: str) -> tuple[int, str]:
        """Send a chat request; return the response's status and the router's decision ("" if missing)."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
        limit = aiohttp.ClientTimeout(total=_REQUEST_S)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as answer,
        ):
            await answer.read()
            return answer.status, answer.headers.get(DECISION, "")

    async def containers(self, component: str) -> set[str]:
        """Return the container IDs of a component's pods. A restart of a container changes the ID."""
        pods = await self.get("pods", "-l", f"app.kubernetes.io/component={component}")
        return {each["containerID"] for pod in pods["items"] for each in pod["status"]["containerStatuses"]}

    async def gateway(self) -> str:
        """Return the URL of the gateway's Service."""
        spec = (await self.get("service", f"{RELEASE}-gateway"))["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    async def until_answered(self) -> str:
        """Wait until a response of the gateway has a router's decision; return the decision."""
        url = await self.gateway()
        said: list[tuple[int, str]] = []

        async def answered() -> bool:
            with suppress(aiohttp.ClientError, TimeoutError):
                said.append(await self.chat(url))
            return bool(said) and said[-1][0] == 200 and said[-1][1] != ""

        try:
            await until_so(answered, "the gateway answers by a router's decision")
        except AssertionError as error:
            raise AssertionError(f"{error}; last answer: {said[-1:]}") from error
        return said[-1][1]

    @asynccontextmanager
    async def requests(self) -> AsyncIterator[Counter[str]]:
        """Send one request after the other and count the outcomes: "decided", "undecided" or the failure.

        The client retries a refused connection. On a busy machine, probes are slow, so the Service may have no ready
        Envoy for some seconds. The gateway must answer each request on an accepted connection.
        """
        url = await self.gateway()
        outcomes: Counter[str] = Counter()

        async def send() -> None:
            while True:
                try:
                    status, decision = await self.chat(url)
                    outcomes[f"HTTP {status}" if status != 200 else "decided" if decision else "undecided"] += 1
                except aiohttp.ClientConnectorError:
                    pass
                except (aiohttp.ClientError, TimeoutError) as error:
                    outcomes[repr(error)] += 1
                await asyncio.sleep(_PAUSE_S)

        sending = asyncio.create_task(send())
        try:
            yield outcomes
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def objects(self) -> set[str]:
        """Return the objects of the namespace, and the roles and definitions of the cluster, as kind/name."""
        kinds = (await self.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name")).split()
        wanted = ",".join(kind for kind in kinds if kind not in _NOT_OURS and "metrics" not in kind)
        found = (await self.kubectl("get", wanted, "-o", "name", "--ignore-not-found")).split()
        found += (await self.kubectl("get", ",".join(_CLUSTER_WIDE), "-o", "name")).split()
        return set(found) - {_EVERY_NAMESPACES}

    async def until_only_the_pools_are_left(self, before: set[str]) -> None:
        """Wait until the only new objects are the pool, its children and its CRD."""
        left: set[str] = set()

        async def gone() -> bool:
            left.clear()
            left.update(await self.objects() - before)
            others = {each for each in left if f"/{POOL}" not in each} | left & _AUTOSCALING
            return others <= {_DEFINITION, _LEASE, *_HOOKS}

        try:
            await until_so(gone, "only the pools are left")
        except AssertionError as error:
            raise AssertionError(f"{error}; there are {sorted(left)}") from error
        assert _DEFINITION in left
        assert {f"inferencepool.serving.dualmap.dev/{POOL}", f"statefulset.apps/{POOL}", f"pod/{POOL}-0"} <= left

    def refused(self) -> list[str]:
        """Return the requests of operator and routers that RBAC denied."""
        accounts = {f"system:serviceaccount:{self.namespace}:{RELEASE}-{who}" for who in ("operator", "router")}
        return [
            f"{entry['user']['username']} {entry['verb']} {entry['requestURI']}"
            for entry in self._cluster.audit()[self._audited :]
            if entry["user"].get("username") in accounts and entry.get("responseStatus", {}).get("code") == 403
        ]


def request_id(number: int) -> str:
    """Return the header ``x-request-id`` of a request of ``Site.traffic``."""
    return f"request-{number}"


async def until_so(check: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until ``check`` is true; fail with ``what`` in the message.

    The polling interval is long, because each check runs a program.
    """

    async def seldom() -> bool:
        if await check():
            return True
        await asyncio.sleep(_ASK_AGAIN_S)
        return False

    await until(seldom, what, timeout_s=_WAIT_S)


def pool_of_engines(
    namespace: str, replicas: int, speed: float = 1.0, spec: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a pool of simulated engines, which run DualMap's image with its entry point."""
    arguments = ("--host=0.0.0.0", "--port=8000", f"--model={MODEL}", "--preset=7b", f"--speed={speed:g}")
    container = {
        "name": "engine",
        "image": references().dualmap,
        "args": ["engine-sim", *arguments],
        "ports": [{"name": "http", "containerPort": 8000}],
        # On a busy machine a pod may take seconds to answer.
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 10},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": POOL, "namespace": namespace},
        "spec": {
            "model": {"name": MODEL},
            "engine": {"type": "vLLM"},
            "replicas": replicas,
            "workload": {"template": {"spec": {"securityContext": security, "containers": [container]}}},
            "drain": {"timeout": "30s"},
            **(spec or {}),
        },
    }
