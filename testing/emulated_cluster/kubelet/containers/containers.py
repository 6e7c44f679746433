"""The interface of a pod's containers, and a fake container that has a status only.

``pods.py`` holds the containers of a pod, reads their views and stops them; ``process_containers.py`` has real ones.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from emulated_cluster.kubelet.containers.status import ContainerView, Running, State, Terminated
from emulated_cluster.kubelet.isolation.roots import Image

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What all pods of a node share.

    Processes of this machine inherit ``environment``; each container writes to a file under ``logs``. Containers whose
    image is among ``images`` run in its root file system; their pods' volumes lie under ``folder``, and under
    ``memory`` those whose medium is Memory; they ask ``nameserver``, and reach the API server at ``api_server``.
    """

    environment: Mapping[str, str]
    logs: Path
    images: Mapping[str, Image]
    nameserver: str | None
    api_server: tuple[str, int]
    folder: Path
    memory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLocation:
    """Where a pod's containers run."""

    address: str
    host_address: str
    node: NodeSettings


class Container(Protocol):
    """The interface of a container."""

    @property
    def view(self) -> ContainerView:
        """The present state."""

    @property
    def pid(self) -> int | None:
        """The ID of the main process while it runs."""

    async def run(self) -> None:
        """Run the container, with restarts, until its final end. Cancelled, it leaves no process."""

    def stop(self, grace_s: float) -> None:
        """Begin to stop the container for good; a second call can only shorten the grace period."""

    def crash(self) -> None:
        """Kill the main process, like a crash; raises ProcessLookupError where none runs."""

    async def execute(self, command: Sequence[str], *, log: Path) -> int:
        """Run a command beside the main process, writing to ``log``; raises ProcessLookupError where nothing runs."""


class FakeContainer:
    """A container without a process: its status is running and ready."""

    def __init__(self, spec: Object, on_change: Callable[[], None]) -> None:
        self._spec = spec
        self._on_change = on_change
        self._state: State = Running(started_s=time.time())
        self._stopping = asyncio.Event()

    @property
    def view(self) -> ContainerView:
        """The state that it reports."""
        running = isinstance(self._state, Running)
        return ContainerView(
            name=self._spec["name"],
            image=self._spec.get("image", ""),
            container_id="",
            state=self._state,
            last=None,
            restarts=0,
            started=running,
            ready=running,
            over=not running,
        )

    @property
    def pid(self) -> int | None:
        """None: there is no process."""
        return None

    async def run(self) -> None:
        """Wait until it is stopped."""
        await self._stopping.wait()

    def stop(self, grace_s: float) -> None:
        """End at once: what does nothing needs no grace."""
        if isinstance(self._state, Running):
            now_s = time.time()
            self._state = Terminated(exit_code=0, started_s=self._state.started_s, finished_s=now_s)
            self._stopping.set()
            self._on_change()

    def crash(self) -> None:
        """There is nothing to kill."""
        raise ProcessLookupError(f"container {self._spec['name']} is a fake")

    async def execute(self, command: Sequence[str], *, log: Path) -> int:
        """There is nothing to run it in."""
        raise ProcessLookupError(f"container {self._spec['name']} is a fake")


def log_name(pod: str, uid: str, container: str) -> str:
    """Return the name of a container's log file; a pod of the same name that came later has another."""
    return f"{pod}_{uid[:8]}_{container}.log"
