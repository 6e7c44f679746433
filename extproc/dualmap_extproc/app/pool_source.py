"""Where a router's pools come from: files, or the Kubernetes API. A command may also give a source of its own."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from dualmap.pools.pool import Pool
from dualmap_edge.kube.client import KubeClient
from dualmap_extproc.pools.file import PoolFileWatcher
from dualmap_extproc.pools.kube import KubePools
from dualmap_extproc.pools.metrics import KubeMetrics
from dualmap_extproc.settings import KubeSettings, Settings
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_extproc.tokens.sources import PoolTokenizers


class PoolSource(Protocol):
    """A source of pools, which calls ``PoolUser.adopt`` with all pools after each change."""

    async def run(self) -> None:
        """Adopt every change, until cancelled."""

    async def known(self) -> None:
        """Wait until the first pools are adopted; before, the router is not ready. Called once, while ``run`` runs."""

    async def close(self) -> None:
        """Close the connections. Called once, also if ``run`` was never called."""

    def ages_s(self) -> Mapping[str, float]:
        """Return, for each resource that the source watches, the seconds since the last answer of its server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUser:
    """What a source of pools may use of the router.

    ``adopt`` applies a new version of all pools. ``metrics`` counts rejected pools. ``tokenizers`` checks the pools'
    tokenizers.
    """

    adopt: Callable[[Sequence[Pool]], None]
    metrics: Metrics
    tokenizers: PoolTokenizers


OpenPools: TypeAlias = Callable[[PoolUser], Awaitable[PoolSource]]
"""Opens a source of pools, and may adopt the first pools immediately."""


def pools_of(settings: Settings) -> OpenPools:
    """Return the function that opens the source in the settings: the Kubernetes API, else files.

    The function raises KubeConfigError, PoolFileError, and TokenizerError for the tokenizer of a pool in a file.
    """

    async def open_source(user: PoolUser) -> PoolSource:
        if settings.kube is not None:
            return _KubeSource(await KubeClient.connect(), settings.kube, user)
        return _FileSource(settings.pools, user)

    return open_source


class _FileSource:
    """The pools of files, which are read and adopted at once (PoolSource)."""

    def __init__(self, files: Sequence[Path], user: PoolUser) -> None:
        self._user = user
        self._files = PoolFileWatcher(files)
        pools = self._files.load()
        user.tokenizers.start(pools)
        user.adopt(pools)

    async def run(self) -> None:
        metrics = self._user.metrics
        await self._files.run(self._user.adopt, lambda _: metrics.pools_refused(), metrics.pool_file_refused)

    async def known(self) -> None:
        return

    async def close(self) -> None:
        return

    def ages_s(self) -> Mapping[str, float]:
        return {}


class _KubeSource:
    """The InferencePools of a Kubernetes API (PoolSource)."""

    def __init__(self, client: KubeClient, kube: KubeSettings, user: PoolUser) -> None:
        self._client = client
        self._user = user
        observer = KubeMetrics(user.metrics.registry, user.metrics.pools_refused)
        # Within one namespace, no other namespace can take a model name.
        reservations_in = kube.pod_namespace if kube.namespace is None else None
        self._pools = KubePools(client, kube.namespace, observer, reservations_in=reservations_in)
        observer.show_ages(self._pools.ages_s)

    async def run(self) -> None:
        await self._pools.run(self._user.adopt)

    async def known(self) -> None:
        await self._pools.listed()

    async def close(self) -> None:
        await self._client.close()

    def ages_s(self) -> Mapping[str, float]:
        return self._pools.ages_s()
