"""A model name that was served stays its namespace's, for an operator and routers of all namespaces.

The name's pool is deleted and created again while clients send requests, and a pool of another namespace claims the
name all the time.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from controlplane.product import MODEL, ROOT, SYSTEM, Operator, Product, pool_manifest
from emulated_cluster.control_plane.cluster import Cluster
from emulated_cluster.kubelet.process_kubelet import ProcessKubelet
from harness.deployment import CHAT
from harness.envoy import Envoy
from harness.processes import dualmap_argv
from harness.stack import Router
from harness.waiting import until

WAIT_S = 120.0
RESERVED = "configmap/dualmap-models"
RIGHTS = ROOT / "manifests" / "rbac" / "cluster.yaml"


class Shared:
    """A namespace with the pool ``qwen``, and a second namespace with the pool ``trap``, which claims qwen's name."""

    def __init__(self, product: Product, foreign: str, envoy: Envoy) -> None:
        self.product = product
        self.foreign = foreign
        self.envoy = envoy
        self.answers: list[tuple[int, str]] = []
        """The status and the picked instance of each request of ``asking``."""

    async def make(self, name: str, namespace: str, model: dict[str, Any]) -> None:
        """Create a pool with one instance and wait until it takes requests."""
        await self.product.apply(pool_manifest(name, namespace, replicas=1, model=model), namespace)

        async def serves() -> bool:
            status = (await self.pool(name, namespace)).get("status", {})
            return any(each["type"] == "Available" and each["status"] == "True" for each in status["conditions"])

        await until(lambda: _eventually(serves), f"{name} serves", timeout_s=WAIT_S)

    async def pool(self, name: str, namespace: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(
            await self.product.kubectl("get", f"dmpool/{name}", "-n", namespace, "-o", "json")
        )
        return document

    async def ask(self, model: str) -> tuple[int, str]:
        """Send a request; return its status and the receipt."""
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        async with aiohttp.ClientSession() as session, session.post(self.envoy.url + CHAT, json=body) as response:
            await response.read()
            return response.status, response.headers.get("x-dualmap-decision", "")

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Send requests for the shared name while the context is open, and store the answers."""

        async def clients() -> None:
            while True:
                self.answers.append(await self.ask(MODEL))

        client = asyncio.create_task(clients())
        try:
            yield
        finally:
            assert not client.done() or client.result()
            client.cancel()
            await asyncio.gather(client, return_exceptions=True)

    async def until_answers(self, count: int, fits: Callable[[int, str], bool], what: str) -> None:
        """Wait until ``count`` later answers in a row fit."""
        mark = len(self.answers)

        async def fit() -> bool:
            later = self.answers[mark:]
            return len(later) >= count and all(fits(*each) for each in later[-count:])

        try:
            await until(fit, what, timeout_s=WAIT_S)
        except AssertionError as error:
            seen = Counter((status, _instance(receipt)) for status, receipt in self.answers[mark:])
            raise AssertionError(f"{error}; the answers were {dict(seen)}") from error


async def _eventually(condition: Callable[[], Any]) -> bool:
    """Return the condition's result, False while the pool has no status."""
    try:
        return bool(await condition())
    except KeyError:
        return False


def _instance(receipt: str) -> str:
    return next((part.strip() for part in receipt.replace(";", ",").split(",") if "-0" in part), "")


@pytest.fixture
async def shared(cluster: Cluster, kubelet: ProcessKubelet, tmp_path: Path) -> AsyncIterator[Shared]:
    """Operator, router and a discovering Envoy for all namespaces."""
    async with Product(cluster, tmp_path, routers=0) as product:
        foreign = await asyncio.to_thread(cluster.namespace)
        documents = yaml.safe_load_all((ROOT / "manifests" / "install.yaml").read_text())
        config_maps = [each for each in documents if f"configmap/{each['metadata']['name']}" == RESERVED]
        await product.kubectl("apply", "-f", str(RIGHTS), "-n", SYSTEM)
        for each in config_maps:
            await product.apply(each, SYSTEM)
        router = Router((), directory=tmp_path, arguments=("--kube", "--all-namespaces"))
        router.argv = ["/usr/bin/env", f"KUBECONFIG={product.kubeconfig('dualmap-router')}", *router.argv]
        try:
            async with router:
                operator = Operator(
                    kubeconfig=product.kubeconfig("dualmap-operator"),
                    directory=tmp_path,
                    name="operator-of-all",
                    namespace=SYSTEM,
                    arguments=("--all-namespaces", "--router", f"127.0.0.1:{router.ports['metrics']}"),
                )
                argv = dualmap_argv(
                    "envoy-config", "--discover", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
                    "--router", f"127.0.0.1:{router.ports['grpc']}", "--als", f"127.0.0.1:{router.ports['als']}",
                )  # fmt: skip
                made = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
                config, _ = await made.communicate()
                async with operator, Envoy(config.decode(), directory=tmp_path) as envoy:
                    yield Shared(product, foreign, envoy)
                    # The operator lets go of the pools.
                    for namespace in (product.namespace, foreign):
                        await product.kubectl("delete", "dmpool", "--all", "-n", namespace, "--timeout=60s")
        finally:
            await product.kubectl("delete", "-f", str(RIGHTS), "-n", SYSTEM, "--ignore-not-found")
            await product.kubectl("delete", RESERVED, "-n", SYSTEM, "--ignore-not-found")
            await asyncio.to_thread(cluster.remove_namespace, foreign)


@pytest.mark.timeout(400, func_only=True)
async def test_served_model_name_stays_in_its_namespace_while_its_pool_is_recreated(shared: Shared) -> None:
    prod = shared.product.namespace
    await shared.make("qwen", prod, {"name": MODEL})
    await shared.make("trap", shared.foreign, {"name": "trap-model", "aliases": [MODEL]})
    async with shared.asking():
        await shared.until_answers(5, lambda status, receipt: status == 200 and "qwen-0" in receipt, "qwen answers")
        await shared.product.kubectl("delete", "dmpool/qwen", "--timeout=90s")
        await shared.until_answers(10, lambda status, _: status == 404, "no pool has the name")
        await shared.make("qwen", prod, {"name": MODEL})
        await shared.until_answers(10, lambda status, receipt: status == 200 and "qwen-0" in receipt, "qwen is back")
    assert [each for each in shared.answers if "trap-0" in each[1]] == []

    trap = await shared.pool("trap", shared.foreign)
    (accepted,) = [each for each in trap["status"]["conditions"] if each["type"] == "Accepted"]
    assert accepted["reason"] == "ModelConflict"
    assert prod in accepted["message"]
    # The other names of the pool still reach its instance. The simulated engine does not know them.
    assert "trap-0" in (await shared.ask("trap-model"))[1]

    # As docs/operator.md frees a name. The namespace's pool would reserve it again, so that goes first.
    await shared.product.kubectl("delete", "dmpool/qwen", "--timeout=90s")
    freed = json.dumps({"data": {prod: ""}})
    await shared.product.kubectl("patch", RESERVED, "-n", SYSTEM, "--type=merge", "-p", freed)
    async with shared.asking():
        await shared.until_answers(
            5, lambda status, receipt: status == 200 and "trap-0" in receipt, "trap has the name"
        )

    used, refused = set(), []
    for entry in shared.product.cluster.audit():
        account = entry["user"].get("username", "").removeprefix(f"system:serviceaccount:{SYSTEM}:dualmap-")
        if entry.get("objectRef", {}).get("resource") == "configmaps" and account in ("operator", "router"):
            used.add((account, entry["verb"]))
            if entry.get("responseStatus", {}).get("code") == 403:
                refused.append(entry)
    assert refused == []
    assert used == {
        *(("operator", verb) for verb in ("list", "watch", "patch")),
        *(("router", verb) for verb in ("list", "watch")),
    }


@pytest.mark.timeout(240, func_only=True)
async def test_fixed_model_name_is_never_served_by_another_namespace(shared: Shared) -> None:
    prod = shared.product.namespace
    fixed = json.dumps({"data": {f"fixed.{prod}": MODEL}})
    await shared.product.kubectl("patch", RESERVED, "-n", SYSTEM, "--type=merge", "-p", fixed)
    # The trap is the older pool.
    await shared.make("trap", shared.foreign, {"name": "trap-model", "aliases": [MODEL]})
    assert "trap-0" in (await shared.ask("trap-model"))[1]
    assert await shared.ask(MODEL) == (404, "")
    await shared.make("qwen", prod, {"name": MODEL})
    async with shared.asking():
        await shared.until_answers(5, lambda status, receipt: status == 200 and "qwen-0" in receipt, "qwen answers")
    assert [each for each in shared.answers if "trap-0" in each[1]] == []
