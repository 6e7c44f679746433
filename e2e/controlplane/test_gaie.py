"""Tests of `dualmap epp` in the place of another picker: the page change-the-picker.md word by word, and the chart.

The picker that a user has before the change cannot be had here. DualMap's image stands in for it, under its name.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from controlplane import llm_d_chart
from controlplane.chart_node import dualmap_images
from controlplane.helm import CHART, binary, references
from controlplane.pickers import (
    LLM_D_API,
    POOL,
    PickerSite,
    code,
    copy_gaie_chart,
    inference_pool,
    restarts,
)
from controlplane.site import until_so
from emulated_cluster.control_plane.build import binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet

GAIE_IMAGE = "registry.k8s.io/gateway-api-inference-extension/epp:v1.5.0"
PICKER = f"inferencepool={POOL}-epp"
DEPENDENCIES = "helm dependency update inferencepool"
SETTINGS_API = "serving.dualmap.dev"
PROMPT = "Tell me a story about a river. " * 100
_TEST_S = 600


@pytest.fixture(scope="module", name="kubelet")
def _kubelet(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[ProcessKubelet]:
    """A node with DualMap's images, one of them also under the names of GAIE's and llm-d's pickers."""
    also = dict.fromkeys((GAIE_IMAGE, llm_d_chart.IMAGE), references().epp)
    yield from dualmap_images(request, cluster, also=also)


@pytest.fixture(name="site")
async def _site(cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> AsyncIterator[PickerSite]:
    async with PickerSite(cluster, tmp_path) as site:
        yield site


@pytest.fixture(name="helm")
def _helm() -> Path:
    helm = binary(4, binaries_folder())
    if helm is None:
        pytest.skip("helm 4 is not there: make e2e")
    return helm


async def image(site: PickerSite, selector: str = PICKER) -> str:
    """Return the image of the picker's only pod."""
    (pod,) = await site.pods(selector)
    return str(pod["spec"]["containers"][0]["image"])


@pytest.mark.timeout(_TEST_S, func_only=True)
async def test_image_of_gaies_chart_is_changed_and_changed_back(
    site: PickerSite, helm: Path, kubelet: ProcessKubelet
) -> None:
    copy_gaie_chart(site.directory)
    await site.start_engines()
    label = f"--set inferencePool.modelServers.matchLabels.app={POOL}"
    await site.run(f"{DEPENDENCIES}\nhelm install qwen inferencepool --namespace llm {label}", helm=helm)
    await site.until_ready(PICKER, 1)
    assert await image(site) == GAIE_IMAGE
    before = json.loads(await site.kubectl("get", f"deployment/{POOL}-epp", "-o", "json"))["spec"]

    await site.run(code("GAIE's chart"), helm=helm)
    pods = await site.until_ready(PICKER, 1)
    assert await image(site) == references().epp
    after = json.loads(await site.kubectl("get", f"deployment/{POOL}-epp", "-o", "json"))["spec"]
    after["template"]["spec"]["containers"][0]["image"] = GAIE_IMAGE
    assert after == before, "something else than the image changed"

    await site.open_gateway(f"{POOL}-epp")
    await site.until_decided("Hello.")
    first, second = await site.ask(PROMPT), await site.ask(f"{PROMPT} Continue.")
    assert "matched=0" in first.headers["x-dualmap-decision"]
    assert 'rule="pair-warm"' in second.headers["x-dualmap-decision"]
    said = kubelet.log(kubelet.pod(site.namespace, pods[0]["metadata"]["name"]))
    assert "dualmap epp ready" in said
    # What the chart's Role lacks are DualMap's own settings and llm-d's objectives, which are optional.
    refused = [each for each in site.requests_of(f"{POOL}-epp") if each["responseStatus"]["code"] == 403]
    assert {each["objectRef"]["apiGroup"] for each in refused} <= {SETTINGS_API, LLM_D_API}
    assert restarts(await site.pods(PICKER)) == [0]

    await site.run(code("The way back"), helm=helm)
    await site.until_ready(PICKER, 1)
    assert await image(site) == GAIE_IMAGE
    await site.run(code("Without helm"), helm=helm)
    await site.until_ready(PICKER, 1)
    assert await image(site) == references().epp
    await site.until_decided("Hello.")


@pytest.mark.timeout(_TEST_S, func_only=True)
async def test_settings_of_gaies_chart_are_a_file_of_its_values(site: PickerSite, helm: Path) -> None:
    copy_gaie_chart(site.directory)
    await site.start_engines(1)
    (site.directory / "settings.yaml").write_text(code("Settings", "yaml"))
    values = f"--set inferencePool.modelServers.matchLabels.app={POOL} --values settings.yaml"
    await site.run(f"{DEPENDENCIES}\nhelm install qwen inferencepool --namespace llm {values}", helm=helm)
    await site.until_ready(PICKER, 1)
    assert f'dualmap_pool_slo_ttft_seconds{{pool="{site.namespace}/{POOL}"}} 2.0' in await site.metrics(f"{POOL}-epp")


@pytest.mark.timeout(_TEST_S, func_only=True)
async def test_llm_d_arguments_wait_for_the_pool_without_restart(site: PickerSite, kubelet: ProcessKubelet) -> None:
    await site.start_engines()
    await site.apply(*llm_d_chart.picker(site.namespace, POOL, 2))
    picker = llm_d_chart.label(POOL)

    async def waiting() -> bool:
        running = [pod for pod in await site.pods(picker) if pod["status"]["phase"] == "Running"]
        names = [pod["metadata"]["name"] for pod in running]
        logs = [kubelet.log(kubelet.pod(site.namespace, name)) for name in names]
        return len(logs) == 2 and all("does not exist" in log for log in logs)

    await until_so(waiting, "both pickers wait for their pool")
    await site.apply(inference_pool(POOL))
    pods = await site.until_ready(picker, 2)
    assert restarts(pods) == [0, 0]
    await site.open_gateway(f"{POOL}-epp")
    await site.until_decided(PROMPT)


@pytest.mark.timeout(_TEST_S, func_only=True)
async def test_image_of_llm_ds_chart_is_changed_and_changed_back(
    site: PickerSite, helm: Path, kubelet: ProcessKubelet
) -> None:
    llm_d_chart.copy_charts(site.directory)
    picker, chart = llm_d_chart.label(POOL), llm_d_chart.CHART
    await site.start_engines()
    labels = f"--set router.modelServers.matchLabels.app={POOL}"
    await site.run(f"helm dependency update {chart}\nhelm install qwen {chart} --namespace llm {labels}", helm=helm)
    await site.until_ready(picker, 1)
    assert await image(site, picker) == llm_d_chart.IMAGE
    before = json.loads(await site.kubectl("get", f"deployment/{POOL}-epp", "-o", "json"))["spec"]

    await site.run(code("llm-d's chart"), helm=helm)
    pods = await site.until_ready(picker, 1)
    assert await image(site, picker) == references().epp
    after = json.loads(await site.kubectl("get", f"deployment/{POOL}-epp", "-o", "json"))["spec"]
    after["template"]["spec"]["containers"][0]["image"] = llm_d_chart.IMAGE
    assert after == before, "something else than the image changed"

    await site.open_gateway(f"{POOL}-epp")
    await site.until_decided("Hello.")
    await site.ask(PROMPT)
    assert 'rule="pair-warm"' in (await site.ask(f"{PROMPT} Continue.")).headers["x-dualmap-decision"]
    assert "dualmap epp ready" in kubelet.log(kubelet.pod(site.namespace, pods[0]["metadata"]["name"]))
    refused = [each for each in site.requests_of(f"{POOL}-epp") if each["responseStatus"]["code"] == 403]
    assert {each["objectRef"]["apiGroup"] for each in refused} <= {SETTINGS_API}
    assert restarts(await site.pods(picker)) == [0]

    await site.run(code("The way back"), helm=helm)
    await site.until_ready(picker, 1)
    assert await image(site, picker) == llm_d_chart.IMAGE


@pytest.mark.timeout(_TEST_S, func_only=True)
async def test_chart_in_mode_gaie_uses_all_of_its_rights(site: PickerSite, helm: Path) -> None:
    await site.start_engines()
    values = {
        "gateway": {
            "mode": "gaie",
            "gaie": {
                "pools": [
                    {
                        "name": POOL,
                        "settings": {"slo": {"ttft": "3s"}},
                        "inferencePool": {"selector": {"app": POOL}},
                    }
                ]
            },
        },
        "networkPolicy": {"enabled": False},
    }
    (site.directory / "values.json").write_text(json.dumps(values))
    await site.run(f"helm install dualmap {CHART} --namespace llm --values values.json --wait --timeout 5m", helm=helm)
    selector = f"app.kubernetes.io/component=epp-{POOL}"
    pods = await site.until_ready(selector, 2)
    await site.open_gateway(f"dualmap-epp-{POOL}")
    await site.until_decided("Hello.")

    async def warm() -> bool:
        return 'rule="pair-warm"' in (await site.ask(PROMPT)).headers["x-dualmap-decision"]

    # A ready picker may not have found the other one yet. Then each of them knows its own requests only.
    await until_so(warm, "a picker knows the member that has the prompt")
    assert restarts(pods) == [0, 0]

    role = json.loads(await site.kubectl("get", f"role/dualmap-epp-{POOL}", "-o", "json"))
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    used: set[tuple[str, str, str]] = set()

    async def all_used() -> bool:
        requests = await asyncio.to_thread(site.requests_of, f"dualmap-epp-{POOL}")
        assert [each for each in requests if each["responseStatus"]["code"] == 403] == []
        objects = [(each["objectRef"], each["verb"]) for each in requests if "objectRef" in each]
        used.update((each.get("apiGroup", ""), each["resource"], verb) for each, verb in objects)
        return used >= granted

    await until_so(all_used, f"the pickers use all of {granted}")
    assert used == granted
    await site.run("helm uninstall dualmap --namespace llm --wait --timeout 5m", helm=helm)

    async def removed() -> bool:
        kinds = "all,roles,rolebindings,configmaps,serviceaccounts"
        return "dualmap" not in await site.kubectl("get", kinds, "-o", "name")

    await until_so(removed, "nothing of the release is left")
