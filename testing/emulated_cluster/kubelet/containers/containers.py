"""The interface of a pod's containers, and a fake container that has a status only.

``pods.py`` runs the containers of a pod and reads their states. ``process_containers.py`` implements containers with
processes.
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
    """The settings that all pods of a node share.

    Each container writes to a file under ``logs``. If ``images`` has a container's image, the container runs in the
    root file system of this image. Other containers run as processes of this machine and inherit ``environment``. The
    volumes of pods with images are under ``folder``, or under ``memory`` if their medium is Memory. Pods with images
    use the DNS server ``nameserver`` and the API server at ``api_server``.
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
    """The addresses of a pod and its host, and the settings of its node."""

    address: str
    host_address: str
    node: NodeSettings


class Container(Protocol):
    """The interface of a container."""

    @property
    def view(self) -> ContainerView:
        """The current state."""

    @property
    def pid(self) -> int | None:
        """The ID of the main process while it runs."""

    async def run(self) -> None:
        """Run the container, with restarts, until its final end. Cancellation kills all its processes."""

    def stop(self, grace_s: float) -> None:
        """Begin to stop the container without a restart; a second call can only shorten the grace period."""

    def crash(self) -> None:
        """Kill the main process, like a crash; raises ProcessLookupError if the container does not run."""

    async def execute(self, command: Sequence[str], *, log: Path) -> int:
        """Run a command in the container, writing to ``log``; raises ProcessLookupError if the container does not
        run."""


class FakeContainer:
    """A container without a process and with the status running and ready."""

    def __init__(self, spec: Object, on_change: Callable[[], None]) -> None:
        self._spec = spec
        self._on_change = on_change
        self._state: State = Running(started_s=time.time())
        self._stopping = asyncio.Event()

    @property
    def view(self) -> ContainerView:
        """The state, without a process."""
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
        """Wait until the container is stopped."""
        await self._stopping.wait()

    def stop(self, grace_s: float) -> None:
        """End at once: there is no process to wait for."""
        if isinstance(self._state, Running):
            now_s = time.time()
            self._state = Terminated(exit_code=0, started_s=self._state.started_s, finished_s=now_s)
            self._stopping.set()
            self._on_change()

    def crash(self) -> None:
        """Raise ProcessLookupError: there is no process."""
        raise ProcessLookupError(f"the fake container {self._spec['name']} has no process")

    async def execute(self, command: Sequence[str], *, log: Path) -> int:
        """Raise ProcessLookupError: there is no process."""
        raise ProcessLookupError(f"the fake container {self._spec['name']} has no process")


def log_name(pod: str, uid: str, container: str) -> str:
    """Return the name of a container's log file, which differs between pods of the same name."""
    return f"{pod}_{uid[:8]}_{container}.log"
