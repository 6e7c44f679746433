"""Pools from a Kubernetes API: what the router serves, whatever the API server and the objects do."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dualmap.pool import Member, Pool
from dualmap_edge.kube import KubeClient
from dualmap_extproc.pools.kube import PODS, POOLS, KubePools
from dualmap_extproc.pools.metrics import KubeMetrics
from dualmap_extproc.pools.reflector import Patience
from kube_api import KubeApi, kube_api, pod_body, pool_body
from waiting import WAIT_S, until

QUICK = Patience(watch_s=600.0, inactivity_s=601.0, first_pause_s=0.01, longest_pause_s=0.02)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubeApi]:
    async with kube_api(tmp_path) as api:
        yield api


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dualmap_extproc")


class Watched:
    """What a router with ``--kube`` serves."""

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
        """Wait until what is served is so."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._news.clear()
                await self._news.wait()

    def sample(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def watching(
    api: KubeApi, namespace: str | None = None, *, patience: Patience = QUICK, listed: bool = True
) -> AsyncIterator[Watched]:
    client = await KubeClient.connect(api.kubeconfig)
    registry = CollectorRegistry()
    refused: list[None] = []
    observer = KubeMetrics(registry, lambda: refused.append(None))
    source = KubePools(client, namespace, observer, patience=patience)
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
    """Return once the pods have been listed and their watch is open."""
    await until(lambda: any("/pods?" in watch for watch in api.watches))


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[dict[str, Any]]:
    return [record.__dict__["details"] for record in caplog.records if words in record.getMessage()]


class TestPools:
    async def test_pools_come_change_and_go(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            assert list(watched.pools) == ["llm/qwen"]
            await api.put(pool_body("qwen", version=2, members={"qwen-0": {}}))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            assert list(watched.members()) == ["qwen-0"]
            await api.put(pool_body("llama", namespace="other"))
            await watched.until(lambda: "other/llama" in watched.pools)
            await api.delete(pool_body("qwen"))
            await watched.until(lambda: list(watched.pools) == ["other/llama"])

    async def test_only_those_of_a_namespace_when_one_is_given(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pool_body("llama", namespace="other"))
        async with watching(api, "other") as watched:
            assert list(watched.pools) == ["other/llama"]
            assert api.lists[0].endswith("/namespaces/other/inferencepools")
            assert not any("/namespaces/llm/" in path for path in api.lists + api.watches)

    async def test_none_at_all_is_an_answer(self, api: KubeApi) -> None:
        async with watching(api) as watched:
            assert watched.told == [()]

    async def test_more_than_one_page(self, api: KubeApi) -> None:
        for number in range(251):
            await api.put(pool_body(f"p{number}-x", selector=""))
        async with watching(api) as watched:
            assert len(watched.pools) == 251
        assert len(api.lists) == 2

    async def test_what_does_not_matter_to_a_router_is_no_news(self, api: KubeApi) -> None:
        body = pool_body("qwen", selector="")
        await api.put(body)
        async with watching(api) as watched:
            await api.put({**body, "status": {**body["status"], "replicas": 7}})
            await api.put(pool_body("qwen", version=5, selector=""))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 5)
            assert len(watched.told) == 2

    async def test_a_pool_made_anew_is_another(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen", version=9))
        async with watching(api) as watched:
            await api.delete(pool_body("qwen"))
            await api.put(pool_body("qwen", version=1, uid="another", members={}))
            await watched.until(lambda: watched.pools.get("llm/qwen") is not None and not watched.members())
            assert watched.pools["llm/qwen"].ring_version == 1


class TestRefusals:
    async def test_a_refused_object_keeps_its_last_good_version_and_freezes_no_other(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(pool_body("qwen", created=1))
        await api.put(pool_body("llama"))
        async with watching(api) as watched:
            await api.put(pool_body("qwen", created=1, version=2, spec={"slo": {"ttft": "soon"}}))
            await api.put(pool_body("llama", version=2))
            await watched.until(lambda: watched.pools["llm/llama"].ring_version == 2)
            assert watched.pools["llm/qwen"].ring_version == 1
            (refusal,) = said(caplog, "pool refused")
            assert (refusal["pool"], refusal["field"], refusal["value"]) == ("llm/qwen", "spec.slo.ttft", "'soon'")
            assert watched.sample("dualmap_kube_pools_refused") == 1
            await api.put(pool_body("qwen", created=1, version=3))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 3)
            assert watched.sample("dualmap_kube_pools_refused") == 0
            assert said(caplog, "not refused any more") == [{"pool": "llm/qwen"}]

    async def test_a_refusal_is_said_once_however_often_it_is_seen(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad = pool_body("qwen", spec={"slo": {"ttft": "soon"}})
        await api.put(bad)
        async with watching(api) as watched:
            await api.put(bad)
            await api.put(pool_body("llama"))
            await watched.until(lambda: "llm/llama" in watched.pools)
        assert len(said(caplog, "pool refused")) == 1

    async def test_a_refused_object_made_anew_does_not_serve_what_the_deleted_one_had(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            # As after a list, where the deletion was not seen.
            await api.put(pool_body("qwen", uid="another", spec={"slo": {"ttft": "soon"}}))
            await watched.until(lambda: not watched.pools)

    @pytest.mark.parametrize("body", [{}, {"metadata": None, "status": 3}, {"metadata": {"name": 5}}])
    async def test_garbage_is_refused_like_anything_else(self, api: KubeApi, body: dict[str, Any]) -> None:
        whole = {"kind": "InferencePool", "metadata": {"name": "x", "namespace": "llm"}}
        await api.put({**whole, "spec": body, "status": body.get("status", [])})
        await api.put(pool_body("llama"))
        async with watching(api) as watched:
            assert list(watched.pools) == ["llm/llama"]

    async def test_of_two_that_claim_a_model_the_older_has_it(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(pool_body("a", created=2, model="shared"))
        await api.put(pool_body("b", created=1, model="shared"))
        await api.put(pool_body("c", created=0, model="other"))
        async with watching(api) as watched:
            # The picker gives a name to the first that has it.
            assert list(watched.pools) == ["llm/c", "llm/b", "llm/a"]
            (refusal,) = said(caplog, "pool refused")
            assert (refusal["pool"], refusal["value"]) == ("llm/a", "'shared'")
            assert "llm/b" in refusal["accepted"]
            await api.put(pool_body("a", version=2, created=2, model="shared"))
            await watched.until(lambda: watched.pools["llm/a"].ring_version == 2)
            await api.delete(pool_body("b"))
            await watched.until(lambda: "llm/b" not in watched.pools)
            assert watched.sample("dualmap_kube_pools_refused") == 0

    async def test_of_two_of_one_age_the_name_decides(self, api: KubeApi) -> None:
        await api.put(pool_body("b", model="shared"))
        await api.put(pool_body("a", model="shared"))
        async with watching(api) as watched:
            assert list(watched.pools) == ["llm/a", "llm/b"]

    async def test_pools_that_cannot_be_taken_over_do_not_end_the_watch(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            watched.fail_with = ValueError("no room")
            await api.put(pool_body("qwen", version=2))
            await until(lambda: watched.fail_with is None)
            await api.put(pool_body("qwen", version=3))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 3)
        assert "no room" in said(caplog, "could not be taken over")[0]["reason"]


class TestTheApiServer:
    async def test_at_the_start_it_may_be_away(self, api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
        await api.put(pool_body("qwen"))
        await api.stop()
        async with watching(api, listed=False) as watched:
            await until(lambda: watched.sample("dualmap_kube_errors_total", resource=POOLS, kind="unreached") >= 3)
            assert not watched.told
            await api.start()
            await asyncio.wait_for(watched.source.listed(), WAIT_S)
            assert list(watched.pools) == ["llm/qwen"]
        # Said when it is new, not at every attempt.
        assert len(said(caplog, "cannot be read")) == 1
        assert said(caplog, "waiting for the pools")[0]["scope"] == "all namespaces"

    async def test_away_for_a_while_what_is_known_serves_on(
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
        assert {each["resource"] for each in said(caplog, "answers again")} >= {POOLS}

    @pytest.mark.parametrize("status", [403, 404, 500, 503])
    async def test_a_refusal_takes_nothing_away(self, api: KubeApi, status: int) -> None:
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

    async def test_a_version_that_is_gone_is_listed_again(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pool_body("llama"))
        async with watching(api) as watched:
            await until(lambda: api.open_watches == 3)
            api.refuse_watches_with = 410
            api.cut_watches()
            await until(lambda: watched.sample("dualmap_kube_errors_total", resource=POOLS, kind="expired") >= 1)
            # Nothing tells of the deletion but its absence.
            await api.delete(pool_body("qwen"))
            await api.forget()
            api.refuse_watches_with = None
            await watched.until(lambda: list(watched.pools) == ["llm/llama"])

    async def test_a_version_that_is_gone_may_be_told_in_the_watch(self, api: KubeApi) -> None:
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

    async def test_a_watch_that_was_cut_without_a_word_is_noticed(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen", selector=""))
        patience = Patience(watch_s=30.0, inactivity_s=0.2, first_pause_s=0.01, longest_pause_s=0.02)
        async with watching(api, patience=patience) as watched:
            await until(lambda: api.open_watches == 1)
            api.fall_silent()
            await api.put(pool_body("qwen", version=2, selector=""))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            assert watched.sample("dualmap_kube_errors_total", resource=POOLS, kind="unreached") >= 1

    async def test_a_watch_that_ends_in_time_goes_on_where_it_was(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen", selector=""))
        patience = Patience(watch_s=1.0, inactivity_s=60.0, first_pause_s=0.01, longest_pause_s=0.02)
        async with watching(api, patience=patience) as watched:
            await until(lambda: len(api.watches) >= 2)
            await api.put(pool_body("qwen", version=2, selector=""))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            assert len(api.lists) == 1
            assert watched.sample("dualmap_kube_lists_total", resource=POOLS) == 1

    async def test_bookmarks_carry_a_watch_past_what_is_forgotten(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen", selector=""))
        patience = Patience(watch_s=1.0, inactivity_s=60.0, first_pause_s=0.01, longest_pause_s=0.02)
        async with watching(api, patience=patience) as watched:
            await until(lambda: api.open_watches == 1)
            await api.bookmark()
            await until(lambda: api.watched_from[-1] == api.version)
            assert (len(api.lists), len(watched.told)) == (1, 1)


class TestPods:
    async def test_one_that_stops_serving_leaves_before_the_pool_says_so_and_comes_back(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(pool_body("qwen", version=4))
        await api.put(pod_body("qwen-0"))
        await api.put(pod_body("qwen-1"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            assert watched.states() == {"qwen-0": "Active", "qwen-1": "Active"}
            await api.put(pod_body("qwen-1", ready=False))
            await watched.until(lambda: watched.states() == {"qwen-0": "Active", "qwen-1": "Draining"})
            assert watched.pools["llm/qwen"].ring_version == 4
            await api.put(pod_body("qwen-1"))
            await watched.until(lambda: watched.states() == {"qwen-0": "Active", "qwen-1": "Active"})
        left_out = [each["members"] for each in said(caplog, "whose pods do not serve")]
        assert left_out == [["qwen-1"], []]

    @pytest.mark.parametrize("how", ["terminating", "deleted", "moved"])
    async def test_one_that_ends_leaves(self, api: KubeApi, how: str) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            if how == "terminating":
                await api.put(pod_body("qwen-0", terminating=True))
            elif how == "deleted":
                await api.delete(pod_body("qwen-0"))
            else:
                await api.put(pod_body("qwen-0", uid="another", address="10.244.0.99"))
            await watched.until(lambda: watched.states() == {"qwen-0": "Draining", "qwen-1": "Active"})

    async def test_one_that_is_not_known_is_as_the_pool_says(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0", ready=False))
        async with watching(api) as watched:
            await watched.until(lambda: watched.states() == {"qwen-0": "Draining", "qwen-1": "Active"})

    async def test_one_that_vanished_while_nobody_watched(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            await api.stop()
            await api.delete(pod_body("qwen-0"))
            await api.forget()
            await api.start()
            await watched.until(lambda: watched.states()["qwen-0"] == "Draining")

    async def test_all_of_them_may_be_unready(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0", ready=False))
        await api.put(pod_body("qwen-1", ready=False))
        async with watching(api) as watched:
            await watched.until(lambda: set(watched.states().values()) == {"Draining"})
            assert not any(member.takes_new_keys for member in watched.members().values())

    async def test_what_the_pool_says_later_counts_more(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            await api.put(pod_body("qwen-0", ready=False))
            await watched.until(lambda: watched.states()["qwen-0"] == "Draining")
            # The operator follows, then lets it in again: it has seen it serve, whether or not we have.
            await api.put(pool_body("qwen", version=2, members={"qwen-0": {"state": "Draining"}, "qwen-1": {}}))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            await api.put(pool_body("qwen", version=3, members={"qwen-0": {"state": "Joining"}, "qwen-1": {}}))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 3)
            assert watched.states()["qwen-0"] == "Joining"
            # And what its pod says after that counts more again.
            await api.put(pod_body("qwen-0", ready=False))
            await watched.until(lambda: watched.states()["qwen-0"] == "Draining")

    async def test_a_version_that_says_nothing_new_of_it_does_not(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            await api.put(pod_body("qwen-0", ready=False))
            await watched.until(lambda: watched.states()["qwen-0"] == "Draining")
            members = {"qwen-0": {"weight": 50}, "qwen-1": {}, "qwen-2": {}}
            await api.put(pool_body("qwen", version=2, members=members))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            assert watched.states() == {"qwen-0": "Draining", "qwen-1": "Active", "qwen-2": "Active"}

    async def test_one_restarted_in_place_is_another_life_of_it(self, api: KubeApi) -> None:
        lives = {"qwen-0": {"incarnation": "qwen-0-u-0"}, "qwen-1": {}}
        await api.put(pool_body("qwen", members=lives))
        await api.put(pod_body("qwen-0"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            assert watched.members()["qwen-0"].incarnation == "qwen-0-u-0"
            await api.put(pod_body("qwen-0", restarts=1))
            await watched.until(lambda: watched.members()["qwen-0"].incarnation == "qwen-0-u-1")
            assert watched.states()["qwen-0"] == "Active"
            # The operator's word of yet another life, which the pod's watch has not brought yet.
            lives["qwen-0"]["incarnation"] = "qwen-0-u-2"
            await api.put(pool_body("qwen", version=2, members=lives))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            assert watched.members()["qwen-0"].incarnation == "qwen-0-u-2"

    async def test_the_pods_of_a_pool_are_those_its_selector_finds(self, api: KubeApi) -> None:
        body = pool_body("qwen", selector="")
        await api.put(body)
        await api.put(pod_body("qwen-0", ready=False))
        async with watching(api) as watched:
            assert watched.states()["qwen-0"] == "Active"
            await api.put(pool_body("qwen", selector="serving.dualmap.dev/pool=qwen"))
            await watched.until(lambda: watched.states()["qwen-0"] == "Draining")
            await api.put(pool_body("qwen", selector="serving.dualmap.dev/pool=none"))
            await watched.until(lambda: watched.states()["qwen-0"] == "Active")
            pods = "/api/v1/namespaces/llm/pods?serving.dualmap.dev/pool"
            await until(lambda: {each for each in api.lists if "/pods?" in each} == {f"{pods}=qwen", f"{pods}=none"})

    async def test_a_pool_that_is_gone_leaves_no_watch_behind(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            await until(lambda: api.open_watches == 2)
            assert watched.source.ages_s().keys() == {POOLS, PODS}
            await api.delete(pool_body("qwen"))
            await until(lambda: api.open_watches == 1)
            assert watched.source.ages_s().keys() == {POOLS}


class TestAges:
    async def test_the_age_of_the_news_is_shown(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            await api.stop()
            await until(lambda: watched.sample("dualmap_kube_watch_age_seconds", resource=POOLS) > 0.2)
            await until(lambda: watched.sample("dualmap_kube_watch_age_seconds", resource=PODS) > 0.2)
            await api.start()
            await until(lambda: watched.sample("dualmap_kube_watch_age_seconds", resource=POOLS) < 0.2)
