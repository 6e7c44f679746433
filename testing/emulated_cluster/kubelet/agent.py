"""A kubelet's one loop: follow the node's pods by list and watch, one worker for each, and keep the node alive.

``process_kubelet.py`` runs it in a thread. An API server that restarts is listed and watched again; processes stay.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Sequence
from ipaddress import IPv4Network
from typing import Any, Final

from dualmap_edge.kube.client import KubeClient, KubeError
from emulated_cluster.api.retries import RETRY_S, passing
from emulated_cluster.kubelet.containers.containers import NodeSettings, Object, Place
from emulated_cluster.kubelet.node import Node
from emulated_cluster.kubelet.pods import PodWorker

_PODS: Final = "/api/v1/pods"
_LIST_TIMEOUT_S: Final = 30.0
_CALLS_AT_ONCE: Final = 16
_LOG: Final = logging.getLogger(__name__)


class NodeAgent:
    """Everything that happens on one node. Belongs to one event loop."""

    def __init__(
        self,
        client: KubeClient,
        node: str,
        networks: Sequence[IPv4Network],
        settings: NodeSettings,
    ) -> None:
        """``networks`` give the node their first address and one to each pod; no other node may have the same."""
        own, *others = [str(address) for network in networks for address in network.hosts()]
        self._client = client
        self._room = len(others)
        self._addresses = itertools.cycle(others)
        self._node = Node(node, own, self._room, client)
        self._settings = settings
        self._turns = asyncio.Semaphore(_CALLS_AT_ONCE)
        self._workers: dict[str, PodWorker] = {}
        self._talking: set[asyncio.Task[None]] = set()
        # What no test asked for: the first of it is raised when the kubelet is left.
        self.failures: list[BaseException] = []

    @property
    def workers(self) -> tuple[PodWorker, ...]:
        """The pods on the node, also those that end at the moment."""
        return tuple(self._workers.values())

    async def start(self) -> None:
        """Register the node; from then on its pods run."""
        await self._node.register()
        self._talk(self._node.stay_ready())
        self._talk(self._follow())

    async def freeze(self) -> None:
        """Say nothing more and hear of nothing more, as a node cut off from its API server; processes run on."""
        talking = tuple(self._talking)
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)

    async def lose(self) -> None:
        """Freeze, and kill everything that runs on the node, as when its machine is switched off."""
        await self.freeze()
        await asyncio.gather(*(worker.abandon() for worker in self.workers))

    async def remove_node(self) -> None:
        """Delete the node, so that nothing is scheduled to it."""
        await self._node.remove()

    async def _follow(self) -> None:
        while True:
            try:
                version = await self._list()
                while True:
                    version = await self._watch(version)
            except KubeError as error:
                if not passing(error) and not error.expired:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _list(self) -> str:
        """Take in every pod of the node as it is now; returns the version that a watch goes on from."""
        pods = await self._client.request("GET", _PODS, query=self._query(), timeout_s=_LIST_TIMEOUT_S)
        there = {pod["metadata"]["uid"] for pod in pods["items"]}
        for uid, worker in tuple(self._workers.items()):
            if uid not in there:
                worker.forget()
        for pod in pods["items"]:
            self._observe(pod)
        version: str = pods["metadata"]["resourceVersion"]
        return version

    async def _watch(self, version: str) -> str:
        """Take in what happens after ``version`` until the watch ends; returns the version to go on from."""
        query = (*self._query(), ("resourceVersion", version))
        async with contextlib.aclosing(self._client.watch(_PODS, query=query)) as events:
            async for event in events:
                version = event.object["metadata"]["resourceVersion"]
                if event.type in {"ADDED", "MODIFIED"}:
                    self._observe(event.object)
                elif event.type == "DELETED" and event.object["metadata"]["uid"] in self._workers:
                    self._workers[event.object["metadata"]["uid"]].forget()
        return version

    def _query(self) -> tuple[tuple[str, str], ...]:
        return (("fieldSelector", f"spec.nodeName={self._node.name}"),)

    def _observe(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if worker is not None:
            worker.observe(pod)
            return
        place = Place(
            address=self._free_address(),
            host_address=self._node.address,
            node=self._settings,
        )
        self._workers[uid] = worker = PodWorker(pod, place, self._client, self._turns)
        self._talk(self._tend(worker))

    async def _tend(self, worker: PodWorker) -> None:
        await worker.run()
        del self._workers[worker.uid]

    def _talk(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._talking.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._talking.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            _LOG.error("a task of the kubelet failed", exc_info=failure)
            self.failures.append(failure)

    def _free_address(self) -> str:
        """Return the next address that no pod has: one that became free just now is the last to be given again."""
        taken = {worker.place.address for worker in self.workers}
        return next(each for each in itertools.islice(self._addresses, self._room) if each not in taken)
