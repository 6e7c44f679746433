"""A router that watches the tests' Kubernetes API, for the tests of ``pools.kube``."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dualmap.pools.pool import Member, Pool
from dualmap_edge.kube.client import KubeClient
from dualmap_edge.kube.watch import WatchPolicy
from dualmap_extproc.pools.kube import KubePools
from dualmap_extproc.pools.metrics import KubeMetrics
from kube_api import KubeApi, kube_api
from waiting import WAIT_S, until

QUICK = WatchPolicy(timeout_s=600.0, inactivity_s=601.0, first_pause_s=0.01, longest_pause_s=0.02)


@pytest.fixture(name="api")
async def kube_api_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[KubeApi]:
    """The API that a test's router watches; the fixture captures the router's logs at every level."""
    caplog.set_level(logging.INFO, "dualmap_extproc")
    caplog.set_level(logging.INFO, "dualmap_edge")
    async with kube_api(tmp_path) as api:
        yield api


class Watched:
    """The served pools of a router with ``--kube``."""

    def __init__(self, source: KubePools, registry: CollectorRegistry) -> None:
        self.source = source
        self.told: list[tuple[Pool, ...]] = []
        self.fail_with: Exception | None = None
        self._registry = registry
        self._news = asyncio.Event()

    def take(self, pools: tuple[Pool, ...]) -> None:
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        self.told.append(pools)
        self._news.set()

    @property
    def pools(self) -> dict[str, Pool]:
        return {pool.id: pool for pool in self.told[-1]} if self.told else {}

    def members(self, pool: str = "llm/qwen") -> dict[str, Member]:
        return {member.id: member for member in self.pools[pool].members}

    def states(self, pool: str = "llm/qwen") -> dict[str, str]:
        return {each.id: each.state.value for each in self.members(pool).values()} if pool in self.pools else {}

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the served pools meet a condition."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._news.clear()
                await self._news.wait()

    def sample(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def watching(
    api: KubeApi,
    namespace: str | None = None,
    *,
    policy: WatchPolicy = QUICK,
    listed: bool = True,
    reservations_in: str | None = None,
) -> AsyncIterator[Watched]:
    client = await KubeClient.connect(api.kubeconfig)
    registry = CollectorRegistry()
    refused: list[None] = []
    observer = KubeMetrics(registry, lambda: refused.append(None))
    source = KubePools(client, namespace, observer, policy=policy, reservations_in=reservations_in)
    observer.show_ages(source.ages_s)
    watched = Watched(source, registry)
    running = asyncio.create_task(source.run(watched.take))
    try:
        if listed:
            await asyncio.wait_for(source.listed(), WAIT_S)
        yield watched
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


async def pods_are_watched(api: KubeApi) -> None:
    """Wait until the router has listed the pods and opened the pods' watch."""
    await until(lambda: any("/pods?" in watch for watch in api.watches))


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[dict[str, Any]]:
    return [record.__dict__["details"] for record in caplog.records if words in record.getMessage()]
