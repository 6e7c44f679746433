"""Keeps the addresses that the proxy may ask equal to the members of pools, from files or from the Kubernetes API."""

import asyncio
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from pathlib import Path

from dualmap.pools.pool import Pool
from dualmap_edge.kube.client import KubeClient
from dualmap_extproc.pools.file import PoolFileWatcher
from dualmap_extproc.pools.kube import KubePools
from dualmap_sidecar.targets import Allowed, Target


def members(pools: Iterable[Pool]) -> frozenset[Target]:
    """Return the addresses of all members."""
    return frozenset(Target(ip_address(each.address), each.port) for pool in pools for each in pool.members)


class FileMembers:
    """The members of the pools in files. Raises PoolFileError for an invalid file."""

    def __init__(self, paths: Sequence[Path], allowed: Allowed) -> None:
        self._allowed = allowed
        self._watcher = PoolFileWatcher(paths)
        self._adopt(self._watcher.load())

    async def run(self) -> None:
        """Adopt every change of the files, until cancelled."""
        await self._watcher.run(self._adopt)

    async def close(self) -> None:
        """Release nothing: files are closed after each look."""

    def _adopt(self, pools: Sequence[Pool]) -> None:
        self._allowed.set_members(members(pools))


class KubeMembers:
    """The members of the pools in a namespace of the Kubernetes API. Until the first list, there are none."""

    def __init__(self, client: KubeClient, namespace: str, allowed: Allowed) -> None:
        self._client = client
        self._allowed = allowed
        self._pools = KubePools(client, namespace, _Unobserved())

    async def run(self) -> None:
        """Adopt every change of pools and pods, until cancelled."""
        await self._pools.run(lambda pools: self._allowed.set_members(members(pools)))

    async def close(self) -> None:
        """Close the connections to the API server."""
        await self._client.close()


class NoMembers:
    """No pools: only networks and addresses are allowed."""

    async def run(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Release nothing."""


class _Unobserved:
    """The counters of the Kubernetes watches (``KubePoolsObserver``), which log their failures themselves."""

    def kube_listed(self, resource: str) -> None: ...

    def kube_failed(self, resource: str, kind: str) -> None: ...

    def pools_refused(self) -> None: ...

    def kube_pools_refused(self, count: int) -> None: ...
