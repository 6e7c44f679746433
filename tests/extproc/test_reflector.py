"""Tests of pools from a Kubernetes API: the served pools during faults of the API server."""

import asyncio

import pytest

from dualmap_edge.kube.watch import WatchPolicy
from dualmap_extproc.pools.kube import PODS, POOLS
from extproc.kube_watching import (
    kube_api_server,  # noqa: F401  # pytest finds fixtures by import
    pods_are_watched,
    said,
    watching,
)
from kube_api import KubeApi, pool_body
from waiting import WAIT_S, until


class TestApiServerFaults:
    async def test_reflector_retries_if_the_api_server_is_absent_at_start(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(pool_body("qwen"))
        await api.stop()
        async with watching(api, listed=False) as watched:
            await until(lambda: watched.sample("dualmap_kube_errors_total", resource=POOLS, kind="unreached") >= 3)
            assert not watched.told
            await api.start()
            await asyncio.wait_for(watched.source.listed(), WAIT_S)
            assert list(watched.pools) == ["llm/qwen"]
        # The router logs a new error once, and not at every attempt.
        assert len(said(caplog, "Kubernetes list or watch failed")) == 1
        assert said(caplog, "Listing pools from the Kubernetes API")[0]["scope"] == "all namespaces"

    async def test_reflector_keeps_last_pools_without_the_api_server(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            await api.stop()
            await until(lambda: watched.sample("dualmap_kube_errors_total", resource=POOLS, kind="unreached") >= 3)
            assert list(watched.pools) == ["llm/qwen"]
            await api.put(pool_body("qwen", version=2))
            await api.put(pool_body("llama"))
            await api.start()
            await watched.until(lambda: "llm/llama" in watched.pools)
            assert watched.pools["llm/qwen"].ring_version == 2
        assert {each["kind"] for each in said(caplog, "Kubernetes watch recovered")} >= {POOLS}

    @pytest.mark.parametrize("status", [403, 404, 500, 503])
    async def test_reflector_removes_no_pool_after_an_api_server_error(self, api: KubeApi, status: int) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            await until(lambda: api.open_watches == 2)
            api.refuse_with = status
            api.cut_watches()
            await until(lambda: watched.sample("dualmap_kube_errors_total", resource=POOLS, kind="refused") >= 2)
            assert list(watched.pools) == ["llm/qwen"]
            api.refuse_with = None
            await api.put(pool_body("qwen", version=2))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)

    async def test_reflector_lists_again_after_expired_version(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pool_body("llama"))
        async with watching(api) as watched:
            await until(lambda: api.open_watches == 3)
            api.refuse_watches_with = 410
            api.cut_watches()
            await until(lambda: watched.sample("dualmap_kube_errors_total", resource=POOLS, kind="expired") >= 1)
            # Only the pool's absence from the list shows the deletion.
            await api.delete(pool_body("qwen"))
            await api.forget()
            api.refuse_watches_with = None
            await watched.until(lambda: list(watched.pools) == ["llm/llama"])

    async def test_reflector_lists_again_after_expired_version_in_watch(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen", selector=""))
        api.hold_lists()
        async with watching(api, listed=False) as watched:
            await until(lambda: len(api.lists) == 1)
            api.answer_lists()
            await asyncio.wait_for(watched.source.listed(), WAIT_S)
            await until(lambda: api.open_watches == 1)
            await api.put(pool_body("qwen", version=2, selector=""))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            await api.forget()
            await api.delete(pool_body("qwen"))
            api.cut_watches()
            await watched.until(lambda: not watched.pools)

    async def test_reflector_detects_a_silent_watch(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen", selector=""))
        policy = WatchPolicy(timeout_s=30.0, inactivity_s=0.2, first_pause_s=0.01, longest_pause_s=0.02)
        async with watching(api, policy=policy) as watched:
            await until(lambda: api.open_watches == 1)
            api.fall_silent()
            await api.put(pool_body("qwen", version=2, selector=""))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            assert watched.sample("dualmap_kube_errors_total", resource=POOLS, kind="unreached") >= 1

    async def test_reflector_continues_an_ended_watch_at_its_version(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen", selector=""))
        policy = WatchPolicy(timeout_s=1.0, inactivity_s=60.0, first_pause_s=0.01, longest_pause_s=0.02)
        async with watching(api, policy=policy) as watched:
            await until(lambda: len(api.watches) >= 2)
            await api.put(pool_body("qwen", version=2, selector=""))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            assert len(api.lists) == 1
            assert watched.sample("dualmap_kube_lists_total", resource=POOLS) == 1

    async def test_reflector_advances_the_version_at_bookmarks(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen", selector=""))
        policy = WatchPolicy(timeout_s=1.0, inactivity_s=60.0, first_pause_s=0.01, longest_pause_s=0.02)
        async with watching(api, policy=policy) as watched:
            await until(lambda: api.open_watches == 1)
            await api.bookmark()
            await until(lambda: api.watched_from[-1] == api.version)
            assert (len(api.lists), len(watched.told)) == (1, 1)


class TestAges:
    async def test_reflector_watch_age_is_exported_as_metric(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            await api.stop()
            await until(lambda: watched.sample("dualmap_kube_watch_age_seconds", resource=POOLS) > 0.2)
            await until(lambda: watched.sample("dualmap_kube_watch_age_seconds", resource=PODS) > 0.2)
            await api.start()
            await until(lambda: watched.sample("dualmap_kube_watch_age_seconds", resource=POOLS) < 0.2)
