"""A pool of the Gateway API Inference Extension as a router watches it: members, settings, objectives, absence."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dualmap.objects.gaie import ROLE, GaiePool
from dualmap.objects.pool_reader import PoolSettings, read_settings
from dualmap.pools.pool import Pool
from dualmap_edge.kube.client import KubeClient
from dualmap_extproc.epp.pools import GaiePools, PoolRef
from dualmap_extproc.epp.prefills import ANY_ROLE, RoleUse
from dualmap_extproc.pools.metrics import KubeMetrics
from kube_api import KubeApi, kube_api, pod_body, pool_body
from waiting import WAIT_S, until

V1, OLD = "inference.networking.k8s.io", "inference.networking.x-k8s.io"
POOL = PoolRef(namespace="llm", name="qwen", group=V1)
DEFAULTS = PoolSettings()
FIXED = GaiePool(selector="serving.dualmap.dev/pool=qwen", ports=(9000,))


def gaie_pool(name: str = "qwen", *ports: int, version: str = f"{V1}/v1", **spec: Any) -> dict[str, Any]:
    numbers = [{"number": port} for port in ports or (8000,)]
    selector = {"matchLabels": {"serving.dualmap.dev/pool": name}}
    return {
        "apiVersion": version,
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {"selector": selector, "targetPorts": numbers, **spec},
    }


def objective(name: str, priority: int, group: str = OLD) -> dict[str, Any]:
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {"poolRef": {"name": "qwen"}, "priority": priority},
    }


@pytest.fixture(name="api")
async def kube_api_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[KubeApi]:
    for name in ("dualmap_extproc", "dualmap_edge"):
        caplog.set_level(logging.INFO, name)
    async with kube_api(tmp_path) as api:
        yield api


def pod_of(role: str, name: str, **fields: Any) -> dict[str, Any]:
    """Return a pod with llm-d's label for its role."""
    body = pod_body(name, **fields)
    body["metadata"]["labels"][ROLE] = role
    return body


class Seat:
    """A source of the pool, and what it reported."""

    def __init__(self, source: GaiePools, registry: CollectorRegistry) -> None:
        self.source = source
        self.told: list[tuple[Pool, ...]] = []
        self.registry = registry

    @property
    def pool(self) -> Pool | None:
        return self.told[-1][0] if self.told and self.told[-1] else None

    def states(self) -> dict[str, str]:
        return {} if self.pool is None else {each.id: each.state.value for each in self.pool.members}

    async def until_states(self, **states: str) -> None:
        wanted = {name.replace("_", "-"): state for name, state in states.items()}
        await until(lambda: self.pool is not None and self.states() == wanted)


@asynccontextmanager
async def seat(
    api: KubeApi,
    wanted: PoolRef = POOL,
    settings: PoolSettings = DEFAULTS,
    *,
    roles: RoleUse = ANY_ROLE,
    known: bool = True,
) -> AsyncIterator[Seat]:
    client = await KubeClient.connect(api.kubeconfig)
    registry = CollectorRegistry()
    made = Seat(GaiePools(client, wanted, settings, KubeMetrics(registry, lambda: None), roles), registry)
    task = asyncio.create_task(made.source.run(made.told.append))
    try:
        if known:
            await asyncio.wait_for(made.source.known(), WAIT_S)
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


async def test_ready_pods_are_the_members_of_the_pool(api: KubeApi) -> None:
    await api.put(gaie_pool())
    for number in range(3):
        await api.put(pod_body(f"qwen-{number}", ready=number < 2))
    await api.put(pod_body("other-0"))
    async with seat(api) as found:
        assert found.states() == {"qwen-0": "Active", "qwen-1": "Active"}
        assert found.pool is not None
        assert [each.endpoint for each in found.pool.members] == ["10.244.0.1:8000", "10.244.0.2:8000"]
        assert found.pool.model.name == ""
        await api.put(pod_body("qwen-2"))
        await api.put(pod_body("qwen-0", ready=False))
        await found.until_states(qwen_0="Draining", qwen_1="Active", qwen_2="Active")
        await api.delete(pod_body("qwen-0"))
        await found.until_states(qwen_1="Active", qwen_2="Active")


async def test_pods_that_only_prefill_are_the_prefill_pool(api: KubeApi) -> None:
    await api.put(gaie_pool())
    for body in (pod_of("decode", "qwen-0"), pod_of("prefill", "qwen-1"), pod_of("encode", "qwen-2")):
        await api.put(body)
    roles = RoleUse(respected=True, prefill_min_tokens=16)
    async with seat(api, settings=read_settings({"spec": {"slo": {"ttft": "2s"}}}), roles=roles) as found:
        decode, prefill = found.told[-1]
        assert (decode.id, decode.prefill_pool, decode.prefill_min_tokens) == ("llm/qwen", "qwen_prefill", 16)
        assert (prefill.id, prefill.prefill_pool, prefill.slo) == ("llm/qwen_prefill", "", decode.slo)
        assert [each.id for each in decode.members] == ["qwen-0"]
        assert [each.id for each in prefill.members] == ["qwen-1"]
        await api.put(pod_of("prefill", "qwen-1", ready=False))
        await until(lambda: found.told[-1][1].members[0].state.value == "Draining")
        await api.delete(gaie_pool())
        await until(lambda: [each.members for each in found.told[-1]] == [(), ()])


async def test_pods_that_only_prefill_serve_no_requests_without_a_prefill_pool(api: KubeApi) -> None:
    await api.put(gaie_pool())
    await api.put(pod_of("both", "qwen-0"))
    await api.put(pod_of("prefill", "qwen-1"))
    async with seat(api, roles=RoleUse(respected=True)) as found:
        (pool,) = found.told[-1]
        assert (pool.prefill_pool, found.states()) == ("", {"qwen-0": "Active"})
    async with seat(api) as found:
        assert found.states() == {"qwen-0": "Active", "qwen-1": "Active"}


async def test_each_target_port_is_a_member(api: KubeApi) -> None:
    await api.put(gaie_pool("qwen", 8000, 8001))
    await api.put(pod_body("qwen-0"))
    async with seat(api) as found:
        assert found.states() == {"qwen-0:8000": "Active", "qwen-0:8001": "Active"}
        await api.put(gaie_pool("qwen", 8001))
        await found.until_states(qwen_0="Active")


async def test_pool_of_the_older_group_is_read(api: KubeApi) -> None:
    selector = {"serving.dualmap.dev/pool": "qwen"}
    await api.put(gaie_pool(version=f"{OLD}/v1alpha2", selector=selector, targetPortNumber=8100))
    await api.put(pod_body("qwen-0"))
    async with seat(api, PoolRef(namespace="llm", name="qwen", group=OLD)) as found:
        assert found.pool is not None
        assert [each.port for each in found.pool.members] == [8100]


async def test_selector_without_a_pool_gives_the_members(api: KubeApi) -> None:
    await api.put(pod_body("qwen-0"))
    async with seat(api, PoolRef(namespace="llm", name="endpoints", group=V1, fixed=FIXED)) as found:
        assert found.pool is not None
        assert [each.endpoint for each in found.pool.members] == ["10.244.0.1:9000"]


async def test_pool_that_does_not_exist_is_awaited(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    await api.put(pod_body("qwen-0"))
    async with seat(api, known=False) as found:
        await until(lambda: "Waiting for the pool, which does not exist" in caplog.text)
        assert found.told == []
        await api.put(gaie_pool())
        await asyncio.wait_for(found.source.known(), WAIT_S)
        assert found.states() == {"qwen-0": "Active"}
        await api.delete(gaie_pool())
        await found.until_states()
        await api.put(gaie_pool())
        await found.until_states(qwen_0="Active")


async def test_invalid_value_of_a_pod_is_logged_once_per_change(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    def faults() -> list[tuple[str, str]]:
        found = (each for each in caplog.records if each.message == "Ignoring an invalid value of a pod")
        return [(each.details["pod"], each.details["reason"]) for each in found]

    def annotated(ports: str) -> dict[str, Any]:
        body = pod_body("qwen-1")
        body["metadata"]["annotations"] = {"inference.networking.k8s.io/active-ports": ports}
        return body

    await api.put(gaie_pool())
    await api.put(pod_body("qwen-0", address="169.254.0.1"))
    await api.put(annotated("eight"))
    async with seat(api) as found:
        await api.put(pod_body("qwen-2"))
        await found.until_states(qwen_1="Active", qwen_2="Active")
        assert sorted(faults()) == [
            ("qwen-0", "status.podIP: '169.254.0.1' is not accepted; give an IP address that a pod may have"),
            (
                "qwen-1",
                "metadata.annotations[inference.networking.k8s.io/active-ports]: 'eight' is not accepted; give numbers "
                "of ports separated by commas, such as 8000,8001",
            ),
        ]
        await api.put(annotated("nine"))
        await until(lambda: len(faults()) == 3)
        await api.put(annotated("8000"))
        await api.put(pod_body("qwen-0"))
        await found.until_states(qwen_0="Active", qwen_1="Active", qwen_2="Active")
        assert len(faults()) == 3


async def test_pool_with_another_selector_has_other_members(api: KubeApi) -> None:
    await api.put(gaie_pool())
    for name in ("qwen-0", "mix-1"):
        await api.put(pod_body(name))
    async with seat(api) as found:
        await api.put(gaie_pool(selector={"matchLabels": {"serving.dualmap.dev/pool": "mix"}}))
        await found.until_states(mix_1="Active")


async def test_settings_come_from_the_pool_of_this_project(api: KubeApi) -> None:
    await api.put(gaie_pool())
    file = read_settings({"spec": {"routing": {"policy": "round_robin"}}})
    async with seat(api, settings=file) as found:
        assert found.pool is not None
        assert found.pool.routing.policy == "round_robin"
        own = pool_body("qwen", spec={"routing": {"policy": "random"}, "engine": {"type": "SGLang"}})
        await api.put(own)
        await until(lambda: found.pool is not None and found.pool.routing.policy == "random")
        assert found.pool.engine.type == "SGLang"
        assert found.pool.model.name == ""
        await api.delete(own)
        await until(lambda: found.pool is not None and found.pool.routing.policy == "round_robin")


async def test_invalid_object_keeps_the_last_valid_version(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    await api.put(gaie_pool())
    await api.put(pool_body("qwen", spec={"routing": {"policy": "random"}}))
    await api.put(pod_body("qwen-0"))
    async with seat(api) as found:
        await api.put(pool_body("qwen", spec={"routing": {"policy": "best"}}))
        await api.put(gaie_pool(targetPorts=[]))
        await until(lambda: caplog.text.count("Rejected object, keeping the last valid version") == 2)
        assert found.registry.get_sample_value("dualmap_kube_pools_refused") == 2
        assert found.pool is not None
        assert found.pool.routing.policy == "random"
        assert found.states() == {"qwen-0": "Active"}
        await api.put(gaie_pool("qwen", 8001))
        await until(lambda: found.pool is not None and found.pool.members[0].port == 8001)
        assert found.registry.get_sample_value("dualmap_kube_pools_refused") == 1
        await api.delete(pool_body("qwen"))
        await until(lambda: found.registry.get_sample_value("dualmap_kube_pools_refused") == 0)


async def test_objectives_of_the_pool_are_followed(api: KubeApi) -> None:
    await api.put(gaie_pool())
    await api.put(objective("batch", -1))
    async with seat(api) as found:
        assert found.pool is not None
        assert found.pool.objectives.priority_of("batch") == -1
        await api.put(objective("urgent", 9))
        await until(lambda: found.pool is not None and found.pool.objectives.priority_of("urgent") == 9)


async def test_objective_of_llm_d_counts_before_the_older_one(api: KubeApi) -> None:
    await api.put(gaie_pool())
    for each in (objective("batch", -1), objective("batch", -2, "llm-d.ai"), objective("urgent", 9, "llm-d.ai")):
        await api.put(each)
    async with seat(api) as found:
        assert found.pool is not None
        assert (found.pool.objectives.priority_of("batch"), found.pool.objectives.priority_of("urgent")) == (-2, 9)
        await api.delete(objective("batch", -2, "llm-d.ai"))
        await until(lambda: found.pool is not None and found.pool.objectives.priority_of("batch") == -1)


@pytest.mark.parametrize("status", [403, 404])
async def test_optional_kinds_that_cannot_be_read_count_as_empty(
    api: KubeApi, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    api.refuse["/apis/serving.dualmap.dev/v1alpha1/namespaces/llm/inferencepools"] = status
    api.refuse["inferenceobjectives"] = status
    await api.put(gaie_pool())
    await api.put(pod_body("qwen-0"))
    async with seat(api) as found:
        assert found.states() == {"qwen-0": "Active"}
    lines = [each for each in caplog.messages if each == "Continuing without an optional Kubernetes kind"]
    assert len(lines) == 3
    assert "WARNING" not in {each.levelname for each in caplog.records}


async def test_optional_kind_that_cannot_be_watched_keeps_its_objects(
    api: KubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    await api.put(gaie_pool())
    await api.put(objective("batch", -1))
    api.refuse_watches_with = 403
    async with seat(api) as found:
        await until(lambda: api.lists.count(f"/apis/{OLD}/v1alpha2/namespaces/llm/inferenceobjectives") > 2)
        assert [pool.objectives.priority_of("batch") for (pool,) in found.told] == [-1]
    said = [each.details["error"] for each in caplog.records if each.levelname == "WARNING"]
    # One line for each group of the kind.
    assert len([each for each in said if 'cannot watch resource "inferenceobjectives"' in each]) == 2


async def test_first_version_that_is_invalid_is_not_served(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    await api.put(gaie_pool(targetPorts=[]))
    await api.put(pod_body("qwen-0"))
    async with seat(api, known=False) as found:
        await until(lambda: "Rejected object" in caplog.text)
        assert found.told == []
        await api.put(gaie_pool())
        await asyncio.wait_for(found.source.known(), WAIT_S)
        assert found.states() == {"qwen-0": "Active"}


async def test_pods_that_cannot_be_listed_are_reported_once(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    api.refuse["pods"] = 403
    await api.put(gaie_pool())
    async with seat(api, known=False) as found:
        await until(lambda: api.lists.count("/api/v1/namespaces/llm/pods?serving.dualmap.dev/pool=qwen") > 1)
        assert found.told == []
        warnings = [each for each in caplog.records if each.levelname == "WARNING"]
        assert len(warnings) == 1
        assert warnings[0].details["kind"] == "pods"
        del api.refuse["pods"]
        await asyncio.wait_for(found.source.known(), WAIT_S)
