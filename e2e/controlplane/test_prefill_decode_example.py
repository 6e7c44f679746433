"""The example manifests/examples/prefill-decode.yaml on a real control plane, with the chart's routers and Envoy."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from controlplane.chart_node import chart_kubelet  # noqa: F401  # pytest finds fixtures by import
from controlplane.site import DECISION, Site, until_so
from doc_commands import ROOT

EXAMPLE = ROOT / "manifests" / "examples" / "prefill-decode.yaml"
POOLS = ("qwen-prefill", "qwen-decode")


async def ask(url: str, number: int) -> tuple[str, str, int]:
    """Send a long prompt; return where it was prefilled, the router's decision, and the cached tokens of `usage`."""
    text = f"Question {number}. " + "The fox ran far and saw one red hen. " * 400
    body = {"model": "Qwen/Qwen2.5-32B-Instruct", "prompt": text, "max_tokens": 4}
    limit = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return response.headers["x-dualmap-prefill"], response.headers[DECISION], cached


@pytest.mark.timeout(900, func_only=True)
async def test_example_prefills_on_one_pod_and_decodes_on_another(site: Site) -> None:
    # The chart's router sees one namespace, which a user would call llm.
    await site.install({"watchNamespace": site.namespace})
    await site.kubectl(
        "apply", "-f", "-", input=EXAMPLE.read_text().replace("namespace: llm", f"namespace: {site.namespace}")
    )

    async def available() -> bool:
        pools = json.loads(await site.kubectl("get", "dmpool", *POOLS, "-o", "json"))["items"]
        conditions = [each for pool in pools for each in pool.get("status", {}).get("conditions", [])]
        return sum((each["type"], each["status"]) == ("Available", "True") for each in conditions) == len(POOLS)

    await until_so(available, "both pools are available")
    url = await site.gateway()
    answers: list[tuple[str, str, int]] = []

    async def remote() -> bool:
        with suppress(aiohttp.ClientError, TimeoutError, AssertionError, KeyError):
            answers.append(await ask(url, len(answers)))
        return bool(answers) and answers[-1][0] == "remote"

    await until_so(remote, "a prompt is prefilled by a pod of the prefill pool")
    _, decision, cached = answers[-1]
    assert "qwen-prefill-" in decision
    assert cached > 3000, "the decode engine computed the prompt"

    # Without prefillers the decode engines compute the prompts, and no request fails.
    await site.kubectl("scale", "dmpool/qwen-prefill", "--replicas=0")
    asked = await asyncio.gather(*(ask(url, number) for number in range(100, 110)))
    assert len(asked) == 10

    async def local() -> bool:
        answers.append(await ask(url, 1000 + len(answers)))
        where, said, _ = answers[-1]
        return where == "none" and "qwen-prefill-" not in said

    await until_so(local, "the router names no prefiller")
