"""KV events of simulated engines: what the router predicts from them equals what the engines measure.

The token ids of requests come from the render endpoint of one of the engines. A request whose ids are late is routed by
the router's own record, which its receipt says. Such requests count in no comparison.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import http1
from harness.deployment import CHAT, Deployment
from harness.documents import document, receipt
from harness.stack import Engine, PoolMember
from harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

POOL = "qwen"
POOL_ID = f"llm/{POOL}"
BLOCK = 16
STALE = "dualmap_stale_hit_requests_total"
EVENTS = "dualmap_kv_events_total"
CACHE_TOKENS = 24_000
PROMPTS = 6
ANSWER_TOKENS = 40
TIMEOUT_S = 60.0
# A port that nothing uses.
REPLAY_PORT = 9
ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One request: its member, its prompt and cached tokens, and the cached tokens that the receipt predicted.

    The receipt of a request without token ids counts tokens by bytes. ``predicted`` is the same share of the prompt in
    the engine's tokens.
    """

    member: str
    source: str
    prompt_tokens: int
    predicted: int
    cached: int
    text: str


class Site:
    """Three engines with KV events, and two routers, each with its own Envoy, that share nothing."""

    def __init__(self, directory: Path) -> None:
        fast = ("--speed", "1000", "--cache-tokens", str(CACHE_TOKENS))
        self.engines = [
            Engine(directory=directory, name=f"engine-{number}", arguments=fast, kv_events=True) for number in range(3)
        ]
        self._directory = directory
        self.left: Deployment
        self.right: Deployment

    @property
    def renderer(self) -> str:
        """The URL of the engine that renders requests; tests do not stop this engine."""
        return f"http://{self.engines[0].endpoint}"

    def deployment(
        self, name: str, members: Sequence[PoolMember] = (), *, discovered: bool = True, **ports: int
    ) -> Deployment:
        """Return a router and an Envoy for these members, by default all engines, not yet started.

        Without ``discovered``, the ports of KV events are always ``ports``.
        """
        directory = self._directory / name
        directory.mkdir()
        members = members or [each.member for each in self.engines]
        engine = {
            "tokenizer": {"source": "Renderer", "url": self.renderer},
            "kvEvents": {"enabled": True, **ports},
            "discovery": {"enabled": discovered},
        }
        pool = document(POOL, list(members), engine=engine, routing={"policy": "cache_affinity_global"})
        return Deployment({POOL: pool}, mode=Mode.STREAMED, directory=directory)

    async def stop(self) -> None:
        await asyncio.gather(*(each.stop() for each in self.engines))


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="site")
async def _site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    site = Site(tmp_path_factory.mktemp("kv-events"))
    try:
        await asyncio.gather(*(each.start() for each in site.engines))
        site.left, site.right = site.deployment("left"), site.deployment("right")
        async with site.left, site.right:
            await wait_for_states(site.left, "Live")
            await wait_for_states(site.right, "Live")
            yield site
    finally:
        await site.stop()


def prompt_of(tokens: int, *, seed: str) -> str:
    """Return a prompt of about ``tokens`` tokens, with a different prefix for each ``seed``."""
    return f"{seed} " + "All work and no play makes Jack a dull boy. " * (tokens * 4 // 44)


async def events_of(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """Return what /pools says about each member's events."""
    return {member: each["engine"]["events"] for member, each in (await deployment.page(POOL)).items()}


async def wait_for_states(deployment: Deployment, *states: str) -> None:
    """Wait until every member's events are in one of these states."""

    async def reached() -> bool:
        return all(each["state"] in states for each in (await events_of(deployment)).values())

    try:
        await until(reached, f"the events are {states}", timeout_s=TIMEOUT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: {await events_of(deployment)}") from None


async def ask(deployment: Deployment, *texts: str, max_tokens: int = 1) -> Measured:
    """Send a conversation through Envoy and compare the receipt with the usage."""
    messages = [{"role": ROLES[index % 2], "content": text} for index, text in enumerate(texts)]
    reply = await deployment.ask({"model": f"{POOL}-model", "messages": messages, "max_tokens": max_tokens})
    assert reply.status == 200, reply
    answer, said = json.loads(reply.body), receipt(reply)
    usage = answer["usage"]
    return Measured(
        member=said["chosen"],
        source=said["source"],
        prompt_tokens=usage["prompt_tokens"],
        predicted=round(int(said["matched"]) * usage["prompt_tokens"] / int(said["prompt"]) / BLOCK) * BLOCK,
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        text=answer["choices"][0]["message"]["content"],
    )


async def ask_directly(engine: Engine, text: str) -> int:
    """Send a prompt past all routers; return its number of blocks."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()
    reply = await http1(f"http://{engine.endpoint}{CHAT}", body=body, headers={"content-type": "application/json"})
    assert reply.status == 200, reply
    return int(json.loads(reply.body)["usage"]["prompt_tokens"]) // BLOCK


async def known(deployment: Deployment, kind: str, act: Callable[[], Awaitable[int]]) -> None:
    """Act, and wait until the router knows the events of a kind, whose number ``act`` returns."""
    before = await deployment.metric(EVENTS, pool=POOL_ID, kind=kind)
    count = await act()

    async def received() -> bool:
        return await deployment.metric(EVENTS, pool=POOL_ID, kind=kind) >= before + count

    await until(received, f"{count} {kind} blocks are known", timeout_s=TIMEOUT_S)


async def send_directly(deployment: Deployment, engine: Engine, texts: Sequence[str]) -> None:
    """Send prompts past all routers, and wait until the router knows their blocks."""

    async def send() -> int:
        return sum([await ask_directly(engine, text) for text in texts])

    await known(deployment, "stored", send)


def from_events(measured: Sequence[Measured]) -> list[Measured]:
    """Return the requests whose prediction comes from events. Without a free CPU, token ids may be late."""
    told = [each for each in measured if each.source == "events"]
    assert told, measured
    return told


async def test_events_are_live_and_shown(site: Site) -> None:
    for deployment in (site.left, site.right):
        for each in (await deployment.page(POOL)).values():
            assert each["engine"]["reason"] == "serves [qwen-model], not qwen"
            assert each["engine"]["events"]["state"] == "Live"


async def test_predictions_equal_what_engines_measure(site: Site) -> None:
    """Prompts of several lengths, their repetition, and a second turn behind the first answer."""
    prompts = [prompt_of(100 + 37 * number, seed=f"equal {number}") for number in range(PROMPTS)]
    first: list[Measured] = []

    async def send() -> int:
        first.extend([await ask(site.left, each, max_tokens=ANSWER_TOKENS) for each in prompts])
        # The last token of an answer has no KV.
        return sum((each.prompt_tokens + ANSWER_TOKENS - 1) // BLOCK for each in first)

    await known(site.left, "stored", send)
    again = [await ask(site.left, each) for each in prompts]
    turns = zip(prompts, first, strict=True)
    longer = [await ask(site.left, prompt, answered.text, "And then?") for prompt, answered in turns]

    assert [(each.predicted, each.cached) for each in first] == [(0, 0)] * PROMPTS
    for each in from_events(again):
        assert each.predicted == each.cached > each.prompt_tokens - 2 * BLOCK, each
    for each in from_events(longer):
        assert each.predicted == each.cached > 0, each


async def test_prompts_of_another_router_are_predicted(site: Site) -> None:
    texts = [prompt_of(200 + 21 * number, seed=f"other {number}") for number in range(PROMPTS)]

    async def send() -> int:
        return sum([(await ask(site.right, text)).prompt_tokens // BLOCK for text in texts])

    await known(site.left, "stored", send)

    for each in from_events([await ask(site.left, text) for text in texts]):
        assert each.predicted == each.cached > each.prompt_tokens - 2 * BLOCK, each


async def test_prompts_past_all_routers_are_predicted(site: Site) -> None:
    texts = [prompt_of(200 + 21 * number, seed=f"past {number}") for number in range(PROMPTS)]

    await send_directly(site.left, site.engines[1], texts)

    for each in from_events([await ask(site.left, text) for text in texts]):
        assert each.member == site.engines[1].name
        assert each.predicted == each.cached > each.prompt_tokens - 2 * BLOCK, each


async def test_evictions_by_other_traffic_are_known(site: Site) -> None:
    engine = site.engines[2]
    texts = [prompt_of(300, seed=f"evicted {number}") for number in range(PROMPTS)]
    fillers = [prompt_of(CACHE_TOKENS // 5, seed=f"filler {number}") for number in range(6)]

    await send_directly(site.left, engine, texts)
    await send_directly(site.left, engine, fillers)
    stale = await site.left.metric(STALE, pool=POOL_ID)

    for each in from_events([await ask(site.left, text) for text in texts]):
        assert (each.predicted, each.cached) == (0, 0), each
    assert await site.left.metric(STALE, pool=POOL_ID) == stale


async def test_reset_cache_is_known_at_the_next_step(site: Site) -> None:
    engine = site.engines[1]
    texts = [prompt_of(200, seed=f"reset {number}") for number in range(PROMPTS)]

    async def reset() -> int:
        reply = await http1(f"http://{engine.endpoint}/reset_prefix_cache", method="POST", body=b"")
        assert reply.status == 200
        await ask_directly(engine, "the next step")
        return 1

    await send_directly(site.left, engine, texts)
    await known(site.left, "cleared", reset)

    for each in from_events([await ask(site.left, text) for text in texts]):
        assert (each.predicted, each.cached) == (0, 0), each


async def test_restarted_engine_begins_with_an_empty_cache(site: Site) -> None:
    engine = site.engines[2]
    texts = [prompt_of(200, seed=f"restart {number}") for number in range(PROMPTS)]

    async def shown(**wanted: object) -> bool:
        events = (await events_of(site.left))[engine.name]
        return all(events[name] == value for name, value in wanted.items())

    await send_directly(site.left, engine, texts)
    await engine.kill()
    await until(lambda: shown(state="Failed"), "the router knows of the lost engine", timeout_s=TIMEOUT_S)
    await engine.start()
    await until(lambda: shown(state="Live", blocks=0), "the router knows of the restart", timeout_s=TIMEOUT_S)

    for each in from_events([await ask(site.left, text) for text in texts]):
        assert (each.predicted, each.cached) == (0, 0), each


async def test_restarted_router_knows_the_caches_from_replays(site: Site) -> None:
    texts = [prompt_of(200 + 16 * number, seed=f"router {number}") for number in range(PROMPTS)]
    for text in texts:
        await ask(site.left, text)

    await site.left.kill_router()
    await site.left.restart_router()

    async def agreed() -> bool:
        left, right = [await events_of(each) for each in (site.left, site.right)]
        keys = ("state", "sequence", "blocks")
        return all(left[member][key] == right[member][key] for member in left for key in keys)

    await until(agreed, "both routers know the same", timeout_s=TIMEOUT_S)
    for each in from_events([await ask(site.left, text) for text in texts]):
        assert each.predicted == each.cached > each.prompt_tokens - 2 * BLOCK, each


async def test_publisher_that_hangs_delays_no_request(site: Site, tmp_path: Path) -> None:
    """Something listens at the port of a member's events, accepts connections, and says nothing."""
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    plain = Engine(directory=tmp_path, name="plain", arguments=("--speed", "1000"))
    try:
        ports = {"port": port, "replayPort": REPLAY_PORT}
        async with plain, site.deployment("hanging", [plain.member], discovered=False, **ports) as hanging:
            await until(lambda: has(accepted), "the router has connected", timeout_s=TIMEOUT_S)
            texts = [prompt_of(600, seed=f"hanging {number}") for number in range(3)]
            first = [await ask(hanging, text) for text in texts]
            again = [await ask(hanging, text) for text in texts]

            assert {each.source for each in (*first, *again)} == {"records"}
            assert all(each.predicted > 0 < each.cached for each in again)
            assert (await events_of(hanging))["plain"]["state"] == "Connecting"
    finally:
        for writer in accepted:
            writer.close()
        server.close()


async def has(things: Sequence[object]) -> bool:
    return bool(things)
