"""Pools from a Kubernetes API: the pools that the router serves for any objects."""

from typing import Any

import pytest

from dualmap_extproc.pools.kube import PODS, POOLS
from extproc.kube_watching import (
    kube_api_server,  # noqa: F401  # pytest finds fixtures by import
    pods_are_watched,
    said,
    watching,
)
from kube_api import KubeApi, pod_body, pool_body
from waiting import until


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
            (refusal,) = said(caplog, "Keeping last valid pool")
            assert (refusal["pool"], refusal["field"], refusal["value"]) == ("llm/qwen", "spec.slo.ttft", "'soon'")
            assert watched.sample("dualmap_kube_pools_refused") == 1
            await api.put(pool_body("qwen", created=1, version=3))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 3)
            assert watched.sample("dualmap_kube_pools_refused") == 0
            assert said(caplog, "Pool is valid again") == [{"pool": "llm/qwen"}]

    async def test_a_refusal_is_said_once_however_often_it_is_seen(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad = pool_body("qwen", spec={"slo": {"ttft": "soon"}})
        await api.put(bad)
        async with watching(api) as watched:
            await api.put(bad)
            await api.put(pool_body("llama"))
            await watched.until(lambda: "llm/llama" in watched.pools)
        assert len(said(caplog, "Keeping last valid pool")) == 1

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
            (refusal,) = said(caplog, "Keeping last valid pool")
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
        assert "no room" in said(caplog, "Keeping last valid pools, applying a change failed")[0]["reason"]


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
        left_out = [each["members"] for each in said(caplog, "Excluding members with unready pods")]
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
            # The operator follows, then admits it again: it has seen the pod serve, whether the router has or not.
            await api.put(pool_body("qwen", version=2, members={"qwen-0": {"state": "Draining"}, "qwen-1": {}}))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            await api.put(pool_body("qwen", version=3, members={"qwen-0": {"state": "Joining"}, "qwen-1": {}}))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 3)
            assert watched.states()["qwen-0"] == "Joining"
            # After that its pod's state counts again.
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
            # The operator reports another restart, which the pod's watch has not delivered yet.
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
