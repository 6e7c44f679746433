"""Tests of a pool with a prefill pool through the real Envoy: the headers that a decode member's sidecar receives.

The decode members record the headers. Envoy sends nothing to the members of the prefill pool.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness.deployment import Deployment
from harness.documents import document, member_of, prompt_of, receipt
from harness.stack import PoolMember
from harness.upstream import ENGINE_HEADER, Received, Upstream

pytestmark = pytest.mark.asyncio(loop_scope="session")

PREFILLER, PREFILLERS = "x-prefiller-host-port", "x-dualmap-prefillers"
MODEL = "qwen-model"
FORGED = {
    PREFILLER: "10.9.9.9:1",
    PREFILLERS: "10.9.9.9:2",
    "x-data-parallel-rank": "7",
    "x-encoder-hosts-ports": "10.9.9.9:3",
    "x-kv-cache-source-host-port": "10.9.9.9:4",
    "x-worker-instance-id": "10.9.9.9:5",
    "x-prefill-instance-id": "1",
    "x-dp-rank": "2",
    "x-prefill-dp-rank": "3",
    "x-dynamo-routing-mode": "direct",
}


class Site:
    """A router and an Envoy in front of two decode members that record requests."""

    def __init__(self, deployment: Deployment, decoders: tuple[Upstream, ...]) -> None:
        self.deployment = deployment
        self._decoders = decoders

    async def ask(self, prompt: str, **headers: str) -> tuple[dict[str, str], Received]:
        """Send a prompt; return the receipt, empty without one, and what the decode member received."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}
        reply = await self.deployment.ask(body, headers=headers)
        assert reply.status == 200
        (decoder,) = (each for each in self._decoders if each.name == reply.headers[ENGINE_HEADER])
        said = dict(receipt(reply)) if "x-dualmap-decision" in reply.headers else {}
        return said, decoder.received[-1]


@pytest_asyncio.fixture(loop_scope="session", params=list(Mode), ids=lambda mode: mode.value)
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        decoders = (Upstream(name="decode-0"), Upstream(name="decode-1"))
        for each in decoders:
            await each.start()
            stack.push_async_callback(each.stop)
        prefillers = [PoolMember(id=f"prefill-{n}", address="10.255.255.1", port=9000 + n) for n in range(2)]
        decode = document("qwen", [member_of(each) for each in decoders])
        decode["spec"]["prefillPool"] = "prefill"
        prefill = document("prefill", prefillers)
        for each in (decode, prefill):
            each["spec"]["model"] = {"name": MODEL}
            each["spec"]["engine"] = {"discovery": {"enabled": False}}
        pools = {"qwen": decode, "prefill": prefill}
        yield Site(await stack.enter_async_context(Deployment(pools, mode=request.param, directory=tmp_path)), decoders)


async def test_decode_member_gets_one_prefiller_of_the_receipt_and_none_of_the_client(site: Site) -> None:
    said, received = await site.ask(prompt_of(32, seed="long"), **FORGED)

    number = said["prefill"].removeprefix("prefill-")
    assert received.headers[PREFILLER] == f"10.255.255.1:900{number}"
    assert received.headers[PREFILLERS] == f"10.255.255.1:900{number},10.255.255.1:900{1 - int(number)}"
    assert not FORGED.keys() & received.headers.keys() - {PREFILLER, PREFILLERS}

    said, received = await site.ask(prompt_of(2, seed="short"), **FORGED)

    assert (said["prefill"], said["prefill_reason"]) == ("local", "short")
    assert not FORGED.keys() & received.headers.keys()
    assert await site.deployment.metric("dualmap_prefills_total", where="remote") == 1
    await site.deployment.wait_for_rest()


async def test_envoy_without_router_removes_prefillers_of_clients(site: Site) -> None:
    await site.deployment.kill_router()
    await site.deployment.wait_until_served_without_router()
    _, received = await site.ask(prompt_of(32, seed="long"), **FORGED)

    assert not FORGED.keys() & received.headers.keys()
