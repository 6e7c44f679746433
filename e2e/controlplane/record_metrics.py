"""Records the metrics of healthy routers, operator and Envoy. tests/chart tests the alerts with these records.

The system is two routers with Redis, an operator, three simulated engines and an Envoy on the real control plane.
``harness.traffic`` generates the load. The two scrapes are one minute apart. Run this file after ``make controlplane``,
when an alert or a dashboard chart uses another metric: ``PYTHONPATH=e2e:tests:testing
testing/emulated_cluster/control_plane/netns.sh .venv/bin/python e2e/controlplane/record_metrics.py``.
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from controlplane.product import SYSTEM, Product, pool_manifest
from emulated_cluster.control_plane.build import binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.fixtures import kubelet_on

ROOT = Path(__file__).parents[2]
_RECORDED = ROOT / "tests" / "chart" / "recorded" / "series.json"
_WARM_S = 30.0
_APART_S = 60.0


async def _scrape(url: str, pod: str, wanted: set[str]) -> dict[str, float]:
    """Return the selected samples of a metrics page as ``name{label="value",...}``, with the labels that Prometheus
    adds.
    """
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        page = await response.text()
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            # The parser adds a suffix to counters; Envoy's counters have no suffix.
            metric = sample.name if sample.name in page else sample.name.removesuffix("_total")
            if metric in wanted:
                labels = {**sample.labels, "namespace": SYSTEM, "pod": pod}
                inner = ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels.items()))
                found[f"{metric}{{{inner}}}"] = sample.value
    return found


async def _record(cluster: Cluster, directory: Path, wanted: set[str]) -> Mapping[str, list[float]]:
    async with Product(cluster, directory) as product:
        operator = await product.operator()
        await product.apply(pool_manifest("qwen", product.namespace, replicas=3))
        await product.until_active(3)
        envoy = await product.open_gateway()
        pages = {
            **{router.name: f"http://127.0.0.1:{router.ports['metrics']}/metrics" for router in product.routers},
            operator.name: f"http://127.0.0.1:{operator.ports['metrics']}/metrics",
            "gateway-0": f"{envoy.admin}/stats/prometheus",
        }
        scrapes: list[dict[str, float]] = []
        async with product.traffic(streams=6, plain=2, tokens=40).running():
            for wait_s in (_WARM_S, _APART_S):
                print(f"recording for {wait_s:.0f} s", file=sys.stderr)
                await asyncio.sleep(wait_s)
                each = await asyncio.gather(*(_scrape(url, pod, wanted) for pod, url in pages.items()))
                scrapes.append({name: value for page in each for name, value in page.items()})
        namespace = product.namespace
    first, last = scrapes
    # The tests' namespace has a different name in each run.
    return {name.replace(f'"{namespace}/', '"llm/'): [first.get(name, 0.0), last[name]] for name in sorted(last)}


def _main() -> None:
    asking = [file for file in (ROOT / "helm" / "dualmap" / "files").iterdir() if file.is_file()]
    wanted = {name for file in asking for name in re.findall(r"\b(?:dualmap|envoy)_\w+", file.read_text())}
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(binaries_folder(), Path(directory)) as cluster,
        kubelet_on(cluster, "node-0"),
    ):
        series = asyncio.run(_record(cluster, Path(directory), wanted))
    _RECORDED.parent.mkdir(exist_ok=True)
    _RECORDED.write_text(json.dumps({"apart_s": _APART_S, "series": series}, indent=1) + "\n")
    print(f"{len(series)} series of {len(wanted)} names", file=sys.stderr)


if __name__ == "__main__":
    try:
        _main()
    except (OSError, subprocess.SubprocessError, TimeoutError) as error:
        sys.exit(str(error))
