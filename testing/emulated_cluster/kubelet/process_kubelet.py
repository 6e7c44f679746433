"""A kubelet for tests that runs pods as local processes, in its own thread and event loop.

``fixtures.py`` provides the kubelet to pytest. The docstring of ``ProcessKubelet`` lists the supported fields of a pod.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from emulated_cluster.api.client import ApiClient, ApiError
from emulated_cluster.kubelet.agent import NodeAgent
from emulated_cluster.kubelet.containers.containers import NodeSettings, log_name
from emulated_cluster.kubelet.isolation.roots import Image, why_not
from emulated_cluster.kubelet.pods import PodWorker
from emulated_cluster.loop_thread import LoopThread

_START_TIMEOUT_S: Final = 60.0
_FAREWELL_TIMEOUT_S: Final = 5.0
# A tmpfs that every Linux has, for volumes with the medium Memory.
_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod on the node at one moment. ``processes`` has the IDs of the main processes by container name."""

    namespace: str
    name: str
    uid: str
    address: str
    ready: bool
    processes: Mapping[str, int]


class RootsError(Exception):
    """This machine cannot run containers with their own root file systems; the message has the reason."""


class ProcessKubelet:
    """A node that runs pods as local processes, in a network namespace with the pods' addresses.

    Supported: command, args and env with ``$(VAR)``, fieldRef, ConfigMaps and Secrets; init containers; startup,
    liveness and readiness probes (httpGet, tcpSocket, exec, grpc); readiness gates; restartPolicy with a short
    back-off; preStop (exec, httpGet, sleep) before SIGTERM; grace periods with SIGKILL at their end; eviction and
    deletion; outages of the API server.

    Also supported for containers with an image in ``images``: the root file system, volumes (emptyDir, configMap,
    secret, downwardAPI, projected, persistentVolumeClaim of a volume of the type local), users and groups, a network
    namespace per pod, host names, the service account's token. Other containers run as processes of this machine and
    cannot mount volumes.

    Not supported: postStart, resources, capabilities, init containers that keep running. A pod with the annotation
    ``kubelet.dualmap.dev/fake: "true"`` has a status but no process.
    """

    def __init__(
        self,
        kubeconfig: Path,
        node: str,
        networks: Sequence[IPv4Network],
        *,
        environment: Mapping[str, str],
        logs: Path,
        api_server: tuple[str, int],
        images: Mapping[str, Path | Image] | None = None,
        nameserver: str | None = None,
    ) -> None:
        """Create a node with the addresses of ``networks``, which limit its number of pods.

        Containers inherit ``environment``. Each container writes to a file in the existing folder ``logs``. ``images``
        maps image references to root file systems. Pods with such images use the DNS server ``nameserver`` and the API
        server at ``api_server``. Raises RootsError if this machine cannot run containers with their own root file
        systems.
        """
        reason = why_not() if images else None
        if reason is not None:
            raise RootsError(reason)
        self.node = node
        self._kubeconfig = kubeconfig
        self._networks = networks
        self._environment = environment
        self._logs = logs
        self._api_server = api_server
        given = (images or {}).items()
        self._images = {name: each if isinstance(each, Image) else Image(root=each) for name, each in given}
        self._nameserver = nameserver
        self._thread = LoopThread(self._serve, name=f"kubelet-{node}")

    def pods(self) -> tuple[PodView, ...]:
        """Return the pods on the node, including those that are terminating."""

        async def views() -> tuple[PodView, ...]:
            return tuple(_view(worker) for worker in self._agent.workers)

        return self._thread.call(views())

    def pod(self, namespace: str, name: str) -> PodView:
        """Return the newest pod of this name on the node; raises LookupError."""
        for view in reversed(self.pods()):
            if (view.namespace, view.name) == (namespace, name):
                return view
        raise LookupError(f"node {self.node} has no pod {namespace}/{name}")

    def kill(self, pod: PodView) -> None:
        """Kill a pod's processes with SIGKILL, as a crash does; raises LookupError or ProcessLookupError."""

        async def crash() -> None:
            worker = next((each for each in self._agent.workers if each.uid == pod.uid), None)
            if worker is None:
                raise LookupError(f"node {self.node} no longer has pod {pod.namespace}/{pod.name} {pod.uid}")
            for container in worker.containers.values():
                container.crash()

        self._thread.call(crash())

    def execute(self, pod: PodView, container: str, command: Sequence[str]) -> tuple[int, str]:
        """Run a command in a running container, like ``kubectl exec``; return its exit status and output.

        Raises LookupError, or ProcessLookupError if the container does not run.
        """

        async def run(log: Path) -> int:
            worker = next((each for each in self._agent.workers if each.uid == pod.uid), None)
            if worker is None or container not in worker.containers:
                raise LookupError(f"node {self.node} has no container {container} in {pod.namespace}/{pod.name}")
            return await worker.containers[container].execute(command, log=log)

        with tempfile.NamedTemporaryFile() as output:
            log = Path(output.name)
            return self._thread.call(run(log)), log.read_text(errors="replace")

    def log(self, pod: PodView) -> str:
        """Return the output of a pod's containers, probes and hooks, also after the pod's end."""
        written = sorted(self._logs.glob(log_name(pod.name, pod.uid, "*")))
        return "".join(each.read_text(errors="replace") for each in written)

    def freeze_node(self) -> None:
        """Disconnect the node from the API server permanently; its processes continue."""
        self._thread.call(self._agent.freeze())

    def lose_node(self) -> None:
        """Switch the node off permanently: stop its heartbeats and kill its processes."""
        self._thread.call(self._agent.lose())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill all processes and delete the node; raise the kubelet's error unless the test has already failed."""
        failure = self._thread.stop() or next(iter(self._agent.failures), None)
        if error is None and failure is not None:
            raise failure

    @property
    def _agent(self) -> NodeAgent:
        return self._thread.served

    @asynccontextmanager
    async def _serve(self) -> AsyncGenerator[NodeAgent, None]:
        with ExitStack() as folders:
            folder, memory = (
                Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="dualmap-kubelet-", dir=where)))
                for where in (None, _MEMORY)
            )
            async with self._serve_from(folder, memory) as agent:
                yield agent

    @asynccontextmanager
    async def _serve_from(self, folder: Path, memory: Path) -> AsyncGenerator[NodeAgent, None]:
        client = ApiClient.from_kubeconfig(self._kubeconfig)
        settings = NodeSettings(
            environment=self._environment,
            logs=self._logs,
            images=self._images,
            nameserver=self._nameserver,
            api_server=self._api_server,
            folder=folder,
            memory=memory,
        )
        agent = NodeAgent(client, self.node, self._networks, settings)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await agent.start()
            yield agent
        finally:
            await agent.lose()
            try:
                async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                    await agent.remove_node()
            except (ApiError, TimeoutError):
                pass  # The API server may already be stopped.
            await client.close()


def _view(worker: PodWorker) -> PodView:
    return PodView(
        namespace=worker.namespace,
        name=worker.name,
        uid=worker.uid,
        address=worker.location.address,
        ready=worker.ready,
        processes={name: each.pid for name, each in worker.containers.items() if each.pid is not None},
    )
