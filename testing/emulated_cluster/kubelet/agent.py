"""The event loop of a kubelet: follows the node's pods, runs a worker for each, and keeps the node ready.

``process_kubelet.py`` runs it in a thread. The pods' processes survive a restart of the API server.
"""

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Sequence
from ipaddress import IPv4Network
from typing import Any, Final

from emulated_cluster.api.client import ApiClient
from emulated_cluster.api.follow import follow
from emulated_cluster.kubelet.containers.containers import NodeSettings, Object, PodLocation
from emulated_cluster.kubelet.node import Node
from emulated_cluster.kubelet.pods import PodWorker

_PODS: Final = "/api/v1/pods"
_CALLS_AT_ONCE: Final = 16
_LOG: Final = logging.getLogger(__name__)


class NodeAgent:
    """Runs one node and stores the node's pods; belongs to one event loop."""

    def __init__(
        self,
        client: ApiClient,
        node: str,
        networks: Sequence[IPv4Network],
        settings: NodeSettings,
    ) -> None:
        """Use the first address of ``networks`` for the node and the other addresses for its pods.

        No other node may use these networks.
        """
        own, *others = [str(address) for network in networks for address in network.hosts()]
        self._client = client
        self._room = len(others)
        self._addresses = itertools.cycle(others)
        self._node = Node(node, own, self._room, client)
        self._settings = settings
        self._turns = asyncio.Semaphore(_CALLS_AT_ONCE)
        self._workers: dict[str, PodWorker] = {}
        self._talking: set[asyncio.Task[None]] = set()
        # Unexpected errors. Leaving the kubelet's context raises the first error.
        self.failures: list[BaseException] = []

    @property
    def workers(self) -> tuple[PodWorker, ...]:
        """The pods on the node, including those that are terminating."""
        return tuple(self._workers.values())

    async def start(self) -> None:
        """Register the node and run its pods."""
        await self._node.register()
        self._talk(self._node.stay_ready())
        query = (("fieldSelector", f"spec.nodeName={self._node.name}"),)
        self._talk(follow(self._client, _PODS, self, query=query))

    async def freeze(self) -> None:
        """Stop all communication with the API server, as after a network failure; the pods' processes continue."""
        talking = tuple(self._talking)
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)

    async def lose(self) -> None:
        """Freeze and kill all processes, like a machine that is switched off."""
        await self.freeze()
        await asyncio.gather(*(worker.abandon() for worker in self.workers))

    async def remove_node(self) -> None:
        """Delete the node, so that the scheduler assigns no more pods to the node."""
        await self._node.remove()

    def replace(self, objects: Sequence[Object]) -> None:
        """Process the result of a list; a known pod that the list does not contain was deleted."""
        there = {pod["metadata"]["uid"] for pod in objects}
        for uid, worker in tuple(self._workers.items()):
            if uid not in there:
                worker.forget()
        for pod in objects:
            self.put(pod)

    def put(self, item: Object) -> None:
        """Process an added or modified pod."""
        uid = item["metadata"]["uid"]
        worker = self._workers.get(uid)
        if worker is not None:
            worker.observe(item)
            return
        location = PodLocation(
            address=self._free_address(),
            host_address=self._node.address,
            node=self._settings,
        )
        self._workers[uid] = worker = PodWorker(item, location, self._client, self._turns)
        self._talk(self._tend(worker))

    def remove(self, item: Object) -> None:
        """Process a deleted pod."""
        worker = self._workers.get(item["metadata"]["uid"])
        if worker is not None:
            worker.forget()

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
            _LOG.error("Kubelet task failed", exc_info=failure)
            self.failures.append(failure)

    def _free_address(self) -> str:
        """Return the next free address. Addresses are reused in the order of their release."""
        taken = {worker.location.address for worker in self.workers}
        return next(each for each in itertools.islice(self._addresses, self._room) if each not in taken)
