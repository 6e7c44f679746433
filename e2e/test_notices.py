"""Members that must stop at a known time: pool files with ``leaveAt``, engine-sim, and the real Envoy."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from dualmap.objects.times import time_text
from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply, http1
from harness.deployment import Deployment
from harness.documents import prompt_of, receipt
from harness.stack import Engine, pool_document
from harness.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

POOL = "qwen"
NAMES = ("left", "middle", "right")
# More than the answers by which the router predicts how long an answer takes.
LEARNT_FROM = 10


class Site:
    """Three engines behind a router and Envoy."""

    def __init__(self, deployment: Deployment, engines: Mapping[str, Engine]) -> None:
        self.deployment = deployment
        self.engines = engines
        self._version = 1

    async def ask(self, prompt: str) -> Reply:
        body = {"model": "qwen-model", "messages": [{"role": "user", "content": prompt}], "max_tokens": 2}
        return await self.deployment.ask(body)

    async def chosen(self, prompt: str) -> str:
        reply = await self.ask(prompt)
        assert reply.status == 200
        return receipt(reply)["chosen"]

    async def warmed(self, prompt: str) -> str:
        """Return the member that caches a prompt, after so many answers that the router predicts an answer's time.

        No member has notice then.
        """
        await self.give_notice({})
        for number in range(LEARNT_FROM):
            await self.chosen(prompt_of(4, seed=f"learn {number}"))
        await self.chosen(prompt)
        home = await self.chosen(prompt)
        # The router learns of the ends from Envoy's access log.
        await until(self._is_idle, "no request is in flight", timeout_s=20.0)
        return home

    async def give_notice(self, leave_at: Mapping[str, str]) -> None:
        """Replace the pool's file with these leaving times, and wait until the router has applied them."""
        self._version += 1
        self.deployment.write(POOL, document(self.engines, leave_at, self._version))

        async def applied() -> bool:
            page = await self.deployment.page(POOL)
            return {name: each["leave_at"] for name, each in page.items() if each["leave_at"]} == leave_at

        await until(applied, f"the router knows that {leave_at} leave", timeout_s=20.0)

    async def _is_idle(self) -> bool:
        return not any(each["in_flight"] for each in (await self.deployment.page(POOL)).values())


def document(engines: Mapping[str, Engine], leave_at: Mapping[str, str], version: int = 1) -> dict[str, Any]:
    made: dict[str, Any] = pool_document([each.member for each in engines.values()], version=version)
    for member in made["status"]["ring"]["members"]:
        if member["id"] in leave_at:
            member["leaveAt"] = leave_at[member["id"]]
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="site")
async def _site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("notices")
    left, middle, right = (Engine(directory=folder, name=name, arguments=("--speed", "20")) for name in NAMES)
    async with left, middle, right:
        engines = {each.name: each for each in (left, middle, right)}
        async with Deployment({POOL: document(engines, {})}, mode=Mode.STREAMED, directory=folder) as deployment:
            yield Site(deployment, engines)


async def test_member_with_notice_gets_only_prompts_that_it_caches(site: Site) -> None:
    warm = prompt_of(40, seed="warm")
    home = await site.warmed(warm)
    leave_at_s = int(time.time()) + 600
    await site.give_notice({home: time_text(leave_at_s)})

    reply = await site.ask(warm)
    assert (reply.status, receipt(reply)["chosen"], receipt(reply)["rule"]) == (200, home, "leaving-warm")
    for number in range(20):
        assert await site.chosen(prompt_of(4, seed=f"new {number}")) != home

    page = await site.deployment.page(POOL)
    assert (page[home]["state"], page[home]["leave_at"]) == ("Draining", time_text(leave_at_s))
    metric = "dualmap_endpoint_leave_timestamp_seconds"
    assert await site.deployment.router.metric(metric, endpoint=home) == leave_at_s


async def test_notice_for_all_members_keeps_the_service(site: Site) -> None:
    for leave_at in ("0001-01-01T00:00:00Z", "2026-01-01T00:00:00Z", "9999-12-31T23:59:59Z"):
        await site.give_notice(dict.fromkeys(site.engines, leave_at))
        chosen = {await site.chosen(prompt_of(4, seed=f"{leave_at} {number}")) for number in range(20)}
        assert len(chosen) > 1
        models = await http1(site.deployment.envoy.url + "/v1/models", method="GET")
        assert models.status == 200


async def test_unreadable_notice_keeps_the_last_pool(site: Site) -> None:
    await site.give_notice({})
    site.deployment.write(POOL, document(site.engines, {"left": "soon"}, version=100))
    await site.deployment.router.wait_for_line(r"leaveAt.*soon")
    page = await site.deployment.page(POOL)
    assert {name: each["state"] for name, each in page.items()} == dict.fromkeys(NAMES, "Active")
    assert json.loads((await site.ask("hello")).body)["usage"]


async def test_member_whose_time_has_passed_gets_nothing_and_may_end(site: Site) -> None:
    # This is the last test, because the engine is not started again.
    warm = prompt_of(40, seed="passed")
    home = await site.warmed(warm)
    await site.give_notice({home: time_text(time.time() - 1)})
    assert await site.chosen(warm) != home
    await site.engines[home].kill()
    for number in range(20):
        assert await site.chosen(prompt_of(4, seed=f"after {number}")) != home
