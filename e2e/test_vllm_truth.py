"""Compares what two routers predict with what three real vLLM engines report as cached, behind a real Envoy.

``make vllm`` installs vLLM and runs these tests. `make test` skips them, because vLLM takes 5 GB.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import pytest
import pytest_asyncio
from click.testing import CliRunner

from dualmap_cli.main import main
from harness.clients import Reply, http1
from harness.documents import document, receipt
from harness.replicas import Replicas
from harness.request_shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES, SHAPES, WEATHER
from harness.stack import Router
from harness.vllm import BLOCK_TOKENS, MODEL, PYTHON, Vllm, make_model
from harness.waiting import until
from redis_server import RedisServer

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="`make vllm` runs the tests with a real vLLM"),
]

POOL = "tiny"
ENGINES = 3
CLIENTS = 4
WORDS = [
    "import",
    "return",
    "yield",
    "async",
    "await",
    "class",
    "with",
    "from",
    "open",
    "close",
    "read",
    "write",
    "path",
    "value",
    "error",
    "test",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One answered request: the receipt's prediction beside the engine's report."""

    member: str
    source: str
    predicted: int
    cached: int
    prompt: int
    text: str

    @property
    def right(self) -> bool:
        """Whether the prediction is within one block of the engine's cached tokens."""
        return abs(self.predicted - self.cached) <= BLOCK_TOKENS

    @property
    def stale(self) -> bool:
        """Whether the router predicted a hit, and the engine had nothing of the prompt."""
        return self.predicted >= BLOCK_TOKENS and self.cached == 0


@dataclass(frozen=True, slots=True)
class Lab:
    """The engines, and the folder of the model that they serve."""

    engines: Sequence[Vllm]
    model: Path

    async def empty(self) -> None:
        """Empty the engines' caches. An engine reports it with its next step, so each computes a short prompt."""
        for number, engine in enumerate(self.engines):
            await engine.post("/reset_prefix_cache")
            await engine.post(
                "/v1/completions", {"model": MODEL, "prompt": text(f"warm {number}", 50), "max_tokens": 1}
            )

    def pool(
        self, *, events: bool, members: int = ENGINES, draining: str = "", version: int = 1, **engine: Any
    ) -> dict[str, Any]:
        """Return the pool of the first engines, with their KV events or with the routers' own records only."""
        known: dict[str, Any] = {"type": "vLLM", **engine}
        if events:
            files = {"source": "Files", "path": str(self.model)}
            known = {"tokenizer": files, "kvEvents": {"enabled": True}, **known}
        listed = [each.member for each in self.engines[:members]]
        pool = document(POOL, listed, version=version, engine=known)
        for each in pool["status"]["ring"]["members"]:
            each["state"] = "Draining" if each["id"] == draining else "Active"
        return pool

    @asynccontextmanager
    async def routed(
        self, directory: Path, *, events: bool, members: int = ENGINES, **engine: Any
    ) -> AsyncIterator[Replicas]:
        """Empty the engines' caches, and run two routers with a shared Redis and an Envoy in front of them."""
        await self.empty()
        redis = RedisServer(directory / "redis")
        redis.start()
        try:
            async with Replicas(
                {POOL: self.pool(events=events, members=members, **engine)},
                directory=directory,
                router_arguments=("--redis", redis.url),
            ) as replicas:
                if events:
                    await followed(replicas)
                yield replicas
        finally:
            redis.kill()


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="lab")
async def _lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """Three engines. They start one after the other, because each start takes a core."""
    directory = tmp_path_factory.mktemp("vllm")
    model = directory / "model"
    await asyncio.to_thread(make_model, model)
    engines = [Vllm(model, directory=directory, name=f"vllm-{number}") for number in range(ENGINES)]
    try:
        for engine in engines:
            await engine.start()
        yield Lab(engines, model)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def followed(replicas: Replicas) -> None:
    """Wait until both routers follow the events of all engines."""
    for router in replicas.routers:

        async def live(router: Router = router) -> bool:
            states = {each["engine"]["events"]["state"] for each in (await router.page(POOL)).values()}
            return states == {"Live"}

        await until(live, f"{router.name} follows all engines", timeout_s=60.0)


async def in_state(replicas: Replicas, member: str, state: str) -> None:
    """Wait until both routers have a member in this state."""
    for router in replicas.routers:

        async def has(router: Router = router) -> bool:
            return bool((await router.page(POOL))[member]["state"] == state)

        await until(has, f"{member} is {state} at {router.name}", timeout_s=30.0)


def text(seed: str, tokens: int) -> str:
    """Return a text of roughly this many tokens, which begins differently for each seed."""
    chooser = random.Random(seed)
    return f"{seed}: " + " ".join(chooser.choice(WORDS) for _ in range(tokens))


def chat(*messages: str, **fields: Any) -> dict[str, Any]:
    """Return a chat request of these messages, of the user and the assistant in turn."""
    roles = ("user", "assistant")
    listed = [{"role": roles[at % 2], "content": each} for at, each in enumerate(messages)]
    return {"model": MODEL, "messages": listed, "max_tokens": 8, "temperature": 0, **fields}


async def ask(replicas: Replicas, body: dict[str, Any], path: str = CHAT) -> Seen:
    """Send a request through Envoy; return the prediction and the engine's report."""
    data = json.dumps(body).encode()
    reply = await http1(replicas.envoy.url + path, body=data, headers={"content-type": "application/json"})
    assert reply.status == 200, reply
    answer, items = json.loads(reply.body), receipt(reply)
    prompt, cached = prompt_and_cached(answer["usage"])
    return Seen(
        member=items["chosen"],
        source=items["source"],
        predicted=int(items["matched"]),
        cached=cached,
        prompt=prompt,
        text=answer["choices"][0]["message"]["content"] if path == CHAT else "",
    )


async def ask_for_stream(replicas: Replicas, body: dict[str, Any], path: str) -> None:
    """Send a request through Envoy whose answer is a stream with usage."""
    options = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    data = json.dumps({**body, "stream": True, **options}).encode()
    reply = await http1(replicas.envoy.url + path, body=data, headers={"content-type": "application/json"})
    assert reply.status == 200, reply


async def total(replicas: Replicas, name: str) -> float:
    """Return the sum of both routers' values of a metric of the pool."""
    return sum([await router.metric(name, pool=f"llm/{POOL}") for router in replicas.routers])


def prompt_and_cached(usage: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of a prompt and the cached ones of them, from the usage of any API."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    # Anthropic's input tokens are those behind the blocks that were cached or are cached now.
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached


async def all_of(replicas: Replicas, bodies: Iterable[dict[str, Any]], *, clients: int = CLIENTS) -> list[Seen]:
    """Send requests through Envoy, several at a time."""
    rest, seen = iter(bodies), []

    async def client() -> None:
        for body in rest:
            seen.append(await ask(replicas, body))

    await asyncio.gather(*(client() for _ in range(clients)))
    return seen


def summary(name: str, seen: Sequence[Seen]) -> str:
    """Return a line with the shares of right predictions and of stale ones."""
    hits = [each for each in seen if each.predicted >= BLOCK_TOKENS]
    right, stale = sum(each.right for each in seen), sum(each.stale for each in seen)
    over = sum(each.predicted - each.cached > BLOCK_TOKENS for each in seen)
    tokens = sum(each.prompt for each in seen)
    return (
        f"| {name} | {len(seen)} | {share(sum(each.cached for each in seen), tokens)} | {share(right, len(seen))} "
        f"| {len(hits)} | {share(over, len(seen))} | {share(stale, len(hits))} |"
    )


def share(part: int, whole: int) -> str:
    """Return a share in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


async def conversation(replicas: Replicas, number: int, turns: int) -> list[Seen]:
    """Hold a conversation, in which each request repeats all earlier messages; a third share a beginning."""
    messages, seen = [text(f"shared {number % 6}", 90) + text(f"own {number}", 40)], []
    for turn in range(turns):
        seen.append(await ask(replicas, chat(*messages)))
        messages += [seen[-1].text, text(f"question {number} {turn}", 40)]
    return seen


async def test_predictions_are_within_one_block(lab: Lab, tmp_path: Path) -> None:
    async with lab.routed(tmp_path, events=True) as replicas:
        numbers, seen = iter(range(60)), []

        async def client() -> None:
            for number in numbers:
                seen.extend(await conversation(replicas, number, 5))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    print(summary("conversations, events", seen))
    wrong = [each for each in seen if not each.right]
    assert {each.source for each in seen} == {"events"}
    assert len({each.member for each in seen}) == ENGINES
    assert len(wrong) <= 0.02 * len(seen), wrong


async def stale_after_eviction(lab: Lab, replicas: Replicas) -> list[Seen]:
    """Cache prompts through the routers, fill the engines past the routers, and repeat the prompts.

    Half of the prompts are repeated once more, so that some predicted hits are real.
    """
    prompts = [chat(text(f"evicted {number}", 300), max_tokens=1) for number in range(48)]
    await all_of(replicas, prompts)
    # Three quarters of each cache.
    for number in range(5 * ENGINES):
        engine = lab.engines[number % ENGINES]
        others = {"model": MODEL, "prompt": text(f"other {number}", 1200), "max_tokens": 1}
        await engine.post("/v1/completions", others)
    seen = await all_of(replicas, prompts)
    return seen + await all_of(replicas, prompts[-12:])


async def stale_after_restart(lab: Lab, replicas: Replicas) -> list[Seen]:
    """Cache prompts through the routers, restart an engine, and repeat the prompts twice."""
    prompts = [chat(text(f"restarted {number}", 150), max_tokens=1) for number in range(36)]
    await all_of(replicas, prompts)
    engine = lab.engines[0]
    await engine.kill()
    await engine.start()
    await asyncio.sleep(3.0)
    return await all_of(replicas, prompts) + await all_of(replicas, prompts)


Scenario: TypeAlias = Callable[[Lab, Replicas], Awaitable[list[Seen]]]


@pytest.mark.parametrize("scenario", [stale_after_eviction, stale_after_restart], ids=lambda each: each.__name__)
async def test_stale_rate_is_below_one_percent_with_events(lab: Lab, tmp_path: Path, scenario: Scenario) -> None:
    name = scenario.__name__
    runs = {"records": {"discovery": {"enabled": False}}, "records and discovery": {}, "events": {}}
    stale = {}
    for each, engine in runs.items():
        directory = tmp_path / each.replace(" ", "-")
        directory.mkdir()
        async with lab.routed(directory, events=each == "events", **engine) as replicas:
            seen = await scenario(lab, replicas)
        print(summary(f"{name}, {each}", seen))
        hits = [one for one in seen if one.predicted >= BLOCK_TOKENS]
        stale[each] = sum(one.stale for one in hits) / len(hits)
    assert stale["events"] <= 0.01
    assert stale["records"] >= 0.1


async def test_salted_prompts_share_nothing(lab: Lab, tmp_path: Path) -> None:
    async with lab.routed(tmp_path, events=True, members=1) as replicas:
        prompt = text("salted", 200)
        for salt in ("tenant-1", "tenant-2", ""):
            body = chat(prompt, **({"cache_salt": salt} if salt else {}))
            first, second = await ask(replicas, body), await ask(replicas, body)
            # The answers share the beginning of the template only, which is less than a block.
            assert (first.source, first.predicted, first.cached) == ("events", 0, 0)
            assert second.cached >= 5 * BLOCK_TOKENS
            assert second.right


async def test_every_api_is_predicted_with_a_renderer(lab: Lab, tmp_path: Path) -> None:
    renderer = {"source": "Renderer", "url": lab.engines[0].url}
    long = text("rendered", 200)
    bodies = [
        (CHAT, chat(long, tools=[WEATHER], max_tokens=1)),
        (COMPLETIONS, {"prompt": long, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": list(range(100, 400)), "max_tokens": 1}),
        (MESSAGES, {"system": long, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        (RESPONSES, {"instructions": long + " respond", "input": "hi", "max_output_tokens": 1}),
    ]
    cached = 0
    async with lab.routed(tmp_path, events=True, tokenizer=renderer) as replicas:
        for path, body in bodies:
            first, second = [await ask(replicas, {**body, "model": MODEL}, path) for _ in range(2)]
            assert (first.source, second.source) == ("events", "events"), path
            assert first.right, (path, first)
            assert second.right, (path, second)
            assert second.cached >= 5 * BLOCK_TOKENS, (path, second)
            await ask_for_stream(replicas, {**body, "model": MODEL}, path)
            cached += first.cached + 2 * second.cached

        async def counted() -> bool:
            return await total(replicas, "dualmap_measured_cached_tokens_total") == cached

        await until(counted, f"the routers count {cached} cached tokens", timeout_s=10.0)
        assert await total(replicas, "dualmap_tokenizer_mismatches_total") == 0


async def test_reset_cache_is_stale_for_one_request_at_most(lab: Lab, tmp_path: Path) -> None:
    async with lab.routed(tmp_path, events=True) as replicas:
        prompts = [chat(text(f"reset {number}", 150), max_tokens=1) for number in range(30)]
        held = {each.member for each in await all_of(replicas, prompts)}
        assert len(held) == ENGINES
        await lab.engines[0].post("/reset_prefix_cache")
        # The engine reports the reset with its next step, which is the first request's.
        seen = await all_of(replicas, prompts, clients=1)

    print(summary("reset of one engine, events", seen))
    assert sum(not each.right for each in seen) <= 1
    assert sum(each.cached == 0 for each in seen) >= 5


async def test_draining_engine_finishes_its_streams(lab: Lab, tmp_path: Path) -> None:
    async with lab.routed(tmp_path, events=True) as replicas:
        await all_of(replicas, (chat(text(f"before {number}", 150), max_tokens=1) for number in range(12)))
        opened: list[str] = []

        async def stream(number: int) -> str:
            body = chat(text(f"stream {number}", 100), max_tokens=300, ignore_eos=True, stream=True)
            async with (
                aiohttp.ClientSession() as http,
                http.post(
                    replicas.envoy.url + CHAT, json={**body, "stream_options": {"include_usage": True}}
                ) as answer,
            ):
                assert answer.status == 200
                opened.append(receipt(Reply(headers=dict(answer.headers)))["chosen"])
                return await answer.text()

        async def all_opened() -> bool:
            return len(opened) == 12

        streams = [asyncio.create_task(stream(number)) for number in range(12)]
        await until(all_opened, "all streams are open", timeout_s=30.0)
        replicas.write(POOL, lab.pool(events=True, draining=lab.engines[0].name, version=2))
        await in_state(replicas, lab.engines[0].name, "Draining")
        others = await all_of(replicas, (chat(text(f"during {number}", 150), max_tokens=1) for number in range(12)))
        ends = await asyncio.gather(*streams)
        replicas.write(POOL, lab.pool(events=True, version=3))
        await in_state(replicas, lab.engines[0].name, "Active")
        await followed(replicas)
        after = await all_of(replicas, (chat(text(f"before {number}", 150), max_tokens=1) for number in range(12)))

    print(summary("after a drain, events", after))
    assert lab.engines[0].name in opened
    assert lab.engines[0].name not in {each.member for each in others}
    assert all(each.rstrip().endswith("data: [DONE]") and '"completion_tokens":300' in each for each in ends)
    assert all(each.right for each in after)


@pytest.mark.parametrize("name", SHAPES)
async def test_request_has_the_engines_token_ids(lab: Lab, tmp_path: Path, name: str) -> None:
    path, shape = SHAPES[name]
    engine = lab.engines[0]
    body = {"model": MODEL, **shape, "max_output_tokens" if path == RESPONSES else "max_tokens": 1}
    request = tmp_path / "request.json"
    request.write_text(json.dumps(body))
    usage = (await engine.post(path, body))["usage"]
    expected, _ = prompt_and_cached(usage)
    renderer = {"source": "Renderer", "url": engine.url}
    files = {"source": "Files", "path": str(lab.model)}
    by_files = path in (CHAT, COMPLETIONS) and name != "token ids"
    for tokenizer in (renderer, files) if by_files else (renderer,):
        pool = tmp_path / "pool.json"
        pool.write_text(json.dumps(document(POOL, [engine.member], engine={"tokenizer": tokenizer})))
        command = ["tokenize", "--pool", str(pool), "--request", str(request), "--engine", engine.url, "--json"]
        result = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["tokens"], found["engine"]["equal"]) == (expected, True)
