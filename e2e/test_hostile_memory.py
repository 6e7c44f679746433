"""Tests that Envoy and the router stay below the chart's memory limits while 500 clients send large bodies slowly."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import yaml

from dualmap_extproc.envoy.config.settings import Mode
from harness import slow_bodies
from harness.deployment import Deployment
from harness.documents import chat, error_of
from harness.processes import Child, python_argv
from harness.resources import peak_bytes
from harness.shared_engines import SharedEngines
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

VALUES = yaml.safe_load((Path(__file__).parents[1] / "helm/dualmap/values.yaml").read_text())
CONNECTIONS = 500
BODY_BYTES = 15_000_000
CLIENTS = 4
# The time for which the connections that Envoy has not ended send a byte now and then.
SLOW_S = 5.0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [Mode.STREAMED, Mode.FULL_DUPLEX], ids=lambda mode: mode.value)
async def test_500_slow_bodies_stay_below_the_memory_limits(
    engines: SharedEngines, mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, router = VALUES["gateway"]["bundled"], VALUES["router"]
    envoy_limit, router_limit = (each["resources"]["limits"]["memory"] for each in (gateway, router))
    monkeypatch.setenv("DUALMAP_ENVOY_MEMORY", envoy_limit)
    async with Deployment(
        {"scripted": engines.documents()["scripted"]},
        mode=mode,
        directory=tmp_path,
        workers=gateway["concurrency"],
        router_arguments=("--max-buffered", router["maxBuffered"]),
    ) as deployment:
        argv = python_argv(slow_bodies.__file__, deployment.envoy.port, CONNECTIONS, BODY_BYTES)
        async with Child("attackers", argv, directory=tmp_path) as attackers:
            attack = asyncio.create_task(_attack(attackers))
            replies = sum(
                await asyncio.gather(*(_ask_until(attack.done, deployment) for _ in range(CLIENTS))), Counter[str]()
            )
            await attack

        async def decided() -> bool:
            return await _ask(deployment, "hi") == "200"

        await until(decided, "the router decides again", timeout_s=60.0)
        envoy_bytes = peak_bytes(deployment.envoy.child.pid)
        router_bytes = sum(map(peak_bytes, _with_children(deployment.router.pid)))

    assert envoy_bytes < _bytes(envoy_limit)
    assert router_bytes < _bytes(router_limit)
    # Envoy may drop some ordinary requests while it drops attackers (docs/limits.md). On a machine without a free CPU,
    # the router may also miss health checks meanwhile. Envoy then sends requests on without a decision, and these are
    # the fastest, so they may be most of the requests.
    refused = {"503 gateway_overloaded", "503 service_unavailable", "reset"}
    assert set(replies) <= {"200", "200 without a decision", *refused}
    assert sum(replies[reply] for reply in refused) < 0.25 * replies.total()
    assert replies["200"] > 0


async def _attack(attackers: Child) -> None:
    """Return some seconds after each connection has sent its body or was ended."""

    async def all_settled() -> bool:
        return len(attackers.output().split()) >= CONNECTIONS

    await until(all_settled, "each connection has sent its body or was ended", timeout_s=180.0)
    assert set(attackers.output().split()) <= {"sent", "503", "reset"}, attackers.output()
    await asyncio.sleep(SLOW_S)


async def _ask_until(ended: Callable[[], bool], deployment: Deployment) -> Counter[str]:
    """Send ordinary requests one after another until the attack has ended; return the number of each outcome."""
    replies: Counter[str] = Counter()
    while not ended():
        for prompt in ("hi", "x" * 20_000):
            replies[await _ask(deployment, prompt)] += 1
    return replies


async def _ask(deployment: Deployment, prompt: str) -> str:
    try:
        reply = await deployment.ask(chat("scripted", prompt))
    except aiohttp.ClientConnectionError:
        return "reset"
    if reply.status != 200:
        return f"{reply.status} {error_of(reply)['code']}"
    return "200" if "x-dualmap-decision" in reply.headers else "200 without a decision"


def _with_children(pid: int) -> tuple[int, ...]:
    """Return a process's id and those of its children."""
    return pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def _bytes(amount: str) -> int:
    assert amount.endswith("Gi"), amount
    return int(amount.removesuffix("Gi")) << 30
