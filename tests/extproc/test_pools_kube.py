"""Tests of pools from a Kubernetes API: the served pools for each state of the objects."""

from typing import Any

import pytest

from core.test_pods import NO_POD_ADDRESSES
from dualmap.objects.pods import LEAVE_AT
from dualmap.objects.pool_reader import API_VERSION
from dualmap.objects.times import read_time
from dualmap_extproc.pools.kube import PODS, POOLS
from dualmap_extproc.pools.objects import PoolObjects
from extproc.kube_watching import (
    kube_api_server,  # noqa: F401  # pytest finds fixtures by import
    pods_are_watched,
    said,
    watching,
)
from kube_api import KubeApi, pod_body, pool_body
from waiting import until

API = {"apiVersion": API_VERSION, "kind": "InferencePool"}


class TestPools:
    async def test_kube_watch_adds_changes_and_removes_pools(self, api: KubeApi) -> None:
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

    async def test_kube_namespace_option_limits_the_pools(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pool_body("llama", namespace="other"))
        async with watching(api, "other") as watched:
            assert list(watched.pools) == ["other/llama"]
            assert api.lists[0].endswith("/namespaces/other/inferencepools")
            assert not any("/namespaces/llm/" in path for path in api.lists + api.watches)

    async def test_kube_without_pools_reports_an_empty_list(self, api: KubeApi) -> None:
        async with watching(api) as watched:
            assert watched.told == [()]

    async def test_kube_list_of_several_pages_is_read(self, api: KubeApi) -> None:
        for number in range(251):
            await api.put(pool_body(f"p{number}-x", selector=""))
        async with watching(api) as watched:
            assert len(watched.pools) == 251
        assert len(api.lists) == 2

    async def test_kube_change_of_irrelevant_fields_is_not_reported(self, api: KubeApi) -> None:
        body = pool_body("qwen", selector="")
        await api.put(body)
        async with watching(api) as watched:
            await api.put({**body, "status": {**body["status"], "replicas": 7}})
            await api.put(pool_body("qwen", version=5, selector=""))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 5)
            assert len(watched.told) == 2

    async def test_kube_pool_created_again_is_a_new_pool(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen", version=9))
        async with watching(api) as watched:
            await api.delete(pool_body("qwen"))
            await api.put(pool_body("qwen", version=1, uid="another", members={}))
            await watched.until(lambda: watched.pools.get("llm/qwen") is not None and not watched.members())
            assert watched.pools["llm/qwen"].ring_version == 1


class TestRefusals:
    async def test_kube_invalid_pool_keeps_its_last_valid_version(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(pool_body("qwen", created=1))
        await api.put(pool_body("llama"))
        async with watching(api) as watched:
            await api.put(pool_body("qwen", created=1, version=2, spec={"slo": {"ttft": "soon"}}))
            await api.put(pool_body("llama", version=2))
            await watched.until(lambda: watched.pools["llm/llama"].ring_version == 2)
            assert watched.pools["llm/qwen"].ring_version == 1
            (refusal,) = said(caplog, "Rejected pool, keeping the last valid version")
            assert (refusal["pool"], refusal["field"], refusal["value"]) == ("llm/qwen", "spec.slo.ttft", "'soon'")
            assert watched.sample("dualmap_kube_pools_refused") == 1
            await api.put(pool_body("qwen", created=1, version=3))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 3)
            assert watched.sample("dualmap_kube_pools_refused") == 0
            assert said(caplog, "Pool is valid again") == [{"pool": "llm/qwen"}]

    @pytest.mark.parametrize("address", NO_POD_ADDRESSES)
    def test_kube_pool_with_an_address_that_no_pod_may_have_is_refused(self, address: str) -> None:
        objects = PoolObjects()
        objects.put(API | pool_body("qwen"))
        body = pool_body("qwen", version=2)
        body["status"]["ring"]["members"][0]["address"] = address
        objects.put(API | body)
        assert [pool.ring_version for pool in objects.pools] == [1]
        (invalid,) = objects.invalid
        assert (invalid.pool, invalid.field) == ("llm/qwen", "status.ring.members.address")

    async def test_kube_invalid_pool_is_logged_once(self, api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
        bad = pool_body("qwen", spec={"slo": {"ttft": "soon"}})
        await api.put(bad)
        async with watching(api) as watched:
            await api.put(bad)
            await api.put(pool_body("llama"))
            await watched.until(lambda: "llm/llama" in watched.pools)
        assert len(said(caplog, "Rejected pool, keeping the last valid version")) == 1

    async def test_kube_invalid_pool_created_again_has_no_old_version(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            # This is the state after a list that shows the deletion without a watch event.
            await api.put(pool_body("qwen", uid="another", spec={"slo": {"ttft": "soon"}}))
            await watched.until(lambda: not watched.pools)

    @pytest.mark.parametrize("body", [{}, {"metadata": None, "status": 3}, {"metadata": {"name": 5}}])
    async def test_kube_object_of_any_form_is_rejected(self, api: KubeApi, body: dict[str, Any]) -> None:
        whole = {
            "apiVersion": "serving.dualmap.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": "x", "namespace": "llm"},
        }
        await api.put({**whole, "spec": body, "status": body.get("status", [])})
        await api.put(pool_body("llama"))
        async with watching(api) as watched:
            assert list(watched.pools) == ["llm/llama"]

    async def test_kube_model_in_two_pools_belongs_to_the_older_pool(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(pool_body("a", created=2, model="shared"))
        await api.put(pool_body("b", created=1, model="shared"))
        await api.put(pool_body("c", created=0, model="other"))
        async with watching(api) as watched:
            # The picker gives a model name to the first pool with this name.
            assert list(watched.pools) == ["llm/c", "llm/b", "llm/a"]
            (refusal,) = said(caplog, "Rejected pool, keeping the last valid version")
            assert (refusal["pool"], refusal["value"]) == ("llm/a", "'shared'")
            assert "llm/b" in refusal["accepted"]
            await api.put(pool_body("a", version=2, created=2, model="shared"))
            await watched.until(lambda: watched.pools["llm/a"].ring_version == 2)
            await api.delete(pool_body("b"))
            await watched.until(lambda: "llm/b" not in watched.pools)
            assert watched.sample("dualmap_kube_pools_refused") == 0

    async def test_kube_model_of_pools_of_equal_age_is_assigned_by_name(self, api: KubeApi) -> None:
        await api.put(pool_body("b", model="shared"))
        await api.put(pool_body("a", model="shared"))
        async with watching(api) as watched:
            assert list(watched.pools) == ["llm/a", "llm/b"]

    async def test_kube_failed_change_does_not_end_the_watch(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            watched.fail_with = ValueError("no room")
            await api.put(pool_body("qwen", version=2))
            await until(lambda: watched.fail_with is None)
            await api.put(pool_body("qwen", version=3))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 3)
        assert "no room" in said(caplog, "Applying a pool change failed, keeping the last valid pools")[0]["reason"]


def reservations(**data: str) -> dict[str, Any]:
    metadata = {"namespace": "dualmap-system", "name": "dualmap-models"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


class TestReservations:
    async def test_reserved_name_is_routed_only_to_its_namespace(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(reservations(prod="shared\n"))
        await api.put(pool_body("trap", created=1, model="other", aliases=["shared"]))
        await api.put(pool_body("qwen", created=2, namespace="prod", model="shared"))
        async with watching(api, reservations_in="dualmap-system") as watched:
            assert watched.pools["llm/trap"].served_names == ("other",)
            assert watched.pools["prod/qwen"].served_names == ("shared",)
            (refusal,) = said(caplog, "Rejected pool, keeping the last valid version")
            assert (refusal["pool"], refusal["value"]) == ("llm/trap", "'shared'")
            assert refusal["accepted"].endswith("reserved for the namespace prod")
            await api.delete(pool_body("qwen", namespace="prod"))
            await watched.until(lambda: list(watched.pools) == ["llm/trap"])
            assert watched.pools["llm/trap"].served_names == ("other",)
            await api.put(reservations(prod=""))
            await watched.until(lambda: watched.pools["llm/trap"].served_names == ("other", "shared"))
            assert watched.sample("dualmap_kube_pools_refused") == 0

    async def test_no_pool_is_served_before_the_reservations_are_known(self, api: KubeApi) -> None:
        await api.put(pool_body("trap", model="other", aliases=["shared"]))
        await api.put(reservations(prod="shared\n"))
        api.refuse["configmaps"] = 403
        async with watching(api, reservations_in="dualmap-system", listed=False) as watched:
            await until(lambda: watched.sample("dualmap_kube_errors_total", resource="configmaps", kind="refused") >= 2)
            assert watched.told == []
            del api.refuse["configmaps"]
            await watched.until(lambda: "llm/trap" in watched.pools)
            assert [pool.served_names for (pool,) in watched.told] == [("other",)]
            assert watched.source.ages_s().keys() == {POOLS, PODS, "configmaps"}

    async def test_reservation_of_other_names_changes_no_pool(
        self, api: KubeApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        await api.put(reservations(prod="shared\n"))
        await api.put(pool_body("qwen", model="other"))
        async with watching(api, reservations_in="dualmap-system") as watched:
            before = watched.pools["llm/qwen"]
            await api.put(reservations(prod="shared\nsql\n"))
            await watched.until(lambda: "sql" in watched.pools["llm/qwen"].foreign_names)
            assert watched.pools["llm/qwen"] == before
            assert said(caplog, "Reloaded pool") == []

    async def test_deleted_config_map_frees_all_names(self, api: KubeApi) -> None:
        await api.put(reservations(prod="shared\n"))
        await api.put(pool_body("trap", model="shared"))
        async with watching(api, reservations_in="dualmap-system") as watched:
            assert watched.pools["llm/trap"].served_names == ()
            await api.delete(reservations())
            await watched.until(lambda: watched.pools["llm/trap"].served_names == ("shared",))

    async def test_one_namespace_has_no_reservations(self, api: KubeApi) -> None:
        await api.put(reservations(prod="shared\n"))
        await api.put(pool_body("qwen", model="shared"))
        async with watching(api, "llm") as watched:
            assert watched.pools["llm/qwen"].served_names == ("shared",)
            assert not any("configmaps" in path for path in api.lists)


class TestPods:
    async def test_unready_pod_is_excluded_until_ready_again(
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
    async def test_terminating_pod_is_excluded(self, api: KubeApi, how: str) -> None:
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

    async def test_pod_with_notice_drains_until_its_time(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0"))
        noticed = pod_body("qwen-0")
        noticed["metadata"]["annotations"] = {LEAVE_AT: "2026-11-20T09:30:00Z"}
        async with watching(api) as watched:
            await pods_are_watched(api)
            await api.put(noticed)
            await watched.until(lambda: watched.states() == {"qwen-0": "Draining", "qwen-1": "Active"})
            member = watched.members()["qwen-0"]
            assert (member.leave_at_s, member.weight) == (read_time("2026-11-20T09:30:00Z"), 100)
            await api.put(pod_body("qwen-0"))
            await watched.until(lambda: watched.states() == {"qwen-0": "Active", "qwen-1": "Active"})
            assert watched.members()["qwen-0"].leave_at_s is None

    async def test_terminating_pod_with_notice_gets_no_requests(self, api: KubeApi) -> None:
        leaving = {"state": "Draining", "leaveAt": "2026-11-20T09:30:00Z"}
        await api.put(pool_body("qwen", members={"qwen-0": leaving, "qwen-1": {}}))
        await api.put(pod_body("qwen-0"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            assert watched.members()["qwen-0"].weight == 100
            await api.put(pod_body("qwen-0", terminating=True))
            await watched.until(lambda: watched.members()["qwen-0"].weight == 0)
            assert watched.members()["qwen-0"].leave_at_s == read_time("2026-11-20T09:30:00Z")

    async def test_member_without_known_pod_stays_unchanged(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0", ready=False))
        async with watching(api) as watched:
            await watched.until(lambda: watched.states() == {"qwen-0": "Draining", "qwen-1": "Active"})

    async def test_pod_deleted_during_a_broken_watch_is_excluded(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            await api.stop()
            await api.delete(pod_body("qwen-0"))
            await api.forget()
            await api.start()
            await watched.until(lambda: watched.states()["qwen-0"] == "Draining")

    async def test_pool_with_all_pods_unready_has_no_active_member(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0", ready=False))
        await api.put(pod_body("qwen-1", ready=False))
        async with watching(api) as watched:
            await watched.until(lambda: set(watched.states().values()) == {"Draining"})
            assert not any(member.takes_new_keys for member in watched.members().values())

    async def test_pod_state_is_replaced_by_a_newer_pool_version(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        await api.put(pod_body("qwen-0"))
        async with watching(api) as watched:
            await pods_are_watched(api)
            await api.put(pod_body("qwen-0", ready=False))
            await watched.until(lambda: watched.states()["qwen-0"] == "Draining")
            # The operator also drains the member, then admits it again, because the operator has observed a serving
            # pod. The router may not have this observation.
            await api.put(pool_body("qwen", version=2, members={"qwen-0": {"state": "Draining"}, "qwen-1": {}}))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 2)
            await api.put(pool_body("qwen", version=3, members={"qwen-0": {"state": "Joining"}, "qwen-1": {}}))
            await watched.until(lambda: watched.pools["llm/qwen"].ring_version == 3)
            assert watched.states()["qwen-0"] == "Joining"
            # After this, the router uses the pod's state again.
            await api.put(pod_body("qwen-0", ready=False))
            await watched.until(lambda: watched.states()["qwen-0"] == "Draining")

    async def test_pod_state_is_kept_with_an_equal_pool_version(self, api: KubeApi) -> None:
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

    async def test_restarted_pod_has_a_new_incarnation(self, api: KubeApi) -> None:
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

    async def test_pods_are_found_by_the_selector_of_the_pool(self, api: KubeApi) -> None:
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

    async def test_kube_removed_pool_ends_its_pod_watch(self, api: KubeApi) -> None:
        await api.put(pool_body("qwen"))
        async with watching(api) as watched:
            await until(lambda: api.open_watches == 2)
            assert watched.source.ages_s().keys() == {POOLS, PODS}
            await api.delete(pool_body("qwen"))
            await until(lambda: api.open_watches == 1)
            assert watched.source.ages_s().keys() == {POOLS}
