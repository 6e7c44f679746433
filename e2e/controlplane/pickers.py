"""Endpoint pickers of the Gateway API Inference Extension in pods: engines, a gateway, and a user's terminal.

`test_gaie.py` uses this module. The gateway is Envoy with the configuration of ``dualmap envoy-config``, which asks the
picker's Service.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controlplane import crds
from controlplane.helm import references
from controlplane.site import MODEL, until_so
from emulated_cluster.control_plane.build import GAIE_CHARTS, OBJECTIVES_CRD, binaries_folder
from emulated_cluster.control_plane.cluster import Cluster
from harness import fail_open
from harness.clients import Reply, http1
from harness.envoy import Envoy
from harness.processes import dualmap_argv
from harness.request_shapes import CHAT
from harness.stack import PoolMember, pool_document

POOL = "qwen"
PAGE = Path(__file__).parents[2] / "docs" / "change-the-picker.md"
LLM_D_API = "llm-d.ai"
OBJECTIVES = "inferenceobjectives.inference.networking.x-k8s.io"
LLM_D_OBJECTIVES = f"inferenceobjectives.{LLM_D_API}"
_SECTION = r"^## {}\n(.*?)(?=^## |\Z)"
_BLOCK = r"^```{}\n(.*?)^```"


def code(section: str, language: str = "sh") -> str:
    """Return the code of a language in a section of the page. Commands without a language need what tests lack."""
    found = re.search(_SECTION.format(re.escape(section)), PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE.name} has no section {section}"
    blocks = re.findall(_BLOCK.format(language), found[1], re.MULTILINE | re.DOTALL)
    assert blocks, f"the section {section} has no code"
    return "\n".join(blocks)


class PickerSite:
    """A namespace with a GAIE pool's engines, where a user works with kubectl and helm."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.namespace = cluster.namespace()
        self._audited = len(cluster.audit())
        self._stack = AsyncExitStack()
        self._envoy: Envoy | None = None
        # The labels of the gateway's pickers.
        self._pickers = ""
        crds.install(cluster, crds.GAIE_FILE, crds.GAIE_NAME)
        objectives = binaries_folder() / OBJECTIVES_CRD
        crds.install(cluster, objectives, OBJECTIVES)
        # llm-d's definition has the same fields in another group.
        of_llm_d = directory / "llm-d-objectives.yaml"
        of_llm_d.write_text(objectives.read_text().replace(OBJECTIVES.partition(".")[2], LLM_D_API))
        crds.install(cluster, of_llm_d, LLM_D_OBJECTIVES)
        crds.install(cluster)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pickers:
            fail_open.count_pods(await self.pods(self._pickers))
        await self._stack.aclose()
        await asyncio.to_thread(crds.remove_namespace, self.cluster, self.namespace)
        # Other tests have only DualMap's kinds.
        await self.kubectl("delete", "crd", crds.GAIE_NAME, OBJECTIVES, LLM_D_OBJECTIVES, "--timeout=60s")

    async def run(self, script: str, *, helm: Path | None = None) -> str:
        """Run a shell script as the page's reader does, and return its output; fails if a command fails.

        The reader's registry and namespace replace those of the page.
        """
        folder = self.directory / "bin"
        folder.mkdir(exist_ok=True)
        for name, program in {"kubectl": binaries_folder() / "kubectl", "helm": helm}.items():
            if program is not None and not (folder / name).exists():
                (folder / name).symlink_to(program)
        registry, _, image = references().epp.rpartition("/")
        assert image == "dualmap-epp:0.1.0", "the page has another image"
        script = script.replace("REGISTRY", registry).replace("--namespace llm", f"--namespace {self.namespace}")
        process = await asyncio.create_subprocess_exec(
            "bash", "-e", "-u", "-c", script,
            cwd=self.directory,
            env={
                **os.environ,
                "PATH": f"{folder}:{os.environ['PATH']}",
                "KUBECONFIG": str(self.cluster.kubeconfig()),
                **{f"HELM_{kind}_HOME": str(self.directory / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")},
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0, f"{script}\n{output.decode()}"
        return output.decode()

    async def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Run kubectl in the namespace as the administrator and return its output."""
        return await asyncio.to_thread(lambda: self.cluster.kubectl("-n", self.namespace, *arguments, input=input))

    async def apply(self, *objects: Mapping[str, Any]) -> None:
        """Apply objects in the namespace."""
        text = "\n---\n".join(json.dumps(each) for each in objects)
        await self.kubectl("apply", "--server-side", "-f", "-", input=text)

    async def pods(self, selector: str) -> list[dict[str, Any]]:
        """Return the pods with these labels that are not being deleted."""
        found = json.loads(await self.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    async def until_ready(self, selector: str, count: int) -> list[dict[str, Any]]:
        """Wait until exactly ``count`` pods have these labels, all ready; return them."""
        found: list[dict[str, Any]] = []

        async def ready() -> bool:
            found[:] = await self.pods(selector)
            return len(found) == count and all(is_ready(pod) for pod in found)

        await until_so(ready, f"{count} pods {selector} are ready")
        return found

    async def start_engines(self, count: int = 2) -> None:
        """Start simulated engines, with the label ``app=qwen``, and wait until they are ready."""
        await self.apply(engines(count))
        await self.until_ready(f"app={POOL}", count)

    async def open_gateway(self, service: str) -> None:
        """Start an Envoy that asks the picker behind a Service, with TLS, in the gateways' body mode."""
        spec = json.loads(await self.kubectl("get", "service", service, "-o", "json"))["spec"]
        address = spec["clusterIP"]
        self._pickers = ",".join(f"{key}={value}" for key, value in spec["selector"].items())
        members = [
            PoolMember(id=pod["metadata"]["name"], address=pod["status"]["podIP"], port=8000, state="Active")
            for pod in await self.pods(f"app={POOL}")
        ]
        # Envoy's routes are those of the pool that the picker names, with its namespace.
        pool = pool_document(members, name=POOL, namespace=self.namespace)
        file = self.directory / "pool.json"
        file.write_text(json.dumps(pool))
        argv = dualmap_argv(
            "envoy-config", "--pool", file, "--static-endpoints", "--mode", "full-duplex", "--tls", "on",
            "--router", f"{address}:9002", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
        )  # fmt: skip
        made = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        config, _ = await made.communicate()
        assert made.returncode == 0
        self._envoy = await self._stack.enter_async_context(Envoy(config.decode(), directory=self.directory))

    async def ask(self, text: str) -> Reply:
        """Send a chat request through the gateway."""
        assert self._envoy is not None, "open_gateway first"
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        headers = {"content-type": "application/json"}
        return await http1(f"{self._envoy.url}{CHAT}", body=json.dumps(body).encode(), headers=headers)

    async def until_decided(self, text: str) -> Reply:
        """Send a request repeatedly until a picker decides it; return the response."""
        last: list[Reply] = []

        async def decided() -> bool:
            last[:] = [await self.ask(text)]
            return last[0].status == 200 and "x-dualmap-decision" in last[0].headers

        try:
            await until_so(decided, "a picker decides a request")
        except AssertionError as error:
            raise AssertionError(f"{error}; last answer: {last}") from error
        return last[0]

    async def metrics(self, service: str) -> str:
        """Return the metrics of the picker behind a Service."""
        address = json.loads(await self.kubectl("get", "service", service, "-o", "json"))["spec"]["clusterIP"]
        return (await http1(f"http://{address}:9090/metrics")).body.decode()

    def requests_of(self, account: str) -> list[dict[str, Any]]:
        """Return the entries of the audit log for a service account of the namespace."""
        user = f"system:serviceaccount:{self.namespace}:{account}"
        return [each for each in self.cluster.audit()[self._audited :] if each["user"].get("username") == user]


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod has the condition Ready."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)


def restarts(pods: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return how often each container of the pods was restarted."""
    return [each["restartCount"] for pod in pods for each in pod["status"]["containerStatuses"]]


def engines(count: int) -> dict[str, Any]:
    """Return a Deployment of simulated engines."""
    container = {
        "name": "engine",
        "image": references().dualmap,
        "args": ["engine-sim", "--host=0.0.0.0", "--port=8000", f"--model={MODEL}", "--preset=7b", "--speed=100"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 10},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "engines"},
        "spec": {
            "replicas": count,
            "selector": {"matchLabels": {"app": POOL}},
            "template": {"metadata": {"labels": {"app": POOL}}, "spec": {"containers": [container]}},
        },
    }


def inference_pool(name: str) -> dict[str, Any]:
    """Return the GAIE InferencePool of the simulated engines, with the picker ``NAME-epp``."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": {"app": POOL}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": f"{name}-epp", "port": {"number": 9002}},
        },
    }


def copy_gaie_chart(directory: Path) -> None:
    """Copy GAIE's chart inferencepool, and the chart that it depends on, into a folder."""
    for name in GAIE_CHARTS:
        shutil.copytree(binaries_folder() / name, directory / name)
